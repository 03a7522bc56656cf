"""Hosts that are suspended and go on: what was promised to them has ended meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.suspending import Suspended
from tests.support.cluster import Cluster
from tests.support.remote import Remote, RemoteError


@pytest.fixture
def suspended(tmp_path: Path) -> Suspended:
    return Suspended(tmp_path)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_client_believes_no_promise_of_before(
    tmp_path: Path, suspended: Suspended, transport: str, compiled: bool
) -> None:
    cluster = Cluster(tmp_path)
    prefix = [*suspended.prefix, *([] if compiled else ["KVSTORE_NATIVE=0"])]
    one: Remote | None = None
    try:
        cluster.start()
        one = Remote(cluster.address, {"transports": [transport]}, prefix)
        one.ask("client.put('key', b'value').name")
        for _ in range(2):  # the second read leases by time
            assert one.ask("client.get('key').decode()") == "value"
        held = []
        if transport == "shm":
            one.ask("workers.update(view=client.get('key', copy=False, kind='numpy'))")
            one.ask("workers.update(own=client.allocate(100, kind='numpy'))")
            held = ["client.lease(workers['view']).held", "client.lease(workers['own']).held"]
        assert all(one.ask(each) for each in held)
        cluster.master_server.freeze()
        try:
            assert one.ask("client.get('key', timeout_ms=300).decode()") == "value", "leased"
            suspended.sleep(3_600)
            assert not any(one.ask(each) for each in held)
            with pytest.raises(RemoteError, match="no reply from the master"):
                one.ask("client.get('key', timeout_ms=300)")
        finally:
            cluster.master_server.resume()
        assert one.ask("client.get('key').decode()") == "value"
        one.ask("client.put('other', b'value').name")
        assert one.took_s < 2.0
        one.close()
        one = None
        cluster.finish()
    finally:
        if one is not None:
            one.close()
        cluster.close()
