"""Segments: one owner per name, nothing left behind, nothing taken from under a client."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import (
    ConfigError,
    LeftOverMemoryError,
    NodeNameTakenError,
    SharedMemoryTooSmallError,
    StartupError,
)
from kvstore.limits import Key, Namespace
from kvstore.memory import entries, taking
from kvstore.memory.entries import SHM_DIRECTORY, free_node_name, freed_by_removal
from kvstore.memory.header import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Header,
    Owner,
    pack_into,
    unpack,
)
from kvstore.memory.mapping import Mapping
from kvstore.memory.segment import NodeSegment
from kvstore.memory.taking import MemoryOptions
from kvstore.network.host import host_id
from tests.support.processes import run_python

MIB = 1 << 20

OWNER = """
import sys
from kvstore.memory.segment import NodeSegment
segment = NodeSegment.create(sys.argv[1], 1 << 20)
segment.memory[5000:5005] = b"hello"
print(segment.uuid.hex(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-{os.getpid()}"
    yield name
    for path in Path(SHM_DIRECTORY).glob(f"kvstore.{name}*"):
        path.unlink()


@pytest.fixture
def segment(name: str) -> Iterator[NodeSegment]:
    segment = NodeSegment.create(name, MIB)
    yield segment
    segment.close()


def entry(name: str) -> Path:
    return Path(SHM_DIRECTORY, f"kvstore.{name}")


def killed_owner(name: str) -> bytes:
    """Leaves an entry behind, as ``kill -9`` does; returns its uuid."""
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        uuid = bytes.fromhex(owner.stdout.readline().decode())
        owner.kill()
    return uuid


def test_discarded_memory_stays_where_it_is_without_its_objects(name: str) -> None:
    """A client that has it mapped would keep it, and new memory beside it might find no room."""
    before = killed_owner(name)
    inode = entry(name).stat().st_ino
    header = Header(Namespace("n"), Key(b"k"), None, 5, 1, 9, 0, b"")
    left = NodeSegment.attach(name, MIB)
    assert left is not None
    place = left.memory[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + HEADER_BYTES]
    pack_into(place, header, left.seed, SUPERBLOCK_BYTES)
    assert len(list(left.scan())) == 1
    generation = left.generation
    left.close(unlink=False)
    again = NodeSegment.attach(name, MIB, discard=True)
    assert again is not None
    assert entry(name).stat().st_ino == inode
    assert again.uuid != before
    assert again.generation > generation, "writers of before stop"
    assert list(again.scan()) == []
    again.close()


def test_memory_is_not_thrown_away_for_other_memory_without_room(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_owner(name)
    path = str(entry(name))
    assert freed_by_removal(path) == MIB
    held = os.open(path, os.O_RDWR)
    with mmap.mmap(held, MIB):
        os.close(held)
        assert freed_by_removal(path) == 0, "another process has it mapped"
        full = os.statvfs_result((4096, 4096, 1024, 0, 0, 0, 0, 0, 0, 255))
        monkeypatch.setattr(os, "statvfs", lambda _: full)
        with pytest.raises(SharedMemoryTooSmallError):
            NodeSegment.create(name, 2 * MIB)
        assert entry(name).exists()
    assert freed_by_removal(path) == MIB


def test_a_segment_is_there_until_it_is_closed(name: str) -> None:
    segment = NodeSegment.create(name, MIB + 4711, node="somebody")
    assert segment.size == MIB == entry(name).stat().st_size == len(segment.memory)
    assert segment.shm_name == entry(name).name
    assert (segment.node, segment.generation) == ("somebody", 1)
    assert (len(segment.uuid), len(segment.token)) == (16, 16)
    assert entry(name).stat().st_mode & 0o777 == 0o600
    segment.close()
    segment.close()
    assert not entry(name).exists()
    assert segment.generation == 0
    assert segment.fd == -1


def test_two_segments_of_one_name_never_look_alike(name: str) -> None:
    first = NodeSegment.create(name, MIB)
    first.close()
    second = NodeSegment.create(name, MIB)
    second.close()
    assert len({first.uuid, second.uuid, first.token, second.token}) == 4
    assert first.seed != second.seed


@pytest.mark.parametrize("bad", ["", ".", "../x", "a/b", "ä", "a" * 129, "a b", "a\0"])
def test_a_bad_name_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError):
        NodeSegment.create(bad, MIB)


@pytest.mark.parametrize("size", [-1, 0, MIB - 1])
def test_a_size_below_one_mib_is_refused(name: str, size: int) -> None:
    with pytest.raises(ConfigError):
        NodeSegment.create(name, size)
    assert not entry(name).exists()


def test_a_name_in_use_is_refused_and_its_owner_not_disturbed(
    segment: NodeSegment, name: str
) -> None:
    with pytest.raises(NodeNameTakenError):
        NodeSegment.create(name, MIB)
    assert entry(name).exists()
    assert segment.generation == 1


def test_what_a_killed_owner_left_is_reclaimed(name: str) -> None:
    old = killed_owner(name)
    mapping = Mapping.attach(entry(name).name, old)
    assert mapping is not None
    segment = NodeSegment.create(name, 2 * MIB)
    # Whoever still maps the old memory keeps it, whole: no SIGBUS.
    assert bytes(mapping.memory[5000:5005]) == b"hello"
    assert mapping.memory[-1] == 0
    assert bytes(segment.memory[5000:5005]) == bytes(5)
    mapping.close()
    segment.close()


def test_an_entry_that_is_kept_is_taken_over(name: str) -> None:
    NodeSegment.create(name, MIB).close(unlink=False)
    assert entry(name).exists()
    NodeSegment.create(name, MIB).close()
    assert not entry(name).exists()


def test_no_room_is_said_before_anything_is_taken(name: str) -> None:
    room = os.statvfs(SHM_DIRECTORY)
    size = room.f_blocks * room.f_frsize + MIB
    with pytest.raises(SharedMemoryTooSmallError) as caught:
        NodeSegment.create(name, size)
    assert caught.value.fields["needed_bytes"] == size - size % MIB
    assert int(caught.value.fields["available_bytes"]) < size
    assert "--shm-size" in caught.value.advice
    assert not entry(name).exists()


@pytest.mark.parametrize("step", [0, 3])
def test_room_that_vanishes_meanwhile_leaves_nothing_behind(
    name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_memory: object, start: int, _length: int, _advice: int) -> bool:
        if start == step * taking.RESERVE_BYTES:
            raise OSError(errno.EFAULT, "as MADV_POPULATE_WRITE says that there is no room")
        return True

    monkeypatch.setattr(taking, "populate", full)
    with pytest.raises(SharedMemoryTooSmallError):
        NodeSegment.create(name, 5 * taking.RESERVE_BYTES, options=MemoryOptions(threads=3))
    assert not entry(name).exists()


def test_progress_is_told_and_may_stop_it(name: str) -> None:
    told: list[tuple[int, int]] = []
    size = 3 * taking.RESERVE_BYTES // 2
    NodeSegment.create(name, size, progress=lambda done, total: told.append((done, total))).close()
    assert told == [(taking.RESERVE_BYTES, size), (size, size)]


@pytest.mark.parametrize("steps", [1, 2])
def test_what_progress_raises_ends_the_creation_and_its_threads(name: str, steps: int) -> None:
    def interrupted(done: int, _total: int) -> None:
        if done >= steps * taking.RESERVE_BYTES:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt) as caught:
        NodeSegment.create(
            name,
            4 * taking.RESERVE_BYTES,
            progress=interrupted,
            options=MemoryOptions(threads=2),
        )
    # Now, while the traceback still holds every frame.
    assert caught.tb is not None
    assert threading.active_count() == before
    assert not entry(name).exists()


def test_every_page_is_there_however_many_threads_bring_them_in(name: str) -> None:
    segment = NodeSegment.create(
        name, 3 * taking.RESERVE_BYTES + MIB, options=MemoryOptions(threads=3, huge_pages="off")
    )
    status = entry(name).stat()
    assert status.st_blocks * 512 == segment.size
    segment.close()


def test_a_kernel_that_cannot_populate_gets_its_pages_touched(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(taking, "populate", lambda *_: False)
    segment = NodeSegment.create(name, MIB)
    assert bytes(segment.memory[SUPERBLOCK_BYTES:]) == bytes(MIB - SUPERBLOCK_BYTES)
    segment.close()


def test_memory_that_was_handed_out_outlives_the_segment(segment: NodeSegment) -> None:
    view = segment.memory[8192:8200]
    segment.close()
    view[:] = b"12345678"
    assert bytes(view) == b"12345678"


def test_generations_grow_and_mappings_see_them(segment: NodeSegment) -> None:
    mapping = Mapping.attach(segment.shm_name, segment.uuid)
    assert mapping is not None
    assert mapping.generation == 1
    assert segment.bump_generation() == 2 == segment.generation == mapping.generation
    segment.close()
    assert mapping.generation == 0
    mapping.close()
    assert mapping.generation == 0


def test_a_mapping_is_the_same_memory_and_closes_twice(segment: NodeSegment) -> None:
    mapping = Mapping.attach(segment.shm_name, segment.uuid)
    assert mapping is not None
    assert (mapping.size, mapping.uuid) == (segment.size, segment.uuid)
    mapping.memory[9000:9003] = b"abc"
    assert bytes(segment.memory[9000:9003]) == b"abc"
    view = mapping.memory[9000:9003]
    mapping.close()
    mapping.close()
    assert bytes(view) == b"abc"


def test_nothing_else_is_attached(segment: NodeSegment) -> None:
    assert Mapping.attach(segment.shm_name, bytes(16)) is None
    assert Mapping.attach("kvstore.no-such-segment", segment.uuid) is None
    assert Mapping.attach("../shm/" + segment.shm_name, segment.uuid) is None
    assert Mapping.attach("", segment.uuid) is None


def test_a_shortened_entry_is_not_attached(segment: NodeSegment) -> None:
    """Mapping it would mean SIGBUS at the first touch behind its end."""
    path = Path(SHM_DIRECTORY, f"{segment.shm_name}-short")
    path.write_bytes(bytes(segment.memory[:SUPERBLOCK_BYTES]))
    assert Mapping.attach(path.name, segment.uuid) is None
    assert "its superblock says" in Mapping.tried(path.name, segment.uuid)[1]
    path.write_bytes(b"short")
    assert Mapping.attach(path.name, segment.uuid) is None


def test_what_a_writer_did_to_the_file_is_undone_at_the_next_start(name: str) -> None:
    """A descriptor that cannot truncate can make the file longer, and free pages in it."""
    segment = NodeSegment.create(name, MIB)
    segment.memory[-5:] = b"there"
    lent = segment.lend()
    os.posix_fallocate(lent.to_write, MIB, MIB)
    with mmap.mmap(lent.to_write, MIB) as mapped:
        mapped.madvise(mmap.MADV_REMOVE, MIB // 2, MIB // 4)
    lent.close()
    mapping = Mapping.attach(segment.shm_name, segment.uuid)
    assert mapping is not None, "it stays as good for clients as it was"
    assert len(mapping.memory) == MIB
    mapping.close()
    del mapping
    segment.close(unlink=False)

    again = NodeSegment.attach(name, MIB)
    assert again is not None
    file = entry(name).stat()
    assert (file.st_size, file.st_blocks * 512) == (MIB, MIB)
    assert bytes(again.memory[-5:]) == b"there"
    again.close()


def test_a_file_as_long_as_what_is_asked_for_needs_a_superblock_that_says_so(name: str) -> None:
    NodeSegment.create(name, MIB).close(unlink=False)
    os.truncate(entry(name), 2 * MIB)
    with pytest.raises(LeftOverMemoryError, match="1 MiB, and 2 MiB were asked for"):
        NodeSegment.attach(name, 2 * MIB)
    assert entry(name).stat().st_size == 2 * MIB, "left unchanged"


def test_what_cannot_be_attached_says_why(segment: NodeSegment) -> None:
    assert "of another node" in Mapping.tried(segment.shm_name, bytes(16))[1]
    assert "is not here" in Mapping.tried("kvstore.no-such-segment", segment.uuid)[1]
    assert "no name" in Mapping.tried("../shm/" + segment.shm_name, segment.uuid)[1]


LIMITED = """
import resource, sys
from kvstore.errors import MemoryLimitError
from kvstore.memory.mapping import Mapping
from kvstore.memory.segment import NodeSegment
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20),) * 2)
print(Mapping.tried(sys.argv[1], bytes.fromhex(sys.argv[2]))[1])
try:
    NodeSegment.create(sys.argv[3], 64 << 20)
except MemoryLimitError as error:
    print(error)
"""


def test_a_limit_of_addresses_is_named(name: str) -> None:
    segment = NodeSegment.create(name, 64 << 20)
    command = [sys.executable, "-c", LIMITED, segment.shm_name, segment.uuid.hex(), f"{name}-b"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    finally:
        segment.close()
    mapped, made = done.stdout.splitlines()
    for said in (mapped, made):
        assert "of 64 MiB cannot be mapped: cannot allocate memory; ulimit -v allows" in said
    assert not entry(f"{name}-b").exists()


def test_wiping_takes_that_version_and_no_other(segment: NodeSegment) -> None:
    first, second, outside = SUPERBLOCK_BYTES, SUPERBLOCK_BYTES + 4096, segment.size
    for offset, counter in ((first, 1), (second, 2)):
        header = Header(Namespace("n"), Key(b"k"), None, 100, 5, counter, 0, b"")
        pack_into(segment.memory[offset : offset + HEADER_BYTES], header, segment.seed, offset)
    # A late order for what stood at ``second`` before; nothing at all; not in the segment.
    assert segment.wipe([second, first + 1024, 0, outside, 2**63], [5] * 5, [1] * 5) == 0
    assert segment.wipe([first, second], [5, 4], [1, 2]) == 1
    assert unpack(segment.memory[first:], segment.seed, first) is None
    assert unpack(segment.memory[second:], segment.seed, second) is not None
    assert segment.wipe([first], [5], [1]) == 0


def test_ranges_are_zeroed_and_nothing_beside_them(
    segment: NodeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.memory.segment.ZERO_STEP", 1_000)
    before = bytes(segment.memory[:SUPERBLOCK_BYTES])
    segment.memory[SUPERBLOCK_BYTES:] = b"x" * (segment.size - SUPERBLOCK_BYTES)
    outside = [(0, 64), (SUPERBLOCK_BYTES, 2**40), (2**63, 64), (segment.size - 1, 2)]
    segment.zero([*outside, (8_192, 4_096), (segment.size - 10, 10), (5_000, 0)])
    assert segment.memory[:SUPERBLOCK_BYTES] == before
    assert segment.memory[8_191:12_289] == b"x" + bytes(4_096) + b"x"
    assert segment.memory[-11:] == b"x" + bytes(10)
    extents = bytes(segment.memory[SUPERBLOCK_BYTES:])  # the superblock is random in part
    assert extents.count(b"x") == len(extents) - 4_106


def test_zeroing_ends_when_its_caller_wants_that(
    segment: NodeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.memory.segment.ZERO_STEP", 1_000)
    segment.memory[8_192:12_288] = b"x" * 4_096
    asked = iter([False, True])
    segment.zero([(8_192, 4_096)], lambda: next(asked))
    assert segment.memory[8_192:12_288] == bytes(1_000) + b"x" * 3_096


def test_free_names_are_counted_up(name: str) -> None:
    assert free_node_name(name) == name
    first = NodeSegment.create(name, MIB)
    second = NodeSegment.create(f"{name}-2", MIB)
    assert free_node_name(name) == f"{name}-3"
    first.close()
    assert free_node_name(name) == name
    second.close()


def test_a_free_name_is_found_by_the_entries_that_exist(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master's own node is called after its port: counting up to that takes seconds."""
    asked: list[str] = []
    is_taken = entries._is_taken

    def asks(path: str) -> bool:
        asked.append(path)
        return is_taken(path)

    monkeypatch.setattr(entries, "_is_taken", asks)
    far = f"{name}-41293"
    segment = NodeSegment.create(far, MIB)
    assert free_node_name(name, Owner("cluster")) == name
    segment.close()
    assert len(asked) <= 2 * len(list(entries.directories()))


def test_the_name_of_a_killed_owner_is_free(name: str) -> None:
    killed_owner(name)
    assert free_node_name(name) == name


def test_host_id_is_the_same_in_every_process_of_a_host() -> None:
    code = "from kvstore.network.host import host_id; print(host_id())"
    other = run_python("-c", code, check=True)
    assert other.stdout.strip() == host_id()
    assert not host_id().startswith("unknown")


def test_an_entry_that_is_a_link_is_not_followed(name: str) -> None:
    entry(name).symlink_to("/etc/hostname")
    with pytest.raises(StartupError):
        NodeSegment.create(name, MIB)
    assert entry(name).is_symlink()
    assert Mapping.attach(entry(name).name, bytes(16)) is None


# --- entries of other users ----------------------------------------------------------------------

OTHER_USER, GROUP = 65_533, 65_532

AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")


@AS_ROOT
@pytest.mark.parametrize("kind", ["empty", "left over", "pipe", "link"])
def test_an_entry_of_another_user_is_no_nodes(name: str, kind: str) -> None:
    """Root adopted it: its user read and changed the memory, and brought objects of its own."""
    path = entry(name)
    match kind:
        case "empty":
            path.touch(mode=0o666)
        case "left over":
            killed_owner(name)
        case "pipe":
            os.mkfifo(path)
        case _:
            path.symlink_to(entry(f"{name}-target"))
            NodeSegment.create(f"{name}-target", MIB).close(unlink=False)
    os.lchown(path, OTHER_USER, GROUP)
    before = path.lstat()
    for start in (NodeSegment.create, NodeSegment.attach):
        for size in (MIB, 2 * MIB):
            with pytest.raises(NodeNameTakenError, match=f"{path} belongs to the user 65533"):
                start(name, size)
    assert path.lstat() == before
    assert free_node_name(name) == free_node_name(name, Owner("cluster")) == f"{name}-2"
    NodeSegment.create(f"{name}-2", MIB).close()


@AS_ROOT
def test_memory_of_another_user_goes_without_the_key_that_a_node_has_beside_it(name: str) -> None:
    """By ``kvstore clean``: a node of this name may live, with its memory in a hugetlbfs."""
    key = Path(entries.key_path(f"kvstore.{name}"))
    key.touch()
    try:
        killed_owner(name)
        os.chown(entry(name), OTHER_USER, GROUP)
        [left] = [left for left in entries.left_overs() if left.name == name]
        assert entries.remove_left(left)
        assert (entry(name).exists(), key.exists()) == (False, True)
    finally:
        key.unlink()


@AS_ROOT
def test_a_client_maps_memory_of_its_own_user_of_root_and_of_its_groups(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user can let others open a file by an access list, without a group in common."""
    uuid = killed_owner(name)
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(os, "getgroups", lambda: [GROUP])
    for user, group, is_mapped in ((1, 1, True), (0, 1, True), (OTHER_USER, GROUP, True),
                                   (OTHER_USER, OTHER_USER, False)):  # fmt: skip
        os.chown(entry(name), user, group)
        mapping, why = Mapping.tried(entry(name).name, uuid)
        assert (mapping is not None) == is_mapped, why
        if mapping is not None:
            mapping.close()


# --- who may map it ----------------------------------------------------------------------------


def can_map(segment: NodeSegment, *, groups: list[int]) -> bool:
    """Whether another user, who is in these groups, can map it, and is told why not."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setgroups(groups)
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            code = 0 if Mapping.attach(segment.shm_name, segment.uuid) is not None else 1
            if code:
                assert "--shm-group" in Mapping.tried(segment.shm_name, segment.uuid)[1]
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 0


@AS_ROOT
def test_members_of_its_group_may_map_it_and_no_other_user(name: str) -> None:
    options = MemoryOptions(group=str(GROUP))
    shared = NodeSegment.create(name, MIB, options=options)
    assert entry(name).stat().st_mode & 0o777 == 0o660
    assert can_map(shared, groups=[GROUP])
    assert not can_map(shared, groups=[])
    shared.close(unlink=False)
    # As it was started last: the next start may take the right away, and give it again.
    alone = NodeSegment.attach(name, MIB)
    assert alone is not None
    assert not can_map(alone, groups=[GROUP])
    alone.close(unlink=False)
    again = NodeSegment.attach(name, MIB, options=options)
    assert again is not None
    assert can_map(again, groups=[GROUP])
    again.close()


def test_a_group_that_is_not_there(name: str) -> None:
    with pytest.raises(ConfigError, match="no such group"):
        NodeSegment.create(name, MIB, options=MemoryOptions(group="nobody-has-this-name"))
    assert not entry(name).exists()


def test_a_group_that_we_are_not_in(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fchown", refuses)
    with pytest.raises(StartupError, match="cannot be given to group") as caught:
        NodeSegment.create(name, MIB, options=MemoryOptions(group=str(GROUP)))
    assert "has to be a member" in caught.value.advice
    assert not entry(name).exists()
