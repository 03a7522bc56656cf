"""Events by ZeroMQ, read as routers read those of vLLM."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import zmq

from kvstore.limits import FLEET_NAMESPACE
from tests.integration.test_http import child_of
from tests.support.cluster import Cluster
from tests.support.processes import free_port
from tests.support.wait import until


class Subscriber:
    """Applies batches; asks for those that it missed."""

    def __init__(self, at: str, replay_at: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.subscribe(topic)
        self.socket.connect(at)
        self.replay_at = replay_at
        self.topics: set[str] = set()
        self.cleared = 0
        self.last = -1
        self.visible: dict[str, set[tuple[str, str]]] = {}
        self.maps: list[dict[str, Any]] = []

    def read(self, *, within_s: float = 0.3) -> None:
        """All that comes until it is quiet for so long."""
        while self.socket.poll(int(within_s * 1000)):
            topic, number, payload = self.socket.recv_multipart()
            if 0 <= self.last < int.from_bytes(number, "big") - 1:
                for batch in self.ask_again(self.last + 1):
                    self.apply(*batch)
            if self.last < int.from_bytes(number, "big"):
                self.apply(topic, number, payload)

    def apply(self, topic: bytes, number: bytes, payload: bytes) -> None:
        self.last = int.from_bytes(number, "big")
        self.topics.add(topic.decode())
        told_at, events, rank = msgpack.unpackb(payload)
        assert rank == 0
        assert abs(told_at - time.time()) < 600
        of_topic = self.visible.setdefault(topic.decode(), set())
        for event in events:
            if event["type"] == "AllBlocksCleared":
                of_topic.clear()
                self.cleared += 1
                continue
            self.maps.append(event)
            assert event["medium"] == "STORAGE"
            name = event["tenant_id"], event["object_key"]
            if event["type"] == "BlockStored":
                of_topic.add(name)
            else:
                of_topic.discard(name)

    def ask_again(self, first: int) -> list[list[bytes]]:
        request = self.context.socket(zmq.DEALER)
        request.connect(self.replay_at)
        request.send_multipart([b"", first.to_bytes(8, "big")])
        found: list[list[bytes]] = []
        while request.poll(10_000):
            empty, topic, number, payload = request.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                request.close(0)
                return found
            found.append([topic, number, payload])
        pytest.fail("the replay has no end")

    def close(self) -> None:
        self.context.destroy(0)

    @property
    def names(self) -> set[tuple[str, str]]:
        return set().union(*self.visible.values())


@pytest.fixture
def published(cluster: Cluster) -> Iterator[tuple[Cluster, Subscriber]]:
    at, replay_at = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    cluster.settings |= {"http_port": free_port(), "events": f"{at},{replay_at}"}
    cluster.master()
    cluster.node()
    subscriber = Subscriber(at, replay_at)
    yield cluster, subscriber
    subscriber.close()


def test_routers_read_what_is_there(published: tuple[Cluster, Subscriber]) -> None:
    cluster, subscriber = published
    record = {
        "models": ["org/model", "m"], "block_size": 16, "namespaces": ["vllm/f/g1/p0t0"],
        "fingerprint": "f", "description": {},
    }  # fmt: skip
    client = cluster.client(namespace="vllm/f/g1/p0t0")
    of_a_stranger = {"models": ["\ud800"], "block_size": 1 << 64, "namespaces": ["other"]}
    client.put(b"m/a", json.dumps(of_a_stranger).encode(), namespace=FLEET_NAMESPACE)
    client.put(b"model/f", json.dumps(record).encode(), namespace=FLEET_NAMESPACE)

    def told() -> bool:
        client.put(b"first", b"", overwrite=True)
        subscriber.read()
        return "kv@pool:kvstore@org/model" in subscriber.topics

    until(told)
    hashes = [bytes([0xFF]) * 24 + number.to_bytes(8, "big") for number in (1, 2**63)]
    client.put_chain(hashes, [b"x" * 10, b"y" * 20])
    subscriber.read()
    first, second = subscriber.maps[-2:]
    assert first["block_hashes"] == [1]
    assert first["parent_block_hash"] is None
    assert second["block_hashes"] == second["seq_hashes"] == [2**63]
    assert second["parent_block_hash"] == 1
    assert (second["block_size"], second["group_idx"], second["size"]) == (16, 1, 20)
    assert second["object_key"] == hashes[1].hex()
    client.remove(b"first")
    client.put(b"of nobody", b"", namespace="other")
    subscriber.read()
    assert subscriber.topics == {
        "kv@pool:kvstore@org/model", "kv@pool:kvstore@other", "kv@pool:kvstore@vllm-fleet"
    }  # fmt: skip
    assert subscriber.names == {
        ("vllm/f/g1/p0t0", hashes[0].hex()), ("vllm/f/g1/p0t0", hashes[1].hex()),
        ("other", "of nobody"), ("vllm-fleet", "m/a"), ("vllm-fleet", "model/f"),
    }  # fmt: skip

    # One that comes later replays.
    later = Subscriber(*cluster.settings["events"].split(","))
    for batch in later.ask_again(0):
        later.apply(*batch)
    assert later.names == subscriber.names
    assert later.last == subscriber.last
    assert len(later.ask_again(later.last)) == 1
    assert later.ask_again(later.last + 1) == []
    later.close()


def test_a_subscriber_stays_right_when_the_child_or_the_master_is_killed(
    published: tuple[Cluster, Subscriber],
) -> None:
    cluster, subscriber = published
    client = cluster.client(namespace="n")

    def agrees() -> bool:
        subscriber.read()
        return subscriber.names == {
            (row.namespace, row.key.decode()) for row in client.list_objects()
        }

    for number in range(300):
        client.put(b"%d" % number, b"")
    client.put(b"again", b"", overwrite=True)
    until(agrees)
    os.kill(child_of(cluster.master_server), signal.SIGKILL)
    client.remove(b"7")
    client.put(b"new", b"")
    until(agrees)
    cleared = subscriber.cleared
    cluster.master_server.kill()
    cluster.master()
    client.remove(b"8")
    until(lambda: len(list(client.list_objects())) == 300)
    until(agrees)
    assert subscriber.cleared > cleared
