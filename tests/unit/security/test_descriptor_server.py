"""Who gets which descriptor of a node's memory, what a descriptor can do, and peers that stall, lie
or make noise."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.calls import DescriptorHandle, MapRight, SegmentInfo
from kvstore.errors import NodeUnreachableError
from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.memory.segment import OwnedSegment
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import SHM_DIRECTORY, host_id
from kvstore.security import descriptor_protocol as protocol
from kvstore.security.descriptor_client import NoDescriptorError, request_descriptor
from kvstore.security.descriptor_protocol import WHY, DescriptorStatus
from kvstore.security.descriptor_server import DescriptorServer
from kvstore.transport.common import RangeCopy
from kvstore.transport.shm import ShmTransport
from tests.support.wait import until
from tests.unit.client.world import segment as described

MIB = 1 << 20
HOLDER = 77
READS, WRITES = MapRight.READ, MapRight.READ | MapRight.WRITE
EVERYTHING = MapRight(15)
OTHER_USER, GROUP = 65_533, 65_532
AT = SUPERBLOCK_BYTES
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


class Store:
    """A segment whose handover is served in a thread."""

    def __init__(self) -> None:
        self.segment = OwnedSegment.create(f"handover-{os.getpid()}", MIB)
        self.server: DescriptorServer | None = None
        self._ended: Callable[[], None] = lambda: None

    def serve(self, *, group: int = -1, needs_all: bool = False) -> DescriptorServer:
        server = self.server = DescriptorServer(self.segment, group=group, needs_all=needs_all)
        loop, begun = asyncio.new_event_loop(), threading.Event()
        stopped = asyncio.Event()

        async def main() -> None:
            async with server.serving():
                begun.set()
                await stopped.wait()

        def run() -> None:
            with contextlib.closing(loop):
                loop.run_until_complete(main())

        thread = threading.Thread(target=run)
        thread.start()
        assert begun.wait(5)

        def end() -> None:
            loop.call_soon_threadsafe(stopped.set)
            thread.join(5)
            server.close()

        self._ended = end
        return server

    def stop(self) -> None:
        self._ended()
        self._ended = lambda: None

    def info(self, rights: int = WRITES) -> SegmentInfo:
        """As the master describes it to the holder."""
        assert self.server is not None
        token, uuid, generation = self.segment.token, self.segment.uuid, self.segment.generation
        key = protocol.map_key(token, uuid, generation, HOLDER, rights)
        return described(1)._replace(
            host=host_id(), uuid=uuid, size=MIB, generation=generation, shm_name="",
            holder=HOLDER, descriptor_socket=DescriptorHandle(self.server.name, rights, key),
        )  # fmt: skip

    def fetch(self, rights: int = WRITES, /, **other: Any) -> int:
        """``other``: what the client says instead of what the master has told it."""
        info = self.info(rights)
        assert info.descriptor_socket is not None
        fields = {name: other.pop(name) for name in ("key", "socket", "rights") if name in other}
        return request_descriptor(info._replace(**other), info.descriptor_socket._replace(**fields))

    def why_not(self, rights: int = WRITES, /, **other: Any) -> str:
        with pytest.raises(NoDescriptorError) as refused:
            os.close(self.fetch(rights, **other))
        return str(refused.value)


@pytest.fixture
def store() -> Iterator[Store]:
    made = Store()
    try:
        yield made
    finally:
        made.stop()
        made.segment.close()


def can_write(fd: int) -> bool:
    try:
        mmap.mmap(fd, MIB).close()
        return True
    except PermissionError:
        return False
    finally:
        os.close(fd)


def test_a_reader_gets_a_descriptor_to_read_and_a_writer_one_to_write(store: Store) -> None:
    server = store.serve()
    store.segment.memory[AT : AT + 5] = b"there"
    fd = store.fetch(READS)
    with mmap.mmap(fd, MIB, access=mmap.ACCESS_READ) as mapped:
        assert mapped[AT : AT + 5] == b"there"
    assert not can_write(fd)
    assert can_write(store.fetch(WRITES))
    assert can_write(store.fetch(EVERYTHING))
    until(lambda: server.handed == 3)


@pytest.mark.parametrize(
    ("needs_all", "rights", "said", "writes"),
    [
        (False, 0, "NO_RIGHT", False),
        (False, MapRight.WRITE, "NO_RIGHT", False),
        (False, READS, "OK", False),
        (False, WRITES, "OK", True),
        (True, WRITES, "NOT_ALL", False),
        (True, WRITES | MapRight.WRITE_ALL, "NOT_ALL", False),
        (True, WRITES | MapRight.READ_ALL, "OK", False),
        (True, EVERYTHING, "OK", True),
    ],
)
def test_what_rights_give(needs_all: bool, rights: int, said: str, writes: bool) -> None:
    assert protocol.access(rights, needs_all=needs_all) == (DescriptorStatus[said], writes)


def test_no_proof_no_descriptor(store: Store) -> None:
    server = store.serve()
    key = store.info(READS).descriptor_socket.key  # type: ignore[union-attr]
    denied = WHY[DescriptorStatus.DENIED]
    assert store.why_not(key=os.urandom(16)) == denied
    assert store.why_not(READS, rights=WRITES) == denied, "a key is for its rights"
    assert store.why_not(WRITES, key=key) == denied
    assert store.why_not(holder=HOLDER + 1) == denied
    assert store.why_not(uuid=bytes(16)) == WHY[DescriptorStatus.UNMOUNTED]
    before = store.info()
    store.segment.bump_generation()
    assert before.descriptor_socket is not None
    with pytest.raises(NoDescriptorError, match="mounted it anew"):
        request_descriptor(before, before.descriptor_socket)
    os.close(store.fetch())
    until(lambda: (server.handed, server.refused) == (1, 6))


def test_a_reader_cannot_truncate(store: Store) -> None:
    store.serve()
    fd = store.fetch(READS)
    for size in (0, 4096, 2 * MIB):
        with pytest.raises(OSError, match=r"Permission denied|Invalid argument"):
            os.ftruncate(fd, size)
    os.close(fd)
    assert os.fstat(store.segment._fd).st_size == MIB


def connected(store: Store) -> socket.socket:
    assert store.server is not None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(5)
    sock.connect(f"{SHM_DIRECTORY}/{store.server.name}")
    return sock


@pytest.mark.parametrize("noise", [b"", b"x", bytes(200), b"KVsh" + bytes(100), b"GET / HTTP/1.1"])
def test_noise_is_answered_and_ended(store: Store, noise: bytes) -> None:
    store.serve()
    with connected(store) as sock:
        sock.recv(100)
        sock.send(noise) if noise else sock.shutdown(socket.SHUT_WR)
        answer = protocol.unpack_head(sock.recv(100))
        assert answer is not None
        assert answer[0] is DescriptorStatus.BAD_REQUEST
        assert sock.recv(100) == b""
    os.close(store.fetch())


def as_other_user(groups: list[int], action: Callable[[], None]) -> None:
    """Runs it in a child of another user, and fails if it does."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.setgroups(groups)
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            action()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@AS_ROOT
def test_another_user_gets_nothing_unless_it_is_in_the_group(store: Store) -> None:
    store.serve(group=GROUP)
    info = store.info(READS)
    assert info.descriptor_socket is not None
    handover = info.descriptor_socket

    def refused() -> None:
        with pytest.raises(NoDescriptorError, match="another user"):
            request_descriptor(info, handover)

    def served() -> None:
        fd = request_descriptor(info, handover)
        for path in (f"/proc/self/fd/{fd}", store.segment.path):
            for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
                with pytest.raises(PermissionError):
                    os.open(path, flags)
            with pytest.raises(PermissionError):
                os.truncate(path, 0)
        with pytest.raises(PermissionError):
            os.fchmod(fd, 0o666)
        assert not can_write(fd)

    as_other_user([], refused)
    as_other_user([GROUP], served)


# --- the transport -----------------------------------------------------------------------------


def read(transport: ShmTransport, info: SegmentInfo) -> bytes:
    into = bytearray(5)
    transport.read(info, [RangeCopy(AT, memoryview(into))], uptime() + 5)
    return bytes(into)


def test_a_mapping_to_read_reads_and_leaves_writes_to_others(store: Store) -> None:
    store.serve()
    store.segment.memory[AT : AT + 5] = b"there"
    with contextlib.closing(ShmTransport()) as transport:
        info = store.info(READS)
        assert transport.can_reach(info)
        assert not transport.can_write(info)
        assert transport.memory(info).readonly
        assert read(transport, info) == b"there"
        shown = transport.readonly_memory(info)
        assert shown is not None
        assert bytes(shown[AT : AT + 5]) == b"there"
        mounted = transport.mount_checker(info)
        assert mounted is not None
        assert mounted()
        transport.sweep()
        assert read(transport, info) == b"there"
    assert transport.not_mapped == {}


def test_a_writer_writes_and_shows(store: Store) -> None:
    store.serve()
    with contextlib.closing(ShmTransport()) as transport:
        info = store.info(WRITES)
        assert transport.can_write(info)
        transport.write(info, [RangeCopy(AT, memoryview(b"wrote"))], uptime() + 5)
        assert bytes(store.segment.memory[AT : AT + 5]) == b"wrote"
        shown = transport.readonly_memory(info)
        assert shown is not None
        assert bytes(shown[AT : AT + 5]) == b"wrote"


def test_a_holder_never_opens_a_name(store: Store) -> None:
    server = store.serve()
    store.stop()
    info = store.info()._replace(shm_name=store.segment.shm_name)
    with contextlib.closing(ShmTransport()) as transport:
        assert not transport.can_reach(info)
        assert f"{server.name} does not answer" in transport.not_mapped[info.node]
        with pytest.raises(NodeUnreachableError):
            read(transport, info)
        named = info._replace(holder=0)
        transport.sweep()
        assert transport.can_reach(named), "who is no holder does"


def test_a_child_of_a_fork_gives_the_descriptors_back(store: Store) -> None:
    store.serve()
    with contextlib.closing(ShmTransport()) as transport:
        info = store.info()
        assert transport.can_reach(info)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                transport.close_after_fork()
                again = ShmTransport()
                code = 0 if again.can_write(info) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert read(transport, info) == bytes(5)
