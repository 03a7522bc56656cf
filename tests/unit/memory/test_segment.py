"""Segments: one owner per name, nothing left behind, nothing taken from under a client."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from kvstore.errors import (
    ConfigError,
    NodeNameTakenError,
    SharedMemoryTooSmallError,
    StartupError,
)
from kvstore.limits import Key, Namespace
from kvstore.memory import allocation, shm_entries
from kvstore.memory.allocation import MemoryOptions
from kvstore.memory.header import (
    HEADER_BYTES,
    SUPERBLOCK_BYTES,
    Header,
    SegmentOwner,
    pack_into,
)
from kvstore.memory.mapping import Mapping
from kvstore.memory.segment import OwnedSegment
from kvstore.memory.shm_entries import free_node_name
from kvstore.runtime.host import SHM_DIRECTORY

MIB = 1 << 20

OWNER = """
import sys
from kvstore.memory.segment import OwnedSegment
segment = OwnedSegment.create(sys.argv[1], 1 << 20)
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
def segment(name: str) -> Iterator[OwnedSegment]:
    segment = OwnedSegment.create(name, MIB)
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
    left = OwnedSegment.attach(name, MIB)
    assert left is not None
    place = left.memory[SUPERBLOCK_BYTES : SUPERBLOCK_BYTES + HEADER_BYTES]
    pack_into(place, header, left.seed, SUPERBLOCK_BYTES)
    assert len(list(left.scan())) == 1
    generation = left.generation
    left.close(unlink=False)
    again = OwnedSegment.attach(name, MIB, discard=True)
    assert again is not None
    assert entry(name).stat().st_ino == inode
    assert again.uuid != before
    assert again.generation > generation, "writers of before stop"
    assert list(again.scan()) == []
    again.close()


@pytest.mark.parametrize("bad", ["", ".", "../x", "a/b", "ä", "a" * 129, "a b", "a\0"])
def test_a_bad_name_is_refused(bad: str) -> None:
    with pytest.raises(ConfigError):
        OwnedSegment.create(bad, MIB)


def test_a_name_in_use_is_refused_and_its_owner_not_disturbed(
    segment: OwnedSegment, name: str
) -> None:
    with pytest.raises(NodeNameTakenError):
        OwnedSegment.create(name, MIB)
    assert entry(name).stat().st_mode & 0o777 == 0o600
    assert segment.generation == 1


def test_what_a_killed_owner_left_is_reclaimed(name: str) -> None:
    old = killed_owner(name)
    mapping = Mapping.attach(entry(name).name, old)
    segment = OwnedSegment.create(name, 2 * MIB)
    # Whoever still maps the old memory keeps it, whole: no SIGBUS.
    assert bytes(mapping.memory[5000:5005]) == b"hello"
    assert mapping.memory[-1] == 0
    assert bytes(segment.memory[5000:5005]) == bytes(5)
    mapping.close()
    segment.close()


def test_no_room_is_said_before_anything_is_taken(name: str) -> None:
    room = os.statvfs(SHM_DIRECTORY)
    size = room.f_blocks * room.f_frsize + MIB
    with pytest.raises(SharedMemoryTooSmallError) as caught:
        OwnedSegment.create(name, size)
    assert caught.value.fields["needed_bytes"] == size - size % MIB
    assert int(caught.value.fields["available_bytes"]) < size
    assert "--shm-size" in caught.value.advice
    assert not entry(name).exists()


@pytest.mark.parametrize("step", [0, 3])
def test_room_that_vanishes_meanwhile_leaves_nothing_behind(
    name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_memory: object, start: int, _length: int, _advice: int) -> bool:
        if start == step * allocation.RESERVE_BYTES:
            raise OSError(errno.EFAULT, "as MADV_POPULATE_WRITE says that there is no room")
        return True

    monkeypatch.setattr(allocation, "populate", full)
    with pytest.raises(SharedMemoryTooSmallError):
        OwnedSegment.create(name, 5 * allocation.RESERVE_BYTES, options=MemoryOptions(threads=3))
    assert not entry(name).exists()


def test_nothing_else_is_attached(segment: OwnedSegment) -> None:
    for name, uuid, why in (
        (segment.shm_name, bytes(16), "of another node"),
        ("kvstore.no-such-segment", segment.uuid, "is not here"),
        ("../shm/" + segment.shm_name, segment.uuid, "is no name of a segment"),
        ("", segment.uuid, "is no name of a segment"),
    ):
        with pytest.raises((OSError, ValueError), match=why):
            Mapping.attach(name, uuid)


def test_a_shortened_entry_is_not_attached(segment: OwnedSegment) -> None:
    """Mapping it would mean SIGBUS at the first touch behind its end."""
    path = Path(SHM_DIRECTORY, f"{segment.shm_name}-short")
    path.write_bytes(bytes(segment.memory[:SUPERBLOCK_BYTES]))
    with pytest.raises(ValueError, match="its superblock says"):
        Mapping.attach(path.name, segment.uuid)
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="of another node"):
        Mapping.attach(path.name, segment.uuid)


def test_what_a_writer_did_to_the_file_is_undone_at_the_next_start(name: str) -> None:
    """It can make the file longer, and free pages in it."""
    segment = OwnedSegment.create(name, MIB)
    segment.memory[-5:] = b"there"
    lent = segment.share()
    os.posix_fallocate(lent.to_write, MIB, MIB)
    with mmap.mmap(lent.to_write, MIB) as mapped:
        mapped.madvise(mmap.MADV_REMOVE, MIB // 2, MIB // 4)
    lent.close()
    mapping = Mapping.attach(segment.shm_name, segment.uuid)  # as good for clients as it was
    assert len(mapping.memory) == MIB
    mapping.close()
    del mapping
    segment.close(unlink=False)

    again = OwnedSegment.attach(name, MIB)
    assert again is not None
    file = entry(name).stat()
    assert (file.st_size, file.st_blocks * 512) == (MIB, MIB)
    assert bytes(again.memory[-5:]) == b"there"
    again.close()


def test_a_free_name_is_found_by_the_entries_that_exist(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A master's own node is called after its port: counting up to that takes seconds."""
    asked: list[str] = []
    is_taken = shm_entries._is_taken

    def asks(path: str) -> bool:
        asked.append(path)
        return is_taken(path)

    monkeypatch.setattr(shm_entries, "_is_taken", asks)
    far = f"{name}-41293"
    segment = OwnedSegment.create(far, MIB)
    assert free_node_name(name, SegmentOwner("cluster")) == name
    segment.close()
    assert len(asked) <= 2 * len(list(shm_entries.directories()))


def test_an_entry_that_is_a_link_is_not_followed(name: str) -> None:
    entry(name).symlink_to("/etc/hostname")
    with pytest.raises(StartupError):
        OwnedSegment.create(name, MIB)
    assert entry(name).is_symlink()
    with pytest.raises(OSError, match="symbolic links"):
        Mapping.attach(entry(name).name, bytes(16))


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
            OwnedSegment.create(f"{name}-target", MIB).close(unlink=False)
    os.lchown(path, OTHER_USER, GROUP)
    before = path.lstat()
    for start in (OwnedSegment.create, OwnedSegment.attach):
        for size in (MIB, 2 * MIB):
            with pytest.raises(NodeNameTakenError, match=f"{path} belongs to the user 65533"):
                start(name, size)
    assert path.lstat() == before
    assert free_node_name(name, SegmentOwner("cluster")) == f"{name}-2"
    OwnedSegment.create(f"{name}-2", MIB).close()


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
        with nullcontext() if is_mapped else pytest.raises(PermissionError):
            Mapping.attach(entry(name).name, uuid).close()


# --- who may map it ----------------------------------------------------------------------------


def can_map(segment: OwnedSegment, *, groups: list[int]) -> bool:
    """Whether another user, who is in these groups, can map it, and is told why not."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.setgroups(groups)
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            try:
                Mapping.attach(segment.shm_name, segment.uuid)
                code = 0
            except PermissionError as error:
                code = 1 if "--shm-group" in str(error) else 2
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1)
    return code == 0


@AS_ROOT
def test_members_of_its_group_may_map_it_and_no_other_user(name: str) -> None:
    options = MemoryOptions(group=str(GROUP))
    shared = OwnedSegment.create(name, MIB, options=options)
    assert entry(name).stat().st_mode & 0o777 == 0o660
    assert can_map(shared, groups=[GROUP])
    assert not can_map(shared, groups=[])
    shared.close(unlink=False)
    # As it was started last: the next start may take the right away, and give it again.
    alone = OwnedSegment.attach(name, MIB)
    assert alone is not None
    assert not can_map(alone, groups=[GROUP])
    alone.close(unlink=False)
    again = OwnedSegment.attach(name, MIB, options=options)
    assert again is not None
    assert can_map(again, groups=[GROUP])
    again.close()
