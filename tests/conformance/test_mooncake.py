"""What of the transfer engine is not said by the rules of all transports; engines in two processes,
over its tcp protocol."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvstore.config import P2P
from kvstore.errors import (
    BusyError,
    DeadlineExceededError,
    MemoryQuarantinedError,
    NodeUnreachableError,
)
from kvstore.memory.process_memory import address_of
from kvstore.runtime.clock import uptime
from kvstore.transport.common import RangeCopy
from kvstore.transport.mooncake import server, transport
from kvstore.transport.mooncake.engine import EngineSettings, TransferEngine
from kvstore.transport.mooncake.engine_session import ChunkBuffer
from kvstore.transport.mooncake.transport import MooncakeTransport
from tests.conformance.peer import Peer
from tests.conformance.test_transports import acting, empty, noise, soon
from tests.support.metadata_servers import metadata_server
from tests.support.processes import run_python
from tests.support.programs import need_engine

MIB = 1 << 20
SEGMENT_BYTES = 64 * MIB
TCP = EngineSettings("tcp")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def there_is_an_engine() -> None:
    need_engine()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer(f"engine-{os.getpid()}", SEGMENT_BYTES, engine=P2P)
    yield peer
    peer.close()


@pytest.fixture
def mover() -> Iterator[MooncakeTransport]:
    mover = MooncakeTransport(TCP, buffer_bytes=8 * MIB)
    yield mover
    mover.close()


# --- where engines meet ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["P2PHANDSHAKE", "etcd", "http"])
def test_engines_meet_at_each_kind_of_metadata_server(kind: str, tmp_path: Path) -> None:
    with metadata_server(kind, tmp_path) as url:
        peer = Peer(f"meets-{os.getpid()}", SEGMENT_BYTES, engine=url)
        try:
            # In a process of its own: libcurl keeps its connections for as long as a thread lives.
            for command in ("info", "bump"):
                said = run(MEET.format(url=url, info=peer.ask(command)))
                assert said.stdout.strip() == "met", said
        finally:
            peer.close()


MEET = """
from kvstore.runtime.clock import uptime
from kvstore.calls import EngineAddress, SegmentInfo
from kvstore.transport.common import RangeCopy
from kvstore.transport.mooncake.engine import EngineSettings
from kvstore.transport.mooncake.engine_session import ChunkBuffer
from kvstore.transport.mooncake.transport import MooncakeTransport
mover = MooncakeTransport(EngineSettings("tcp", metadata_server={url!r}))
info = {info}
assert mover.can_reach(info)
written, read = bytes(range(256)) * 12345, bytearray(256 * 12345)
mover.write(info, [RangeCopy(1 << 20, memoryview(written))], uptime() + 30)
mover.read(info, [RangeCopy(1 << 20, memoryview(read))], uptime() + 30)
assert read == written
mover.close()
print("met")
"""


def test_an_engine_that_cannot_be_reached_is_left_to_tcp_for_a_while(
    peer: Peer, mover: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its port is closed, and the node answers on the other."""
    monkeypatch.setattr(transport, "UNREACHED_S", 2.0)
    info = peer.info
    assert info.engine is not None
    closed = info._replace(engine=info.engine._replace(name="127.0.0.1:9"))
    assert mover.can_reach(closed)
    with pytest.raises(NodeUnreachableError, match="which replies") as caught:
        mover.read(closed, [RangeCopy(MIB, empty(16))], soon())
    assert caught.value.fields["quiesced"] == 1
    assert not mover.can_reach(closed)
    assert mover.can_reach(info), "others are"
    mover.read(info, [RangeCopy(MIB, empty(16))], soon())
    deadline = soon(10)
    while not mover.can_reach(closed):
        assert uptime() < deadline
        time.sleep(0.01)


# --- fencing --------------------------------------------------------------------------------------


def test_an_old_address_is_refused_by_the_engine_itself(peer: Peer) -> None:
    """Whoever knows it and asks nobody: a writer that was told before the node fenced."""
    memory = noise(MIB)
    old = peer.info.engine
    new = peer.ask("bump").engine
    assert old is not None
    assert new is not None
    assert new.base != old.base
    mover = MooncakeTransport(TCP)
    for address, wanted in ((old, False), (new, True)):
        one = TransferEngine(TCP, "127.0.0.1")
        one.register(address_of(memory), len(memory))
        for is_write in (False, True):
            theirs = [address.base + MIB]
            moved = one.transfer(
                address.name, [address_of(memory)], theirs, [MIB], is_write=is_write
            )
            assert moved == wanted
        one.close()
    mover.close()


def test_a_write_that_is_on_its_way_when_the_node_fences_never_ends(peer: Peer) -> None:
    memory = noise(32 * MIB)
    address = peer.info.engine
    assert address is not None
    one = TransferEngine(TCP, "127.0.0.1")
    one.register(address_of(memory), len(memory))
    with ThreadPoolExecutor(1) as pool:
        for _ in range(5):
            ours = [address_of(memory) + i * MIB for i in range(32)]
            theirs = [address.base + MIB + i * MIB for i in range(32)]
            under_way = pool.submit(
                one.transfer, address.name, ours, theirs, [MIB] * 32, is_write=True
            )
            bumped = peer.ask("bump")
            if not under_way.result():
                break
            address = bumped.engine  # it was faster
            assert address is not None
        else:
            pytest.fail("it was always faster")
        one.close()
    end = empty(MIB)
    mover = MooncakeTransport(TCP)
    mover.read(bumped, [RangeCopy(MIB, end)], soon())
    mover.write(bumped, [RangeCopy(MIB, bytearray_of(end))], soon())
    after = empty(MIB)
    mover.read(bumped, [RangeCopy(MIB, after)], soon())
    assert after == bytearray_of(end), "nothing lands any more"
    mover.close()


def bytearray_of(memory: memoryview) -> memoryview:
    return memoryview(bytearray(byte ^ 0xFF for byte in memory))


def test_a_connection_that_stalls_is_cut_and_one_that_is_idle_is_not_missed(
    peer: Peer, mover: MooncakeTransport
) -> None:
    """A writer that was stopped never ends its write; who only paused notices nothing."""
    read = empty(16)
    mover.read(peer.info, [RangeCopy(MIB, read)], soon())
    port = data_port(peer)
    with socket.create_connection(("127.0.0.1", port), 5) as stalled:
        stalled.sendall(bytes(5))  # not even a whole header
        stalled.settimeout(server.STALL_S + 5)
        start = uptime()
        assert stalled.recv(1) == b""
        took = uptime() - start
    assert server.STALL_S - 1 < took < server.STALL_S + 3
    assert transport.IDLE_S < server.STALL_S - server.SWEEP_S
    mover.read(peer.info, [RangeCopy(MIB, read)], soon())


def data_port(peer: Peer) -> int:
    """Of the peer's engine: the one port that it listens on and does not tell."""
    inodes = set()
    for fd in Path(f"/proc/{peer.pid}/fd").iterdir():
        target = os.readlink(fd)
        if target.startswith("socket:"):
            inodes.add(target[8:-1])
    rows = Path(f"/proc/{peer.pid}/net/tcp6").read_text().splitlines()[1:]
    ports = [
        int(row.split()[1].rpartition(":")[2], 16)
        for row in rows
        if row.split()[3] == "0A" and row.split()[9] in inodes
    ]
    assert len(ports) == 1
    return ports[0]


# --- memory ---------------------------------------------------------------------------------------


def test_registered_memory_is_moved_as_it_is(peer: Peer, mover: MooncakeTransport) -> None:
    written, read = noise(5 * MIB), empty(5 * MIB)
    mover.start()
    free = take_all_chunks(mover)
    with pytest.raises(DeadlineExceededError) as caught:
        mover.write(peer.info, [RangeCopy(MIB, written)], uptime() + 0.2)
    assert caught.value.fields["quiesced"] == 1
    for memory in (written, read):
        mover.register(memory)
    mover.write(peer.info, [RangeCopy(MIB, written)], soon())
    mover.read(peer.info, [RangeCopy(MIB, read[MIB:])], soon())
    assert read[MIB:] == written[: 4 * MIB]
    for memory in (written, read):
        mover.unregister(memory)
    with pytest.raises(DeadlineExceededError):
        mover.read(peer.info, [RangeCopy(MIB, read)], uptime() + 0.2)
    for chunk in free:
        session_buffer(mover).free.put(chunk)
    mover.read(peer.info, [RangeCopy(MIB, read)], soon())
    assert read == written


def test_a_read_that_was_given_up_keeps_its_memory_in_quarantine(
    peer: Peer, mover: MooncakeTransport
) -> None:
    """Until the engine is ended, which lets no byte land any more."""
    read = empty(32 * MIB)
    mover.register(read)
    mover.read(peer.info, [RangeCopy(MIB, read[:MIB])], soon())
    peer.stop()
    with pytest.raises(MemoryQuarantinedError):
        mover.read(peer.info, [RangeCopy(MIB, read)], uptime() + 0.2)
    inside = read[:MIB]  # of what was under way
    with pytest.raises(MemoryQuarantinedError):
        mover.read(peer.info, [RangeCopy(MIB, inside)], soon())
    peer.resume()
    elsewhere = empty(MIB)
    mover.read(peer.info, [RangeCopy(MIB, elsewhere)], soon())  # others go on meanwhile
    start = uptime()
    mover.unregister(read)
    assert uptime() - start < 10
    before = noise(len(read))
    read[:] = before
    mover.read(peer.info, [RangeCopy(MIB, elsewhere)], soon())
    assert read == before
    mover.read(peer.info, [RangeCopy(MIB, inside)], soon())
    assert inside == elsewhere


def test_too_many_that_were_given_up_are_refused(
    peer: Peer, mover: MooncakeTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each keeps its buffer until its end: so there is a bound."""
    monkeypatch.setattr(transport, "RETIRED_MAX", 1)
    other = Peer(f"other-{os.getpid()}", SEGMENT_BYTES, engine=P2P)
    try:
        moves = [RangeCopy(MIB, empty(48 * MIB), acting(peer.stop))]
        with pytest.raises(DeadlineExceededError):
            mover.read(peer.info, moves, uptime() + 1)
        with pytest.raises(BusyError):
            mover.read(other.info, [RangeCopy(MIB, empty(16))], soon())
        mover._retired[0].ended.wait(10)  # its time-out
        mover.read(other.info, [RangeCopy(MIB, empty(16))], soon())
    finally:
        other.close()


# --- threads --------------------------------------------------------------------------------------


def test_one_engine_in_many_threads(peer: Peer) -> None:
    """Transfers both ways, registering and unregistering, all at once: every byte is right."""
    address = peer.info.engine
    assert address is not None
    one = TransferEngine(TCP, "127.0.0.1")
    stop = uptime() + 2.0

    def there_and_back(number: int) -> int:
        rounds = 0
        while not rounds or uptime() < stop:  # a thread may begin late
            written, read = noise(256 << 10, seed=100 * number + rounds), empty(256 << 10)
            for memory, is_write in ((written, True), (read, False)):
                ours = address_of(memory)
                one.register(ours, len(memory))
                places = [ours, ours + (128 << 10)]
                base = address.base + MIB + number * MIB
                theirs = [base, base + (128 << 10)]
                lengths = [128 << 10] * 2
                assert one.transfer(address.name, places, theirs, lengths, is_write=is_write)
                assert one.unregister(ours)
            assert read == written
            rounds += 1
        return rounds

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, range(8)))
    one.close()


# --- without it -----------------------------------------------------------------------------------


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", code, variables=environment)


TRY = """
import sys
from kvstore.errors import TransferEngineError
from kvstore.transport.mooncake import probe
from kvstore.transport.mooncake.engine import EngineSettings, TransferEngine
try:
    TransferEngine(EngineSettings("tcp"), "127.0.0.1")
except TransferEngineError as error:
    print(error)
    print(*probe(), sep="\\n")
"""


def test_without_the_package_the_message_names_it() -> None:
    said = run("import sys; sys.modules['mooncake'] = None\n" + TRY)
    assert "pip install mooncake-transfer-engine-non-cuda" in said.stdout, said
    assert "what='package', ok=False" in said.stdout


def test_writes_that_nobody_acknowledges_are_refused() -> None:
    said = run(TRY, MC_TCP_PROTO="1")
    assert "reports a write as complete too early" in said.stdout, said


def test_rdma_without_a_card_is_told() -> None:
    """The engine itself would take tcp, and say nothing."""
    said = run(TRY.replace('("tcp")', '("rdma", "mlx9_0")'))
    assert "this host has no RDMA device mlx9_0" in said.stdout, said


def take_all_chunks(mover: MooncakeTransport) -> list[int]:
    buffer = session_buffer(mover)
    return [buffer.free.get_nowait() for _ in range(buffer.free.qsize())]


def session_buffer(mover: MooncakeTransport) -> ChunkBuffer:
    assert mover._session is not None
    assert mover._session.buffer is not None
    return mover._session.buffer
