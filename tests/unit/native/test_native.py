"""The steps of the hot path: one suite for the compiled ones and those in Python."""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import random
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore import native
from kvstore.calls import Presence, SegmentOffer
from kvstore.limits import BATCH_KEYS_MAX, Key, Namespace
from kvstore.master.state.liveness import JoinedNode
from kvstore.master.state.records import MountedSegment, NamespaceTable
from kvstore.memory.header import (
    GENERATION_OFFSET,
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Header,
    extent_bytes,
    unpack,
)
from kvstore.native import interface, pure_python
from kvstore.native.interface import CAPABILITY_BYTES, ReadRow, WriteRow
from kvstore.native.packed_keys import PackedKeys, packed_keys
from kvstore.runtime.clock import uptime
from kvstore.runtime.stream import Stream
from kvstore.security.credentials import MASTER_NAME
from tests.support.encryption import shared_ends
from tests.support.identities import ENGINE, MASTER

SEED, GENERATION, SPACE = 0x1234_5678_9ABC_DEF0, 3, "llama/ü"
SIZE = 16 << 20


SLOW: Final[Any] = pure_python


@pytest.fixture(params=["compiled", "slow"])
def steps(request: pytest.FixtureRequest) -> Any:
    if request.param == "slow":
        return SLOW
    if not native.is_compiled:
        pytest.skip("kvstore.native._native is not built here")
    return native.steps


@pytest.fixture
def memory() -> memoryview:
    memory = memoryview(mmap.mmap(-1, SIZE))
    memory[GENERATION_OFFSET : GENERATION_OFFSET + 8].cast("Q")[0] = GENERATION
    return memory


def rows(
    sizes: list[int], parts: int = 1
) -> tuple[list[WriteRow], list[ReadRow], list[list[bytearray]]]:
    """Objects one behind the other: to write, and to read into the buffers that come along."""
    chance = random.Random(1)
    writes: list[WriteRow] = []
    reads: list[ReadRow] = []
    targets: list[list[bytearray]] = []
    offset = SUPERBLOCK_BYTES
    for index, size in enumerate(sizes):
        data = chance.randbytes(size)
        cuts = sorted(chance.randrange(size + 1) for _ in range(parts - 1))
        pieces = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, size], strict=True)]
        key, parent = f"key-{index}".encode(), f"key-{index - 1}".encode() if index else b""
        views = [memoryview(piece) for piece in pieces]
        place = offset, size, 7, index + 1, key
        writes.append((*place, views, parent, b'{"kind":"bytes"}', b""))
        targets.append([bytearray(len(piece)) for piece in pieces])
        reads.append((*place, [memoryview(target) for target in targets[-1]], b""))
        offset += extent_bytes(size)
    assert offset <= SIZE
    return writes, reads, targets


def write(steps: Any, memory: memoryview, some: list[WriteRow], **changed: object) -> int:
    generation, deadline = changed.get("generation", GENERATION), changed.get("deadline", math.inf)
    ended: int = steps.write_objects(memory, generation, SEED, SPACE, some, deadline, 3)
    return ended


def read(
    steps: Any, memory: memoryview, some: list[ReadRow], *, verify: bool = True
) -> list[bytes | int] | int:
    done: list[bytes | int] | int
    done = steps.read_objects(memory, GENERATION, SEED, SPACE, some, verify, math.inf, 3)
    return done


@pytest.mark.parametrize("seed", [0, 1, 0xDEAD_BEEF_CAFE_BABE])
def test_xxh3_is_xxh3(steps: Any, seed: int) -> None:
    chance = random.Random(seed)
    for size in [*range(1_300), 4_096, 5_000, 65_536, 1_000_001]:
        data = chance.randbytes(size)
        assert steps.xxh3_64(data, seed) == xxhash.xxh3_64_intdigest(data, seed), size


@pytest.mark.parametrize("more", [[], [8 << 20]], ids=["", "streamed"])
@pytest.mark.parametrize("parts", [1, 2, 7])
def test_what_is_written_can_be_read_by_both(
    steps: Any, memory: memoryview, parts: int, more: list[int]
) -> None:
    sizes = [0, 1, 63, 64, 65, 240, 241, 1_024, 4_096, 300_000, 1 << 20, *more]
    writes, reads, targets = rows(sizes, parts)
    assert write(steps, memory, writes) == 0
    for offset, size, epoch, counter, key, views, parent, descriptor, _ in writes:
        data = b"".join(views or ())
        payload = offset + HEADER_BYTES
        assert memory[payload : payload + size] == data
        header = unpack(memory[offset : offset + HEADER_BYTES], SEED, offset)
        assert header == Header(
            Namespace(SPACE), Key(key), Key(parent) if parent else None, size, epoch, counter,
            xxhash.xxh3_64_intdigest(data), descriptor,
        )  # fmt: skip
    assert read(steps, memory, reads) == [b'{"kind":"bytes"}'] * len(sizes)
    for written, into in zip(writes, targets, strict=True):
        assert b"".join(into) == b"".join(written[5] or ())


def test_a_stamp_is_written_behind_its_header(steps: Any, memory: memoryview) -> None:
    stamp, capability = bytes(range(16)), bytes(CAPABILITY_BYTES)
    (plain, stamped), reads, _ = rows([10, 10])
    size = len(SPACE.encode()) + len(stamped[4]) + len(stamped[6]) + len(stamped[7])
    for row in (plain, stamped):
        memory[row[0] : row[0] + HEADER_BYTES] = b"\xff" * HEADER_BYTES
    assert write(steps, memory, [(*plain[:8], capability), (*stamped[:8], capability + stamp)]) == 0
    end = stamped[0] + 64 + size
    assert memory[end : end + 20] == stamp + b"\xff" * 4
    behind = plain[0] + 64 + len(SPACE.encode()) + len(plain[4]) + len(plain[6]) + len(plain[7])
    assert memory[behind : behind + 20] == b"\xff" * 20
    assert read(steps, memory, reads) == [stamped[7]] * 2


def test_any_flipped_bit_is_noticed(steps: Any, memory: memoryview) -> None:
    writes, reads, _ = rows([5_000])
    write(steps, memory, writes)
    header_end = HEADER_BYTES - 1
    for end in range(HEADER_BYTES):  # behind it the header's bytes mean nothing
        if unpack(memory[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + end], SEED, SUPERBLOCK_BYTES):
            header_end = end
            break
    chance = random.Random(3)
    for at in [*range(header_end), *(HEADER_BYTES + chance.randrange(5_000) for _ in range(500))]:
        flipped = SUPERBLOCK_BYTES + at
        memory[flipped] ^= 1 << chance.randrange(8)
        (outcome,) = read(steps, memory, reads)  # type: ignore[misc]
        assert outcome == (interface.STALE if at < HEADER_BYTES else interface.CORRUPT), at
        write(steps, memory, writes)
    assert read(steps, memory, reads) == [b'{"kind":"bytes"}']


@pytest.mark.parametrize("size", [1, 16, 63, 64, 65, 128, 129, 200, 239, 240, 241, 400, 5_000])
def test_what_is_verified_is_what_was_copied(steps: Any, memory: memoryview, size: int) -> None:
    """The target lies over the payload itself: copying changes what is read again."""
    (row,), _, _ = rows([size])
    assert row[5] is not None
    (data,) = row[5]
    start = row[0] + HEADER_BYTES
    for shift in (1, 7, 8, 32, 63, 64, 65, 128, 199):
        assert write(steps, memory, [row]) == 0
        target = memory[start + shift : start + shift + size]
        read: ReadRow = (*row[:5], [target], b"")
        outcomes = steps.read_objects(memory, GENERATION, SEED, SPACE, [read], True, math.inf, 1)
        assert outcomes == [interface.CORRUPT] or target == data, f"{size} bytes, {shift} further"
        assert size > 240 or target == data, "short ones are read before any of them is copied"


@pytest.mark.parametrize("change", range(5))
def test_a_row_of_another_object_is_stale(steps: Any, memory: memoryview, change: int) -> None:
    writes, reads, targets = rows([100])
    write(steps, memory, writes)
    offset, size, epoch, counter, key, into, none = reads[0]
    row = [
        (offset + 1024, size, epoch, counter, key, into, none),
        (offset, size + 1, epoch, counter, key, [memoryview(bytearray(101))], none),
        (offset, size, epoch + 1, counter, key, into, none),
        (offset, size, epoch, counter + 1, key, into, none),
        (offset, size, epoch, counter, b"other", into, none),
    ][change]
    assert read(steps, memory, [row]) == [interface.STALE]
    assert not any(targets[0][0])


@pytest.mark.parametrize("sizes", [[0], [1, 240, 241, 5_000], [300_000, 3, 262_144]])
def test_payloads_that_are_in_their_places(
    steps: Any, memory: memoryview, sizes: list[int]
) -> None:
    """As a device leaves them there: only hashed."""
    writes, reads, targets = rows(sizes)
    write(steps, memory, writes)
    expected = bytes(memory)
    for row in writes:
        memory[row[0] : row[0] + HEADER_BYTES] = bytes(HEADER_BYTES)
    sealed: list[WriteRow] = [(*row[:5], None, *row[6:]) for row in writes]
    assert write(steps, memory, sealed) == 0
    assert bytes(memory) == expected
    looks: list[ReadRow] = [(*row[:5], None, b"") for row in reads]
    assert read(steps, memory, looks) == [b'{"kind":"bytes"}'] * len(sizes)
    assert not any(any(part) for parts in targets for part in parts)  # nothing was copied
    if sizes[0]:
        memory[reads[0][0] + HEADER_BYTES] ^= 1
        assert read(steps, memory, looks)[0] == interface.CORRUPT  # type: ignore[index]


def test_fenced_late_and_outside(steps: Any, memory: memoryview) -> None:
    writes, reads, _ = rows([100])
    before = bytes(memory)
    assert write(steps, memory, writes, generation=4) == interface.UNMOUNTED
    assert write(steps, memory, writes, deadline=uptime() - 1) == interface.LATE
    for offset in (0, SUPERBLOCK_BYTES - 1, SIZE - HEADER_BYTES, SIZE, 2**63):
        moved = (offset, *writes[0][1:])
        assert write(steps, memory, [moved]) == interface.OUTSIDE
        assert read(steps, memory, [(offset, *reads[0][1:])]) == interface.OUTSIDE
    with pytest.raises(ValueError, match="differ in size"):
        read(steps, memory, [(SUPERBLOCK_BYTES, 2, 1, 1, b"k", [memoryview(bytearray(1))], b"")])
    huge = (SUPERBLOCK_BYTES, 2**64 - 1, 1, 1, b"k", None, b"")
    assert read(steps, memory, [huge]) == interface.OUTSIDE
    assert memory == before


@pytest.mark.parametrize(
    "row",
    [
        (4096, 1, 1, 1, b"k", [memoryview(b"read-only")[:1]], b""),
        (4096, 2, 1, 1, b"k", [memoryview(bytearray(1))], b""),
        (4096, -1, 1, 1, b"k", None, b""),
        (4096, 1, 1, 1, b"k" * 257, None, b""),
        (4096, 1, 1, 1, "k", None, b""),
        (4096, 1, 1, 1, b"k", (), b""),
        (4096, 1, 1, 1, b"k", None, b"c" * 33),
        (4096, 1, 1, 1, b"k", None),
        "row",
    ],
)
@pytest.mark.parametrize("steps", ["compiled"], indirect=True)
def test_nonsense_raises_and_releases(steps: Any, memory: memoryview, row: object) -> None:
    """Compiled ones know addresses, and not objects."""
    with pytest.raises((TypeError, ValueError, OverflowError, BufferError)):
        read(steps, memory, [row])  # type: ignore[list-item]
    memory.release()  # raises BufferError where somebody holds it


def test_keys_packed_as_python_packs_them(steps: Any) -> None:
    keys = [b"%031d" % i for i in range(1_000)]
    assert steps.pack_keys(keys) == (b"".join(keys), 31)
    assert steps.unpack_keys(b"".join(keys), 31) == keys
    assert packed_keys(keys) == keys
    for irregular in (
        [],
        [b"a", b"bc"],
        [b"a", "b"],
        [b""],
        [b"x" * 257, b"x" * 257],
        [None, None],
    ):
        assert steps.pack_keys(irregular) is None
    with pytest.raises(TypeError):
        steps.pack_keys(5)
    assert packed_keys(["a", b"bc"]) == [b"a", b"bc"]
    with pytest.raises(Exception, match="are allowed"):
        packed_keys([b"k"] * (BATCH_KEYS_MAX + 1))


def test_many_keys_as_python_finds_them(steps: Any) -> None:
    def segment(number: int) -> MountedSegment:
        offer = SegmentOffer(1 << 20, bytes(16), "", "", bytes(16), 1, 1, True)
        return MountedSegment(number, JoinedNode("n", "h", None, 0), offer, 0)

    table = NamespaceTable(Namespace(SPACE))
    alive, dead = segment(1), segment(2)
    dead.alive = False
    keys = [Key(b"%08d" % i) for i in range(6_000)]  # more than one shard
    for number, key in enumerate(keys[:5_000]):
        record = table.add(key)
        record.segment = (None, alive, dead, dead)[number % 4]
        record.more = ((alive, 0),) if number % 4 == 3 and number % 8 == 3 else ()
        record.writer = number % 3
    by_key = bytearray()
    for key in keys:
        found = table.get(key)
        state = Presence.ABSENT
        if found is not None:
            state = Presence.COMPLETE if found.complete else Presence(2 if found.writer else 0)
        by_key.append(state)
    assert set(by_key) == {0, 1, 2}
    assert len(table.shards) > 1
    assert table.presence(keys) == by_key
    assert table.presence(PackedKeys(b"".join(keys), 8)) == by_key
    assert table.get_many(PackedKeys(b"".join(keys), 8)) == [table.get(key) for key in keys]
    nothing: list[dict[Key, int]] = [{}]
    with pytest.raises(ValueError, match="mask"):
        steps.get_many(nothing, 1, b"k", 1)
    with pytest.raises(ValueError, match="stride"):
        steps.get_many(nothing, 0, b"k", 0)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def reply(call_id: int, kind: int, payload: bytes, name_size: int = 0) -> bytes:
    head = (10 + len(payload)).to_bytes(4, "little") + call_id.to_bytes(8, "little")
    return head + bytes([kind, name_size]) + payload


def exchange(
    steps: Any, sock: socket.socket, timeout_s: float = 10.0, spin_s: float = 0.0
) -> tuple[int, int, int, bytes | None]:
    done: tuple[int, int, int, bytes | None]
    done = steps.exchange(sock, b"request", 5, spin_s, uptime() + timeout_s, 1 << 20)
    return done


@pytest.mark.parametrize("size", [0, 100, 32_754, 32_755, 1 << 19])
@pytest.mark.parametrize("spin_s", [0.0, 0.5])
def test_an_exchange(
    steps: Any, ends: tuple[socket.socket, socket.socket], size: int, spin_s: float
) -> None:
    ours, theirs = ends
    payload = random.Random(size).randbytes(size)

    def answer() -> None:
        assert theirs.recv(100) == b"request"
        whole = reply(5, 3, payload)
        theirs.sendall(whole[:7])
        theirs.sendall(whole[7:])

    thread = threading.Thread(target=answer)
    thread.start()
    status, spun, kind, data = exchange(steps, ours, spin_s=spin_s)
    thread.join()
    assert (status, kind, data) == (interface.ANSWERED, 3, payload)
    assert spun == 0 or spin_s > 0


def test_how_an_exchange_fails(steps: Any, ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    assert exchange(steps, ours, 0.05)[0] == interface.TIMED_OUT
    theirs.sendall(b"x")
    assert exchange(steps, ours)[0] == interface.UNASKED
    assert ours.recv(1) == b"x"
    assert theirs.recv(100) == b"request"

    def answered(data: bytes, *, end: bool = False) -> int:
        def answer() -> None:
            theirs.recv(100)
            theirs.sendall(data)
            if end:
                theirs.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=answer)
        thread.start()
        status, *_ = exchange(steps, ours)
        thread.join()
        return status

    for wrong in (reply(6, 3, b"x"), reply(5, 3, b"x", 1), b"\0" * 14, b"\xff" * 14):
        assert answered(wrong) == interface.GARBLED
    assert answered(reply(5, 3, b"x" * 10)[:20], end=True) == interface.ENDED
    assert exchange(steps, ours)[0] == interface.UNASKED


@pytest.fixture
def tls_ends() -> Iterator[tuple[ssl.SSLSocket, ssl.SSLSocket]]:
    """Of a client and of a master."""
    ours, theirs = socket.socketpair()
    client, master = (shared_ends().credentials(wanted) for wanted in (ENGINE, MASTER))
    with ThreadPoolExecutor(1) as pool:
        answers = pool.submit(master.server().wrap_socket, theirs, server_side=True)
        within = client.client().wrap_socket(ours, server_hostname=MASTER_NAME)
        with within, answers.result(10) as other:
            yield within, other


@pytest.mark.parametrize("size", [0, 100, 1 << 19])
def test_an_exchange_within_tls(tls_ends: tuple[ssl.SSLSocket, ssl.SSLSocket], size: int) -> None:
    ours, theirs = tls_ends
    payload = random.Random(size).randbytes(size)

    def answer() -> None:
        for _ in range(2):
            assert theirs.recv(100) == b"request"
            theirs.sendall(reply(5, 3, payload))

    thread = threading.Thread(target=answer)
    thread.start()
    for _ in range(2):
        assert exchange(SLOW, ours) == (interface.ANSWERED, 0, 3, payload)
    thread.join()
    theirs.sendall(reply(5, 3, b"") * 2)
    assert ours.recv(14) == reply(5, 3, b""), "and the other one is decrypted"
    assert exchange(SLOW, ours)[0] == interface.UNASKED


class Raised(BaseException):
    """Of a signal handler."""


@pytest.fixture
def interrupted() -> Iterator[Callable[[], None]]:
    """Has the handler of a signal raise in the main thread, which the test runs in."""

    def handler(*_: object) -> None:
        raise Raised

    before = signal.signal(signal.SIGUSR1, handler)
    yield lambda: signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


@pytest.fixture
def wire() -> Iterator[tuple[Stream, socket.socket]]:
    """A stream over TCP, and the other end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = Stream(socket.create_connection(listener.getsockname()), stall_s=1.0)
        theirs, _ = listener.accept()
    with theirs:
        yield ours, theirs
        ours.close()


def peer(act: Callable[[], object]) -> threading.Thread:
    def run() -> None:
        with contextlib.suppress(OSError):
            act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_signal_is_heard_while_a_transfer_moves_bytes(
    steps: Any, wire: tuple[Stream, socket.socket], interrupted: Callable[[], None], verb: str
) -> None:
    stream, theirs = wire
    size, deadline = 64 << 20, uptime() + 3
    views = [memoryview(bytearray(size))]

    def trickle() -> None:
        theirs.recv(1 << 16)
        if verb == "read":
            theirs.sendall(b"KVdt" + bytes(4) + bytes(3_000))
        interrupted()
        while uptime() < deadline + 1:
            theirs.sendall(bytes(3_000)) if verb == "read" else theirs.recv(200_000)
            time.sleep(0.01)

    def move() -> None:
        if verb == "read":
            reads: list[ReadRow] = [(4096, size, 1, 1, b"k", views, b"")]
            steps.tcp_read(stream, 1 << 30, SEED, SPACE, reads, True, deadline, 1.0, 0.0, False)
        else:
            writes: list[WriteRow] = [(4096, size, 1, 1, b"k", views, b"", b"", b"")]
            steps.tcp_write(stream, 1 << 30, SEED, SPACE, writes, deadline, 1.0, 0.0, False)

    thread = peer(trickle)
    with pytest.raises(Raised):
        move()
    assert uptime() < deadline, "it was heard when the call had ended"
    stream.close()
    with contextlib.suppress(OSError):
        theirs.shutdown(socket.SHUT_RDWR)
    thread.join()


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 6)), max_size=12))
def test_buffers_that_share_memory(spans: list[tuple[int, int]]) -> None:
    area = memoryview(bytearray(66))
    buffers = [area[start : start + size] for start, size in spans]
    used = [set(range(start, start + size)) for start, size in spans]
    shared = any(one & other for one, other in itertools.combinations(used, 2))
    for each in (native.steps, SLOW):
        found = each.overlap(buffers)
        assert (found is not None) == shared
        if found is not None:
            assert used[found[0]] & used[found[1]]


def test_flat_views_are_of_rows_of_bytes_alone(steps: Any) -> None:
    area = np.arange(64, dtype=np.uint8)
    locked = area[8:16]
    locked.flags.writeable = False
    others = [
        b"bytes", None, area[::2], area.reshape(8, 8), area[:0], area.view(np.int8), np.bool_(1),
        area.view(np.recarray), np.zeros(2, "M8[s]"), np.zeros(2, "u1,u1"), area.view(np.uint16),
    ]  # fmt: skip
    assert steps.flat_views(np.ndarray, others, False) == [None] * len(others)
    first, second = steps.flat_views(np.ndarray, (area[:8], locked), False)
    assert (first.tolist(), second.tolist()) == ([*range(8)], [*range(8, 16)])
    assert [view is None for view in steps.flat_views(np.ndarray, [first, area, locked], True)] == [
        True, False, True,
    ]  # fmt: skip


def test_records_are_named_tuples_of_the_rows(steps: Any) -> None:
    one, two = steps.records(NamedRow, [1, 2], ("a", "b"))
    assert (type(one), one, two.name) == (NamedRow, (1, "a"), "b")
    assert steps.records(NamedRow, [], []) == []
    with pytest.raises(ValueError, match=r"length|shorter"):
        steps.records(NamedRow, [1, 2], ["a"])


class NamedRow(NamedTuple):
    number: int
    name: str
