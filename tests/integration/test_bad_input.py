"""What is asked wrongly: a typed error with fields and advice, and everything goes on."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import PutOutcome
from kvstore.errors import (
    BatchTooLargeError,
    InvalidKeyError,
    KVStoreError,
    ValueTooLargeError,
)
from kvstore.limits import BATCH_KEYS_MAX, MATCH_KEYS_MAX
from tests.integration.conftest import either_client
from tests.support.cluster import MASTER, NODE, Cluster, entry, unique_name
from tests.support.network_namespaces import need_own_shm, own_shm
from tests.support.processes import free_port

STORED = PutOutcome.STORED


@pytest.fixture(params=["lane", "grpc", "async-lane", "async-grpc"])
def verbs(request: pytest.FixtureRequest, store: Cluster) -> Iterator[Any]:
    """Still useful after whatever was asked of it."""
    *kind, carrier = request.param.split("-")
    with either_client(kind[0] if kind else "sync", store.address, lane=carrier == "lane") as made:
        yield made
        made.put("still", b"here", overwrite=True)
        assert made.get("still") == b"here"


def told(error: KVStoreError, **fields: object) -> None:
    """The error says what to do, and has these fields."""
    assert error.advice
    assert {key: error.fields.get(key) for key in fields} == fields


# --- keys and values ---------------------------------------------------------------------------


@pytest.mark.parametrize("key", [b"", "", b"x" * 257, "ä" * 129, 7, None, ["a"], bytearray(b"a")])
def test_what_is_no_key(verbs: Any, key: Any) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: verbs.put(key, b"x"),
        lambda: verbs.put_many([("fine", b"x"), (key, b"x")]),
        lambda: verbs.put_chain([key], [b"x"]),
        lambda: verbs.put("k", b"x", parent=key if key is not None else b""),
        lambda: verbs.get(key),
        lambda: verbs.get(key, copy=False),
        lambda: verbs.get_into([key], [bytearray(1)]),
        lambda: verbs.match_prefix([key]),
        lambda: verbs.exists(key),
        lambda: verbs.stat(key),
        lambda: verbs.remove(key),
    ]
    for attempt in attempts:
        with pytest.raises(InvalidKeyError) as caught:
            attempt()
        told(caught.value)
        if isinstance(key, str | bytes):
            size = len(key.encode() if isinstance(key, str) else key)
            told(caught.value, key_bytes=size)
    assert not verbs.exists("fine")


def test_a_value_larger_than_any_segment(verbs: Any) -> None:
    segment = verbs.status().nodes[0].segments[0]
    value = np.zeros(segment.size, np.uint8)
    attempts: list[Callable[[], object]] = [
        lambda: verbs.put("k", value),
        lambda: verbs.put_many([("fine", b"x"), ("k", value)]),
        lambda: verbs.allocate(segment.size, kind="numpy"),
    ]
    for attempt in attempts:
        with pytest.raises(ValueTooLargeError) as caught:
            attempt()
        told(caught.value, size_bytes=segment.size)
        assert int(caught.value.fields["segment_bytes_max"]) < segment.size
    assert not verbs.exists("fine")


def test_a_batch_over_the_bound(verbs: Any) -> None:
    keys = [number.to_bytes(4, "big") for number in range(BATCH_KEYS_MAX + 1)]
    attempts: list[Callable[[], object]] = [
        lambda: verbs.put_many((key, b"") for key in keys),
        lambda: verbs.put_chain(keys, [b""] * len(keys)),
        lambda: verbs.get_many(keys),
        lambda: verbs.exists_many(keys),
        lambda: verbs.remove_many(keys),
        lambda: verbs.get_into(keys, [bytearray(1)] * len(keys)),
    ]
    for attempt in attempts:
        with pytest.raises(BatchTooLargeError) as caught:
            attempt()
        told(caught.value, keys=BATCH_KEYS_MAX + 1, keys_max=BATCH_KEYS_MAX)
    with pytest.raises(BatchTooLargeError) as caught:  # a long chain is asked for in pieces
        verbs.match_prefix([b"k"] * (MATCH_KEYS_MAX + 1))
    told(caught.value, keys=MATCH_KEYS_MAX + 1, keys_max=MATCH_KEYS_MAX)
    assert verbs.match_prefix(keys) == 0
    assert verbs.exists_many(keys[:-1]) == [False] * BATCH_KEYS_MAX


# --- processes that cannot start ---------------------------------------------------------------


def refused(cluster: Cluster, module: str, settings: dict[str, Any], *says: str) -> None:
    """The command ends with 1, says this in one line, and leaves nothing behind."""
    server = cluster.launch(module, settings)
    assert server.wait() == 1
    server.close()
    (message,) = [line for line in server.errors.splitlines() if line.startswith("kvstore-")]
    for word in says:
        assert word in message
    assert "Traceback" not in server.errors
    name = settings.get("name")
    if name is not None and name not in {node.name for node in cluster.nodes}:
        assert not entry(name).exists()


def test_a_port_in_use(store: Cluster) -> None:
    port = store.settings["port"]
    said = f"{port}, for gRPC, is in use: a gRPC server answers there"
    refused(store, MASTER, {"port": port, "lane_port": free_port()}, said, "another --port")
    refused(store, MASTER, {"port": 0, "lane_port": store.lane_port}, "the lane, is in use", "lane")
    with socket.create_server(("127.0.0.1", 0)) as taken:  # one that says nothing
        port = taken.getsockname()[1]
        said = f"{port}, for the lane, is in use."
        refused(store, MASTER, {"port": port - 1}, said, "--lane-port")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = {"master": store.address, "name": unique_name(), "memory": "8MiB"}
        refused(store, NODE, node | {"port": port}, str(port), "in use")


def test_shared_memory_that_is_too_small(store: Cluster) -> None:
    node = {"master": store.address, "name": unique_name()}
    refused(store, NODE, node | {"memory": "60TiB"}, "/dev/shm", "MiB left", "Ask for less")
    refused(store, MASTER, {"port": 0, "memory": "60TiB"}, "/dev/shm", "MiB left")


def test_a_second_node_of_the_same_name(store: Cluster) -> None:
    name = store.nodes[0].name
    again = {"master": store.address, "name": name, "memory": "8MiB"}
    refused(store, NODE, again, name, "belongs to a running process", "another node name")
    assert store.state_of(store.nodes[0]) == "alive"


def test_shared_memory_of_another_host_is_not_mistaken_for_ours(
    store: Cluster, tmp_path: Path
) -> None:
    """Same kernel, same name in ``/dev/shm``, another file system: it is reached by tcp."""
    need_own_shm()
    elsewhere = Cluster(tmp_path, prefix=own_shm("size=64m"))
    settings = {"master": store.address, "name": unique_name(), "memory": "16MiB"}
    server = elsewhere.launch(NODE, settings)
    try:
        server.line("serves")
        client = store.client()
        hosts = {node.host for node in client.status().nodes}
        assert len(hosts) == 2
        assert client.put("k", b"x" * 1000, replicas=2) is STORED
        stat = client.stat("k")
        assert stat is not None
        assert stat.detail.row is not None
        assert stat.detail.row.replicas == 2
        assert client.get("k") == b"x" * 1000
    finally:
        assert server.terminate() == 0
        server.close()
