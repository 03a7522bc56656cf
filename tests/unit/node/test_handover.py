"""Who gets which descriptor of a node's memory, what a descriptor can do, and peers that stall, lie
or make noise."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstore.calls import Handover, MapRight, SegmentInfo
from kvstore.clocks import uptime
from kvstore.errors import NodeUnreachableError
from kvstore.memory.entries import SHM_DIRECTORY
from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.memory.segment import NodeSegment
from kvstore.network import handover as protocol
from kvstore.network.handover import WHY, HandoverStatus
from kvstore.network.host import host_id
from kvstore.node import handover as serving
from kvstore.node.agent import NodeAgent
from kvstore.node.handover import HandoverServer
from kvstore.node.web import answers_of
from kvstore.transport import handed, shm
from kvstore.transport.base import Move
from kvstore.transport.handed import NotHandedError, fetch
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp_server import DataServer
from tests.support.waiting import until
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
        self.segment = NodeSegment.create(f"handover-{os.getpid()}", MIB)
        self.server: HandoverServer | None = None
        self._ended: Callable[[], None] = lambda: None

    def serve(self, *, group: int = -1, needs_all: bool = False) -> HandoverServer:
        server = self.server = HandoverServer(self.segment, group=group, needs_all=needs_all)
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
            holder=HOLDER, handover=Handover(self.server.name, rights, key),
        )  # fmt: skip

    def fetch(self, rights: int = WRITES, /, **other: Any) -> int:
        """``other``: what the client says instead of what the master has told it."""
        info = self.info(rights)
        assert info.handover is not None
        fields = {name: other.pop(name) for name in ("key", "socket", "rights") if name in other}
        return fetch(info._replace(**other), info.handover._replace(**fields))

    def why_not(self, rights: int = WRITES, /, **other: Any) -> str:
        with pytest.raises(NotHandedError) as refused:
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


def test_metrics_count_who_got_a_descriptor_and_who_none(store: Store) -> None:
    agent, server = SimpleNamespace(is_joined=True), DataServer([store.segment])

    async def page_of(handover: HandoverServer | None) -> str:
        answers = answers_of(cast(NodeAgent, agent), store.segment, server, handover, None)
        return (await answers.metrics()).decode()

    handover = store.serve()
    os.close(store.fetch(READS))
    store.why_not(READS, key=bytes(16))
    until(lambda: (handover.handed, handover.refused) == (1, 1))
    page = asyncio.run(page_of(handover))
    assert "\nkvstore_node_handed_descriptors_total 1.0" in page
    assert "\nkvstore_node_refused_handovers_total 1.0" in page
    assert "\nkvstore_node_handed_descriptors_total" not in asyncio.run(page_of(None))


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
    assert protocol.access(rights, needs_all=needs_all) == (HandoverStatus[said], writes)


def test_who_may_not_read_all_namespaces_gets_nothing_where_that_is_asked_for(
    store: Store,
) -> None:
    store.serve(needs_all=True)
    assert store.why_not(WRITES) == WHY[HandoverStatus.NOT_ALL]
    assert not can_write(store.fetch(WRITES | MapRight.READ_ALL))
    assert can_write(store.fetch(EVERYTHING))


def test_no_proof_no_descriptor(store: Store) -> None:
    server = store.serve()
    key = store.info(READS).handover.key  # type: ignore[union-attr]
    denied = WHY[HandoverStatus.DENIED]
    assert store.why_not(key=os.urandom(16)) == denied
    assert store.why_not(READS, rights=WRITES) == denied, "a key is for its rights"
    assert store.why_not(WRITES, key=key) == denied
    assert store.why_not(holder=HOLDER + 1) == denied
    assert store.why_not(uuid=bytes(16)) == WHY[HandoverStatus.GONE]
    before = store.info()
    store.segment.bump_generation()
    assert before.handover is not None
    with pytest.raises(NotHandedError, match="mounted it anew"):
        fetch(before, before.handover)
    os.close(store.fetch())
    until(lambda: (server.handed, server.refused) == (1, 6))


def test_a_revoked_holder_gets_nothing_until_the_next_mount(store: Store) -> None:
    server = store.serve()
    os.close(store.fetch())
    server.refuse_holders([HOLDER + 1, HOLDER])
    server.refuse_holders([])  # its capabilities have ended by now, its key has not
    assert store.why_not() == WHY[HandoverStatus.DENIED]
    store.segment.bump_generation()
    server.refuse_holders([])
    os.close(store.fetch())


def test_a_client_cannot_truncate(store: Store) -> None:
    if not store.serve()._lent.is_fixed:
        pytest.skip("this kernel has no Landlock that forbids truncation")
    for rights in (READS, WRITES):
        fd = store.fetch(rights)
        for size in (0, 4096, 2 * MIB):
            with pytest.raises(OSError, match=r"Permission denied|Invalid argument"):
                os.ftruncate(fd, size)
        os.close(fd)
    assert os.fstat(store.segment._fd).st_size == MIB
    assert store.segment.memory[MIB - 1] == 0, "no page is missing"


def test_a_descriptor_has_no_part_in_the_owners_lock(store: Store) -> None:
    import fcntl

    store.serve()
    fd = store.fetch()
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    fcntl.flock(fd, fcntl.LOCK_UN)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_a_false_node_is_not_believed(store: Store) -> None:
    """Another process has taken the name: it hands over memory of its own."""
    server = store.serve()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{SHM_DIRECTORY}/{server.name}-false")
    listener.listen()
    said: list[bytes] = []

    def serve() -> None:
        for answer in (protocol.pack_answer(HandoverStatus.OK, bytes(16), b"?"), b"", b"noise"):
            sock, _ = listener.accept()
            with sock:
                sock.send(protocol.pack_greeting(HandoverStatus.OK, bytes(16)))
                said.append(sock.recv(1000))
                if answer:
                    socket.send_fds(sock, [answer], [listener.fileno()])

    thread = threading.Thread(target=serve)
    thread.start()
    with listener:
        assert "not its node" in store.why_not(socket=f"{server.name}-false")
        assert "ended the handover" in store.why_not(socket=f"{server.name}-false")
        assert "another version" in store.why_not(socket=f"{server.name}-false")
        thread.join(5)
    os.unlink(f"{SHM_DIRECTORY}/{server.name}-false")
    assert "no name" in store.why_not(socket="../kvstore-socket.x")
    assert "no name" in store.why_not(socket="dbus")
    key = store.info().handover.key  # type: ignore[union-attr]
    assert not any(key in each or store.segment.token in each for each in said)


def connected(store: Store) -> socket.socket:
    assert store.server is not None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(5)
    sock.connect(f"{SHM_DIRECTORY}/{store.server.name}")
    return sock


def test_peers_that_say_nothing_make_room_and_are_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PEERS_MAX", 4)
    server = store.serve()
    silent = [connected(store) for _ in range(10)]
    with contextlib.ExitStack() as stack:
        for sock in silent:
            stack.enter_context(sock)
        os.close(store.fetch())
        until(lambda: len(server._peers) < 4)
        for sock in silent[:6]:
            assert len(sock.recv(100)) == protocol.HEAD_BYTES
            assert sock.recv(100) == b"", "it has made room"
        monkeypatch.setattr(serving, "PEER_S", 0.05)
        with connected(store) as late:
            assert late.recv(100)
            assert late.recv(100) == b"", "its time is over"
    until(lambda: not server._peers)


@pytest.mark.parametrize("noise", [b"", b"x", bytes(200), b"KVsh" + bytes(100), b"GET / HTTP/1.1"])
def test_noise_is_answered_and_ended(store: Store, noise: bytes) -> None:
    store.serve()
    with connected(store) as sock:
        sock.recv(100)
        sock.send(noise) if noise else sock.shutdown(socket.SHUT_WR)
        answer = protocol.unpack_head(sock.recv(100))
        assert answer is not None
        assert answer[0] is HandoverStatus.BAD_REQUEST
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
    assert info.handover is not None
    handover = info.handover

    def refused() -> None:
        with pytest.raises(NotHandedError, match="another user"):
            fetch(info, handover)

    def served() -> None:
        fd = fetch(info, handover)
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


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root, and unshare"
)
def test_containers_need_the_same_directory_and_not_the_same_network(store: Store) -> None:
    server = store.serve()
    code = (
        "import socket, sys\n"
        "sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "try: print(sock.connect('/dev/shm/' + sys.argv[1]))\n"
        "except FileNotFoundError: print('not here')"
    )
    alone = ["unshare", "--net", "--mount", "sh", "-c", 'mount -t tmpfs none /dev/shm && "$@"', "-"]
    for apart, said in ((["unshare", "--net"], "None\n"), (alone, "not here\n")):
        command = [*apart, sys.executable, "-c", code, server.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        assert done.stdout == said


# --- the transport -----------------------------------------------------------------------------


def read(transport: ShmTransport, info: SegmentInfo) -> bytes:
    into = bytearray(5)
    transport.read(info, [Move(AT, memoryview(into))], uptime() + 5)
    return bytes(into)


def test_a_mapping_to_read_reads_and_leaves_writes_to_others(store: Store) -> None:
    store.serve()
    store.segment.memory[AT : AT + 5] = b"there"
    with contextlib.closing(ShmTransport()) as transport:
        info = store.info(READS)
        assert transport.reaches(info)
        assert not transport.may_write(info)
        assert transport.view(info, AT, 5) is None
        assert read(transport, info) == b"there"
        shown = transport.shown(info)
        assert shown is not None
        assert bytes(shown[AT : AT + 5]) == b"there"
        mounted = transport.watch(info)
        assert mounted is not None
        assert mounted()
        transport.sweep()
        assert read(transport, info) == b"there"
    assert transport.not_mapped == {}


def test_a_writer_writes_and_shows(store: Store) -> None:
    store.serve()
    with contextlib.closing(ShmTransport()) as transport:
        info = store.info(WRITES)
        assert transport.may_write(info)
        transport.write(info, [Move(AT, memoryview(b"wrote"))], uptime() + 5)
        assert bytes(store.segment.memory[AT : AT + 5]) == b"wrote"
        shown = transport.shown(info)
        assert shown is not None
        assert bytes(shown[AT : AT + 5]) == b"wrote"


def test_a_holder_never_opens_a_name(store: Store) -> None:
    server = store.serve()
    store.stop()
    info = store.info()._replace(shm_name=store.segment.shm_name)
    with contextlib.closing(ShmTransport()) as transport:
        assert not transport.reaches(info)
        assert f"{server.name} does not answer" in transport.not_mapped[info.node]
        with pytest.raises(NodeUnreachableError):
            read(transport, info)
        named = info._replace(holder=0)
        transport.sweep()
        assert transport.reaches(named), "who is no holder does"


def test_a_node_that_comes_back_is_asked_again_and_one_that_refuses_is_left_alone(
    store: Store,
) -> None:
    store.serve()
    store.stop()
    gone = store.info()
    with contextlib.closing(ShmTransport()) as transport:
        assert not transport.reaches(gone)
        server = store.serve(needs_all=True)
        transport.sweep()
        assert not transport.reaches(store.info(WRITES))
        assert server.refused == 1
        transport.sweep()
        assert not transport.reaches(store.info(WRITES))
        assert server.refused == 1, "not a second time within AGAIN_S"
        assert transport.not_mapped == {gone.node: WHY[HandoverStatus.NOT_ALL]}
    with contextlib.closing(ShmTransport()) as transport:
        assert transport.reaches(store.info(EVERYTHING))


def test_a_node_that_does_not_answer_costs_one_wait(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handed, "ANSWER_S", 0.05)
    monkeypatch.setattr(shm, "AGAIN_S", 0.2)
    store.server = HandoverServer(store.segment)  # which nobody serves: a stopped process
    try:
        with contextlib.closing(ShmTransport()) as transport:
            info = store.info()
            began = uptime()
            assert not transport.reaches(info)
            transport.sweep()
            assert not transport.reaches(info)
            assert uptime() - began < 0.2
            assert "did not answer" in transport.not_mapped[info.node]
    finally:
        store.server.close()


def test_a_mapping_goes_with_its_entry_and_leaves_no_descriptor(store: Store) -> None:
    store.serve()
    before = len(os.listdir("/proc/self/fd"))
    with contextlib.closing(ShmTransport()) as transport:
        info = store.info()
        assert transport.reaches(info)
        os.unlink(f"{SHM_DIRECTORY}/{store.segment.shm_name}")
        transport.sweep()
        assert not transport.reaches(info)
        assert "lost the name" in transport.not_mapped[info.node]
        until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def test_a_child_of_a_fork_gives_the_descriptors_back(store: Store) -> None:
    store.serve()
    with contextlib.closing(ShmTransport()) as transport:
        info = store.info()
        assert transport.reaches(info)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                transport.abandon()
                again = ShmTransport()
                code = 0 if again.may_write(info) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert read(transport, info) == bytes(5)
