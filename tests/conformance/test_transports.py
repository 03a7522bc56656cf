"""Every rule of ``kvstore.transport.base``, for every transport, against a node in another process.

What a rule means where the peer's death does not matter (shared memory) is said in the test.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import xxhash

from kvstore import native
from kvstore.config import P2P
from kvstore.errors import (
    BusyError,
    ClosedError,
    DeadlineExceededError,
    InvalidRangeError,
    NodeUnreachableError,
    PermissionDeniedError,
    SegmentUnmountedError,
)
from kvstore.memory.header import HEADER_BYTES, SUPERBLOCK_BYTES
from kvstore.native import pure_python
from kvstore.native.interface import STALE, ReadRow
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import HELLO_BYTES, RANGE_BYTES, RANGES_MAX, REQUEST_BYTES
from kvstore.transport import tcp_client
from kvstore.transport.base import PIECE_BYTES, Transport
from kvstore.transport.common import RangeCopy
from kvstore.transport.device import DeviceTransport
from kvstore.transport.mooncake.transport import MooncakeTransport
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp import TcpTransport
from tests.conformance.peer import Peer
from tests.support.encryption import shared_ends
from tests.support.programs import ENGINE, engine_or_skip_reason, need_engine

MIB = 1 << 20
SEGMENT_BYTES = 64 * MIB
LARGE_BYTES = 48 * MIB
"""More than sockets buffer: in the middle of it both ends are at work."""

TRANSPORTS: dict[str, Callable[[], Transport]] = {
    "shm": ShmTransport,
    "tcp": TcpTransport,
    "mooncake": lambda: MooncakeTransport(ENGINE),
    "device": lambda: DeviceTransport(8 * MIB),
    "tcp-device": TcpTransport,
    "tcp-tls": lambda: TcpTransport(tls=shared_ends().client()),
}
"""``device`` and ``tcp-device``: to a segment in the memory of a device; ``tcp-tls``: to a node
that encrypts."""
NEEDS_NO_OWNER = ("shm", "device")
"""Copy without the node's process."""
METADATA = P2P if engine_or_skip_reason() is None else ""


@pytest.fixture(scope="module")
def host_peer() -> Iterator[Peer]:
    peer = Peer(f"conformance-{os.getpid()}", SEGMENT_BYTES, engine=METADATA)
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def device_peer() -> Iterator[Peer]:
    peer = Peer(f"conformance-device-{os.getpid()}", SEGMENT_BYTES, device="fake:0")
    yield peer
    peer.close()


@pytest.fixture(scope="module")
def tls_peer() -> Iterator[Peer]:
    auth = shared_ends().node_file
    peer = Peer(f"conformance-tls-{os.getpid()}", SEGMENT_BYTES, auth=auth)
    yield peer
    peer.close()


def is_with(word: str, request: pytest.FixtureRequest) -> bool:
    callspec = getattr(request.node, "callspec", None)
    return callspec is not None and word in callspec.params.get("transport", "")


@pytest.fixture
def shared_peer(
    request: pytest.FixtureRequest, host_peer: Peer, device_peer: Peer, tls_peer: Peer
) -> Peer:
    """One node for all tests that leave it as it was."""
    if is_with("tls", request):
        return tls_peer
    return device_peer if is_with("device", request) else host_peer


@pytest.fixture
def peer(request: pytest.FixtureRequest) -> Iterator[Peer]:
    """A node of the test's own, to be maltreated."""
    name = f"victim-{os.getpid()}"
    if is_with("device", request):
        peer = Peer(name, SEGMENT_BYTES, device="fake:0")
    elif is_with("tls", request):
        peer = Peer(name, SEGMENT_BYTES, auth=shared_ends().node_file)
    else:
        peer = Peer(name, SEGMENT_BYTES, engine=METADATA)
    yield peer
    peer.close()


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name == "mooncake" else name
        for name in TRANSPORTS
    ]
)
def transport(request: pytest.FixtureRequest) -> Iterator[Transport]:
    if request.param == "mooncake":
        need_engine()
    transport = TRANSPORTS[request.param]()
    yield transport
    transport.close()


@pytest.fixture
def tcp() -> Iterator[TcpTransport]:
    transport = TcpTransport()
    yield transport
    transport.close()


def soon(seconds: float = 30.0) -> float:
    return uptime() + seconds


def noise(size: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(size)))


def empty(size: int) -> memoryview:
    return memoryview(bytearray(size))


class _Acting:
    """As ``acting``."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action: Callable[[], object] | None = action

    def update(self, data: memoryview | bytes, /) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


def acting(action: Callable[[], object]) -> Any:
    """A hasher that does something when it is first given bytes: in the middle of a call."""
    return _Acting(action)


@pytest.mark.parametrize(
    "size",
    [0, 1, 4096, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, MIB + 1, 5 * MIB + 123],
)
def test_what_is_written_is_read(shared_peer: Peer, transport: Transport, size: int) -> None:
    info = shared_peer.info
    written, read = noise(size, seed=size), empty(size)
    hashers = xxhash.xxh3_64(), xxhash.xxh3_64()
    offset = SUPERBLOCK_BYTES + 1024 + 7
    transport.write(info, [RangeCopy(offset, written, hashers[0])], soon())
    transport.read(info, [RangeCopy(offset, read, hashers[1])], soon())
    assert read == written
    expected = xxhash.xxh3_64_intdigest(written)
    assert [hasher.intdigest() for hasher in hashers] == [expected, expected]


def test_transports_see_the_same_memory(shared_peer: Peer) -> None:
    shm, tcp = ShmTransport(), TcpTransport()
    written, read = noise(3 * MIB), empty(3 * MIB)
    for writer, reader in ((shm, tcp), (tcp, shm)):
        read[:] = bytes(len(read))
        writer.write(shared_peer.info, [RangeCopy(MIB, written)], soon())
        reader.read(shared_peer.info, [RangeCopy(MIB, read)], soon())
        assert read == written
        written[:] = bytes(reversed(written))
    shm.close()
    tcp.close()


def test_scattered_moves_land_each_at_its_place(shared_peer: Peer, transport: Transport) -> None:
    """Small, large and empty ones in one call, neither adjacent nor in order."""
    info = shared_peer.info
    sizes = [4096] * 64 + [0, 2 * MIB + 5, 1, 0, 40_000, 100_000, 0]
    random.Random(1).shuffle(sizes)
    places = [SUPERBLOCK_BYTES + 3 * MIB * (index % 10) + 41_000 * index for index in range(71)]
    buffers = [noise(size, seed=index) for index, size in enumerate(sizes)]
    transport.write(info, [RangeCopy(*pair) for pair in zip(places, buffers)], soon())
    hashers = [xxhash.xxh3_64() for _ in sizes]
    read = [empty(size) for size in sizes]
    # Written in order, places that overlap hold the later bytes; so read what the last ones wrote.
    last = [
        index
        for index in range(71)
        if all(
            places[later] >= places[index] + sizes[index]
            or places[index] >= places[later] + sizes[later]
            for later in range(index + 1, 71)
        )
    ]
    assert len(last) > 60
    moves = [RangeCopy(places[index], read[index], hashers[index]) for index in reversed(last)]
    transport.read(info, moves, soon())
    for index in last:
        assert read[index] == buffers[index]
        assert hashers[index].intdigest() == xxhash.xxh3_64_intdigest(buffers[index])


def test_a_call_may_have_more_moves_than_a_request(shared_peer: Peer, transport: Transport) -> None:
    count = RANGES_MAX + 904
    written, read = noise(16 * count), empty(16 * count)
    for action, memory in ((transport.write, written), (transport.read, read)):
        action(
            shared_peer.info,
            [RangeCopy(MIB + 64 * i, memory[16 * i : 16 * i + 16]) for i in range(count)],
            soon(),
        )
    assert read == written


def test_moves_happen_in_their_order(shared_peer: Peer, transport: Transport) -> None:
    read = empty(4096)
    moves = [RangeCopy(MIB, noise(4096, seed=seed)) for seed in range(20)]
    transport.write(shared_peer.info, moves, soon())
    transport.read(shared_peer.info, [RangeCopy(MIB, read)], soon())
    assert read == moves[-1].buffer


def test_moves_may_share_a_hasher(shared_peer: Peer, transport: Transport) -> None:
    written, read = noise(3 * MIB), empty(3 * MIB)
    for action, memory in ((transport.write, written), (transport.read, read)):
        hasher = xxhash.xxh3_64()
        parts = [
            RangeCopy(2 * MIB + i, memory[i : i + MIB // 2], hasher)
            for i in range(0, 3 * MIB, MIB // 2)
        ]
        action(shared_peer.info, parts, soon())
        assert hasher.intdigest() == xxhash.xxh3_64_intdigest(written)


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (0, 16),
        (SUPERBLOCK_BYTES - 1, 16),
        (SEGMENT_BYTES - 15, 16),
        (SEGMENT_BYTES + 1, 0),
        (2**63, 16),
        (2**64 - 8, 16),
        (-4096, 16),
        (SUPERBLOCK_BYTES, SEGMENT_BYTES),
    ],
)
def test_a_range_outside_is_refused_before_any_byte_moves(
    shared_peer: Peer, transport: Transport, offset: int, length: int
) -> None:
    info = shared_peer.info
    before, after = empty(16), empty(16)
    transport.read(info, [RangeCopy(MIB, before)], soon())
    other = memoryview(bytes(byte ^ 0xFF for byte in before))
    bad = RangeCopy(offset, empty(length))
    with pytest.raises(InvalidRangeError):
        transport.write(info, [RangeCopy(MIB, other), bad], soon())
    with pytest.raises(InvalidRangeError):
        transport.read(info, [RangeCopy(MIB, after), bad], soon())
    assert bytes(after) == bytes(16)
    transport.read(info, [RangeCopy(MIB, after)], soon())
    assert after == before


def test_a_deadline_that_has_passed(shared_peer: Peer, transport: Transport) -> None:
    for action in (transport.read, transport.write):
        with pytest.raises(DeadlineExceededError) as caught:
            action(shared_peer.info, [RangeCopy(MIB, empty(16))], uptime() - 1)
        assert caught.value.fields["quiesced"] == 1


def test_calls_from_several_threads(shared_peer: Peer, transport: Transport) -> None:
    """More threads than connections: some wait for one."""
    written = [noise(MIB, seed=index) for index in range(12)]

    def there_and_back(index: int) -> bool:
        read, hasher = empty(MIB), xxhash.xxh3_64()
        for _ in range(5):
            place = MIB + 2 * MIB * index
            transport.write(shared_peer.info, [RangeCopy(place, written[index])], soon())
            transport.read(shared_peer.info, [RangeCopy(place, read, hasher)], soon())
            if read != written[index]:
                return False
        return True

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(there_and_back, range(12)))


def test_an_older_mount_is_gone(peer: Peer, transport: Transport) -> None:
    old = peer.info
    transport.write(old, [RangeCopy(MIB, noise(16))], soon())
    new = peer.ask("bump")
    assert new.generation > old.generation
    for action in (transport.write, transport.read):
        with pytest.raises(SegmentUnmountedError) as caught:
            action(old, [RangeCopy(MIB, empty(16))], soon())
        assert caught.value.fields["quiesced"] == 1
    read = empty(16)
    transport.read(new, [RangeCopy(MIB, read)], soon())
    assert read == noise(16)


def test_a_writer_that_outlives_a_takeover_stops(peer: Peer, transport: Transport) -> None:
    """The generation changes in the middle of a write: its end never lands."""
    hasher = acting(lambda: peer.ask("bump"))
    with pytest.raises((SegmentUnmountedError, NodeUnreachableError)):
        transport.write(peer.info, [RangeCopy(MIB, noise(LARGE_BYTES), hasher)], soon())
    end = empty(MIB)
    transport.read(peer.ask("info"), [RangeCopy(LARGE_BYTES, end)], soon())
    assert bytes(end) == bytes(MIB)


def test_a_node_that_is_killed_while_it_is_read(peer: Peer, transport: Transport) -> None:
    """Over the network that is an error; shared memory outlives its owner, and gives every byte;
    memory of a device does not."""
    written, read = noise(LARGE_BYTES), empty(LARGE_BYTES)
    transport.write(peer.info, [RangeCopy(MIB, written)], soon())
    moves = [RangeCopy(MIB, read, acting(peer.kill))]
    if transport.name == "shm":
        transport.read(peer.info, moves, soon())
        assert read == written
        return
    gone = SegmentUnmountedError if transport.name == "device" else NodeUnreachableError
    with pytest.raises(gone) as caught:
        transport.read(peer.info, moves, soon())
    assert caught.value.fields["quiesced"] == 1
    with pytest.raises(gone):
        transport.read(peer.info, [RangeCopy(MIB, read[:16])], soon())


def test_a_node_that_is_killed_while_it_is_written(peer: Peer, transport: Transport) -> None:
    moves = [RangeCopy(MIB, noise(LARGE_BYTES), acting(peer.kill))]
    if transport.name == "shm":
        transport.write(peer.info, moves, soon())
        return
    if transport.name == "device":
        with pytest.raises(SegmentUnmountedError) as gone:
            transport.write(peer.info, moves, soon())
        assert gone.value.fields["quiesced"] == 1
        return
    with pytest.raises(NodeUnreachableError) as caught:
        transport.write(peer.info, moves, soon())
    assert caught.value.fields["quiesced"] == 0
    with pytest.raises(NodeUnreachableError) as caught:
        transport.write(peer.info, [RangeCopy(MIB, noise(16))], soon())
    assert caught.value.fields["quiesced"] == 1


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_node_that_freezes_costs_no_more_than_the_deadline(
    peer: Peer, transport: Transport, verb: str
) -> None:
    """In the middle of a call, and before one. Shared memory needs nobody at the other end."""
    action = transport.read if verb == "read" else transport.write
    moves = [RangeCopy(MIB, noise(LARGE_BYTES), acting(peer.stop))]
    start = uptime()
    if transport.name in NEEDS_NO_OWNER:
        action(peer.info, moves, soon())
        return
    with pytest.raises(DeadlineExceededError) as caught:
        action(peer.info, moves, start + 0.3)
    assert caught.value.fields["quiesced"] == (1 if verb == "read" else 0)
    with pytest.raises(DeadlineExceededError) as caught:
        action(peer.info, [RangeCopy(MIB, empty(16))], start + 0.5)
    assert caught.value.fields["quiesced"] == 1, "a connection without a hello carries no bytes"
    assert 0.5 <= uptime() - start < 4.0
    peer.resume()
    action(peer.info, [RangeCopy(MIB, empty(16))], soon())


def test_a_slow_node_does_not_outlast_the_deadline(shared_peer: Peer, tcp: TcpTransport) -> None:
    """Bytes that come one by one never add up to a longer call."""
    hello_bytes, ended = 48, threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(hello_bytes, socket.MSG_WAITALL)
                sock.sendall(b"KVdt" + bytes(4))
                sock.sendall(b"KVdt" + bytes(4))
                with contextlib.suppress(ConnectionError):  # once the client has given up
                    while not ended.wait(0.02):
                        sock.sendall(b"x")

        thread = threading.Thread(target=drip)
        thread.start()
        info = shared_peer.info._replace(address=f"127.0.0.1:{listener.getsockname()[1]}")
        start = uptime()
        with pytest.raises(DeadlineExceededError):
            tcp.read(info, [RangeCopy(MIB, empty(MIB))], start + 0.2)
        assert uptime() - start < 3.0
        ended.set()
        thread.join()


@pytest.mark.parametrize("way", ["compiled", "slow", "moves"])
@pytest.mark.parametrize("is_write", [True, False])
@pytest.mark.parametrize("size", [16, 2 * MIB])
def test_a_node_that_moves_no_byte_is_given_up(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, size: int, is_write: bool, way: str
) -> None:
    """Long before the deadline, also on a connection that has worked."""
    if way == "slow":
        monkeypatch.setattr(tcp_client, "steps", pure_python)
    elif way == "compiled" and not native.is_compiled:
        pytest.skip("kvstore.native._native is not built here")
    transport = TcpTransport(stall_s=1.0)
    payload = [noise(size)]
    write = (MIB, size, 1, 1, b"key", payload, b"", b"", b"")
    read = (MIB, size, 1, 1, b"key", [empty(size)], b"")

    def move() -> None:
        if way == "moves":
            action = transport.write if is_write else transport.read
            action(peer.info, [RangeCopy(MIB, payload[0] if is_write else empty(size))], soon())
        elif is_write:
            transport.write_objects(peer.info, "n", [write], soon())
        else:
            transport.read_objects(peer.info, "n", [read], True, soon())

    move()
    for connected in (True, False):
        peer.stop()
        started = uptime()
        with pytest.raises(NodeUnreachableError) as caught:
            move()
        took = uptime() - started
        peer.resume()
        assert 1.0 <= took < 4.0, connected
        assert caught.value.fields["silent_ms"] == 1_000
        assert caught.value.fields["address"] == peer.info.address
        assert f"node {peer.name} ({peer.info.address}) moved no byte" in caught.value.message
        if connected:
            transport.forget(peer.info)
    transport.close()


def test_bytes_that_come_slowly_are_progress(
    shared_peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By steps and by moves: each takes longer than a stall, and no byte takes so long."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(HELLO_BYTES, socket.MSG_WAITALL)
                sock.sendall(b"KVdt" + bytes(4))
                while sock.recv(REQUEST_BYTES + RANGE_BYTES, socket.MSG_WAITALL):
                    sock.sendall(b"KVdt" + bytes(4))
                    for _ in range(8):
                        time.sleep(0.3)
                        sock.sendall(bytes(HEADER_BYTES // 8))

        thread = threading.Thread(target=drip)
        thread.start()
        info = shared_peer.info._replace(address=f"127.0.0.1:{listener.getsockname()[1]}")
        transport = TcpTransport(stall_s=1.5)
        transport.read(info, [RangeCopy(MIB, empty(HEADER_BYTES))], soon())
        row: ReadRow = (MIB, 0, 1, 1, b"key", [], b"")
        for each in (native.steps, pure_python):
            monkeypatch.setattr(tcp_client, "steps", each)
            assert transport.read_objects(info, "n", [row], True, soon()) == [STALE]
        transport.close()
        listener.close()
        thread.join()


def test_nobody_there(shared_peer: Peer, transport: Transport) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    info = shared_peer.info._replace(uuid=bytes(16), address=address)
    for action in (transport.write, transport.read):
        with pytest.raises(NodeUnreachableError) as caught:
            action(info, [RangeCopy(MIB, empty(16))], soon())
        assert caught.value.fields["quiesced"] == 1


@pytest.mark.parametrize("address", ["", "127.0.0.1:99999"])
def test_an_address_that_is_none(shared_peer: Peer, tcp: TcpTransport, address: str) -> None:
    info = shared_peer.info._replace(address=address)
    with pytest.raises(NodeUnreachableError):
        tcp.read(info, [RangeCopy(MIB, empty(16))], soon())


def test_another_segment_there(shared_peer: Peer, tcp: TcpTransport) -> None:
    info = shared_peer.info._replace(uuid=bytes(16))
    with pytest.raises(SegmentUnmountedError):
        tcp.read(info, [RangeCopy(MIB, empty(16))], soon())


def test_a_wrong_token_is_refused(shared_peer: Peer, tcp: TcpTransport) -> None:
    before = shared_peer.counters()["refused_hellos"]
    info = shared_peer.info._replace(token=bytes(16))
    for action in (tcp.read, tcp.write):
        with pytest.raises(PermissionDeniedError) as caught:
            action(info, [RangeCopy(MIB, empty(16))], soon())
        assert caught.value.fields["quiesced"] == 1
    assert shared_peer.counters()["refused_hellos"] == before + 2


def test_a_node_with_no_connection_left_is_busy() -> None:
    peer = Peer(f"busy-{os.getpid()}", MIB, connections_max=1)
    first, second = TcpTransport(), TcpTransport()
    try:
        first.read(peer.info, [RangeCopy(8192, empty(16))], soon())
        for _ in range(20):
            with pytest.raises(BusyError):
                second.read(peer.info, [RangeCopy(8192, empty(16))], soon())
        first.close()
        deadline = soon()
        while uptime() < deadline:  # the server notices on its own thread
            try:
                second.read(peer.info, [RangeCopy(8192, empty(16))], soon())
                break
            except BusyError:
                continue
        second.read(peer.info, [RangeCopy(8192, empty(16))], soon())
    finally:
        first.close()
        second.close()
        peer.close()


def test_a_server_that_restarts_between_calls_is_not_noticed(peer: Peer, tcp: TcpTransport) -> None:
    for verb in (tcp.write, tcp.read, tcp.read):
        verb(peer.info, [RangeCopy(MIB, noise(16))], soon())
        assert peer.ask("restart") == peer.info


def test_a_call_waits_for_a_connection_no_longer_than_its_deadline(shared_peer: Peer) -> None:
    transport = TcpTransport(connections_max=1)

    def second() -> None:
        with pytest.raises(DeadlineExceededError) as caught:
            transport.read(shared_peer.info, [RangeCopy(MIB, empty(16))], soon(0.05))
        assert caught.value.fields["quiesced"] == 1

    transport.read(shared_peer.info, [RangeCopy(MIB, empty(2 * MIB), acting(second))], soon())
    transport.read(shared_peer.info, [RangeCopy(MIB, empty(16))], soon())
    transport.close()


def test_closing_ends_a_call_under_way(shared_peer: Peer, transport: Transport) -> None:
    moves = [RangeCopy(MIB, empty(LARGE_BYTES), acting(transport.close))]
    with pytest.raises((ClosedError, NodeUnreachableError)):
        transport.read(shared_peer.info, moves, soon())
    for action in (transport.read, transport.write):
        with pytest.raises(ClosedError):
            action(shared_peer.info, [RangeCopy(MIB, empty(16))], soon())
    assert not transport.can_reach(shared_peer.info)
    transport.close()


def test_reaching(shared_peer: Peer, transport: Transport) -> None:
    info = shared_peer.info
    assert transport.can_reach(info)
    if transport.name in NEEDS_NO_OWNER:
        assert not transport.can_reach(info._replace(uuid=bytes(16)))
        assert not transport.can_reach(info._replace(host="elsewhere", uuid=b"another segment."))
    else:
        assert not transport.can_reach(info._replace(address=""))


def test_a_view_is_the_segment_itself(shared_peer: Peer, transport: Transport) -> None:
    info = shared_peer.info
    if not transport.maps:
        assert transport.name != "shm"
        return
    view = transport.memory(info)[MIB : MIB + 4096]
    view[:] = noise(4096)
    read = empty(4096)
    transport.read(info, [RangeCopy(MIB, read)], soon())
    assert read == noise(4096)
    with pytest.raises(SegmentUnmountedError):
        transport.memory(info._replace(generation=info.generation + 1))
    transport.close()
    assert view == noise(4096)


def test_whoever_holds_a_view_can_tell_whether_its_node_has_fenced(
    peer: Peer, transport: Transport
) -> None:
    """What a renewed lease depends on; so it works for as long as the view does."""
    mounted = transport.mount_checker(peer.info)
    if mounted is None:
        assert transport.name != "shm"
        return
    older = transport.mount_checker(peer.info._replace(generation=peer.info.generation - 1))
    assert older is not None
    assert (mounted(), older()) == (True, False)
    transport.forget(peer.info)
    transport.close()
    assert mounted()
    peer.ask("bump")
    assert not mounted()
