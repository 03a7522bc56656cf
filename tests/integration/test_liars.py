"""Peers that speak the protocol well, and lie: what they say of themselves and of others is not
believed without a bound or a witness, and all others go on."""

from __future__ import annotations

import contextlib
import queue
import struct
import time
from collections.abc import Callable
from typing import Any, Self

import grpc
import pytest

from kvstore import calls
from kvstore.calls import MasterAccepted, MasterMessage, NodeBeat, NodeJoin, NodeMessage
from kvstore.errors import KVStoreError
from kvstore.host import host_id
from kvstore.limits import EPOCH_AHEAD_MAX, EPOCH_MAX, PROTOCOL_VERSION
from kvstore.memory import header as layout
from kvstore.wire.messages import CALLS, encode_request
from kvstore.wire.node_messages import (
    SESSION_PATH,
    decode_master_message,
    encode_node_message,
)
from kvstore.wire.status import detail_of, from_grpc
from tests.integration.cluster import SHORT, Cluster, until

LIES = 20
YEAR_MS = 365 * 86_400_000
JOIN = CALLS[calls.Join]


class LyingNode:
    """One stream of a node that says whatever it is told to say, and beats."""

    def __init__(self, address: str, join: NodeJoin) -> None:
        self._says: queue.SimpleQueue[NodeMessage | None] = queue.SimpleQueue()
        self._says.put(join)
        self._channel = grpc.insecure_channel(address)
        session: Any = self._channel.stream_stream(SESSION_PATH)
        self._stream = session(iter(self._next, b""), timeout=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._says.put(None)
        self._stream.cancel()
        self._channel.close()

    def _next(self) -> bytes:
        try:
            message = self._says.get(timeout=0.3)
        except queue.Empty:
            message = NodeBeat(1)
        return b"" if message is None else encode_node_message(message)

    def say(self, message: NodeMessage) -> None:
        self._says.put(message)

    def leave(self) -> None:
        """Returns when the master has heard it."""
        self._says.put(calls.NodeLeave())
        self._says.put(None)
        with contextlib.suppress(grpc.RpcError):
            for _ in self._stream:
                pass

    def hear(self) -> MasterMessage:
        """Raises KVStoreError: the master has ended the stream."""
        try:
            return decode_master_message(next(self._stream))
        except grpc.RpcError as error:
            raise from_grpc(error.code(), error.details(), detail_of(error)) from None


def join_of(name: str = "liar", **more: Any) -> NodeJoin:
    offer = calls.SegmentOffer(1 << 20, name.encode().ljust(16), "", "", bytes(16), 1, 1, True)
    return NodeJoin(name, host_id(), PROTOCOL_VERSION, 0, [offer])._replace(**more)


def told_by_client(address: str, epoch: int) -> None:
    with grpc.insecure_channel(address) as channel, contextlib.suppress(grpc.RpcError):
        request = encode_request(calls.Join("liar", "h", PROTOCOL_VERSION, highest_epoch=epoch))
        join: Any = channel.unary_unary(JOIN.path)
        join(request, timeout=5)


def told_by_node(address: str, epoch: int) -> None:
    join = join_of(highest_epoch=epoch)
    with LyingNode(address, join) as liar, contextlib.suppress(KVStoreError):
        assert isinstance(liar.hear(), MasterAccepted)
        liar.leave()


# --- epochs ------------------------------------------------------------------------------------


def believed(epoch: int, number: int) -> int:
    return epoch + (YEAR_MS if number % 2 else number + 1)


def not_believed(epoch: int, number: int) -> int:
    absurd = (2 * EPOCH_AHEAD_MAX + epoch, EPOCH_MAX - (1 << 20), EPOCH_MAX, (1 << 64) - 1)
    return absurd[number % len(absurd)]


@pytest.mark.parametrize("lie", [believed, not_believed])
@pytest.mark.parametrize("says", [told_by_client, told_by_node])
def test_a_lie_about_epochs_is_survived_by_all(
    cluster: Cluster, says: Callable[[str, int], None], lie: Callable[[int, int], int]
) -> None:
    """Also by clients and nodes from before, and over restarts of the master and of the node."""
    cluster.settings |= SHORT
    cluster.start()
    node, client = cluster.nodes[0], cluster.client()
    client.put("kept", b"value")
    epoch = cluster.status().epoch
    for number in range(LIES):
        says(cluster.address, lie(epoch, number))
    until(lambda: client.get("kept") == b"value")
    assert cluster.master_server is not None
    terms = cluster.master_server.errors.count("epoch_outrun")
    assert terms == (says is told_by_node and lie is believed), "one term, and of a client none"
    if not terms:
        assert cluster.status().epoch == epoch
    for _ in range(2):
        cluster.master_server.kill()
        cluster.master()
        until(lambda: client.get("kept") == b"value")
        client.put("put", b"x", overwrite=True, wait_ms=8_000)
    node.kill()
    cluster.node(name=node.name)
    until(lambda: client.get("kept") == b"value")


def test_memory_that_was_led_to_the_end_of_epochs_is_used_again(cluster: Cluster) -> None:
    """By a release that believed anybody: neither the node nor the objects are lost."""
    cluster.settings |= SHORT
    cluster.start()
    node, client = cluster.nodes[0], cluster.client()
    client.put("kept", b"value")
    node.kill()
    end = EPOCH_MAX + 77
    with node.entry.open("r+b") as memory:
        memory.seek(layout.EPOCH_OFFSET)
        memory.write(struct.pack("<QQ", end, layout.check_of(end)))
        memory.seek(layout.MARK_OFFSET)
        memory.write(struct.pack("<QQ", end, 5))
    for restart in range(2):
        again = cluster.node(name=node.name)
        until(lambda: client.get("kept") == b"value")
        client.put(f"put-{restart}", b"x", wait_ms=8_000)
        client.remove(f"put-{restart}")
        again.kill()
        assert cluster.master_server is not None
        cluster.master_server.kill()
        cluster.master()
    with node.entry.open("rb") as memory:
        memory.seek(layout.EPOCH_OFFSET)
        epoch, check = struct.unpack("<QQ", memory.read(16))
    assert epoch < time.time_ns() // 1_000_000 + YEAR_MS
    assert check == layout.check_of(epoch)
