"""Peers that speak the protocol well, and lie: what they say of themselves and of others is not
believed without a bound or a witness, and all others go on."""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import grpc
import pytest

from kvstore import calls
from kvstore.calls import MasterAccepted, MasterMessage, NodeBeat, NodeJoin, NodeMessage
from kvstore.errors import KVStoreError, UnavailableError
from kvstore.limits import EPOCH_AHEAD_MAX, EPOCH_MAX, PROTOCOL_VERSION
from kvstore.memory import alive
from kvstore.memory import header as layout
from kvstore.network.host import host_id
from kvstore.wire.messages import CALLS, encode_request
from kvstore.wire.node_messages import (
    SESSION_PATH,
    decode_master_message,
    encode_node_message,
)
from kvstore.wire.status import detail_of, from_grpc
from tests.support.cluster import NODE, SHORT, Cluster, unique_name
from tests.support.processes import ROOT
from tests.support.waiting import until

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


# --- memory and devices ------------------------------------------------------------------------

PUT = """
import sys
from kvstore import Client
from kvstore.errors import KVStoreError, UnavailableError
with Client(sys.argv[1], timeout_ms=3_000) as client:
    try:
        client.put("k", b"BLOCK" * 1000)
    except KVStoreError as error:
        print(type(error).__name__)
"""
"""Of a program of a user: what these tests have made known in this process is not known there."""


CHILD: dict[str, Any] = {
    "capture_output": True, "text": True, "cwd": ROOT, "timeout": 60
}  # fmt: skip


@contextlib.contextmanager
def made_entry(size: int, *, mode: int, on_device: bool = True) -> Iterator[tuple[str, bytes]]:
    """What any process may put into ``/dev/shm``: name and uuid."""
    name, uuid = f"kvstore.{unique_name()}-lie", secrets.token_bytes(16)
    path = f"/dev/shm/{name}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        os.fchmod(fd, mode)
        os.ftruncate(fd, layout.SUPERBLOCK_BYTES if on_device else size)
        alive.hold(fd, layout.ALIVE_OFFSET)
        os.pwrite(fd, layout.pack_superblock(layout.Superblock(uuid, "liar", size, 7, 1)), 0)
        owner = layout.Owner(on_device=on_device)
        os.pwrite(fd, layout.pack_owner(owner), layout.OWNER_OFFSET)
        yield name, uuid
    finally:
        os.close(fd)
        os.unlink(path)


@pytest.mark.parametrize(("device", "mode"), [("fake:0", 0o600), ("cuda:0", 0o600), ("", 0o666)])
def test_no_client_opens_what_a_node_only_names(
    cluster: Cluster, tmp_path: Path, device: str, mode: int
) -> None:
    """A file of another process by the path of its descriptor, and an entry that no node made."""
    cluster.master()
    size = 1 << 20
    victim = tmp_path / "precious"
    victim.write_bytes(b"precious" * (size // 8))
    before = victim.read_bytes()
    with (
        victim.open("r+b") as held,
        made_entry(size, mode=mode, on_device=bool(device)) as (name, uuid),
    ):
        offer = calls.SegmentOffer(size, uuid, "" if device else name, "", bytes(16), 7, 1, True)
        if device:
            handle = f"{os.getpid()}/{held.fileno()}/{size}"
            offer = offer._replace(device=calls.DevicePlace(device, name, handle))
        with LyingNode(cluster.address, join_of(segments=[offer])) as liar:
            liar.hear()
            command = [sys.executable, "-c", PUT, cluster.address]
            said = subprocess.run(command, check=False, **CHILD)
            assert said.stdout.strip(), f"stored in such memory, or a traceback: {said.stderr}"
            assert b"BLOCK" not in Path("/dev/shm", name).read_bytes()
    assert victim.read_bytes() == before


@pytest.mark.parametrize("device", ["fake:0", "nothing:0"])
def test_a_node_cannot_be_told_to_use_a_device_of_tests(cluster: Cluster, device: str) -> None:
    cluster.master()
    flags = ["--master", cluster.address, "--memory", "1MiB", "--http-port", "0", "--no-keep"]
    command = [sys.executable, "-m", NODE, *flags, "--name", unique_name(), "--device", device]
    said = subprocess.run(command, check=False, **CHILD)
    assert said.returncode
    assert f"{device} is no device" in said.stderr
    assert "Traceback" not in said.stderr


def test_memory_of_a_node_is_not_offered_by_another_one(cluster: Cluster) -> None:
    """Clients would be sent to the liar, and what the liar says of it would count."""
    cluster.start()
    client = cluster.client()
    client.put("kept", b"value")
    [node] = cluster.status().nodes
    with cluster.nodes[0].entry.open("rb") as memory:
        superblock = layout.unpack_superblock(memory.read(layout.SUPERBLOCK_BYTES))
    assert superblock is not None
    offer = join_of().segments[0]._replace(uuid=superblock.uuid, fresh=False)
    held = pytest.raises(UnavailableError, match=f"mounted by node {node.name}")
    with LyingNode(cluster.address, join_of(segments=[offer])) as liar, held:
        liar.hear()
    assert [each.name for each in cluster.status().nodes] == [node.name]
    assert client.get("kept") == b"value"


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
        cluster.master_server.kill()
        cluster.master()
    with node.entry.open("rb") as memory:
        memory.seek(layout.EPOCH_OFFSET)
        epoch, check = struct.unpack("<QQ", memory.read(16))
    assert epoch < time.time_ns() // 1_000_000 + YEAR_MS
    assert check == layout.check_of(epoch)
