"""With identities a node that looks through its memory finds what its master has granted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.test_restarts import (
    check,
    counter,
    fill,
    kill_master,
    objects,
    restarted,
)
from tests.support.certificates import Identities
from tests.support.cluster import SHORT, Cluster


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SHORT, identities=Identities(tmp_path)) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_master_and_a_killed_node_find_everything_again(
    cluster: Cluster, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_CLIENT_TRANSPORTS", transport)
    cluster.start()
    (node,) = cluster.nodes
    fill(cluster)
    count = objects(cluster)
    kill_master(cluster)
    cluster.master()
    check(cluster)
    assert counter(cluster, "recovered_objects") == count
    node.kill()
    kill_master(cluster)
    cluster.master()
    again = restarted(cluster, node)
    check(cluster)
    assert "headers_without_mac" not in node.errors + again.errors
    again.kill()
    restarted(cluster, again)
    check(cluster)
