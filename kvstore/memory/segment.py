"""Segments in POSIX shared memory: owned by a node (``Segment``), mapped by clients (``Mapping``).

The owner holds an exclusive ``flock`` on the entry in ``/dev/shm`` for as long as it lives. So a
name has one owner at a time, and an entry without a lock was left by an owner that was killed.

A left-over entry is never truncated, always unlinked: some client may still map the old memory, and
would die of SIGBUS if it were taken away under its hands.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.calls import Version
from kvstore.errors import (
    ConfigError,
    LeftOverMemoryError,
    NodeNameTakenError,
    SharedMemoryTooSmallError,
    StartupError,
)
from kvstore.memory import header as layout
from kvstore.memory.pages import POPULATE_READ, POPULATE_WRITE, populate

SHM_DIRECTORY: Final = "/dev/shm"  # noqa: S108 - shared memory is what it is for
SHM_PREFIX: Final = "kvstore."

SIZE_STEP: Final = 1 << 20
"""Sizes are rounded down to it: what was asked for is a limit, and whole MiB are whole pages and
whole extents whatever the page size is."""

RESERVE_BYTES: Final = 64 << 20
"""Reserved and pre-faulted per step: some 80 ms, a good beat for a progress bar."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class Segment:
    """A pool of memory, owned by this process.

    Life cycle: ``create``, then serve, then ``close``. After a crash the entry in ``/dev/shm``
    stays: ``attach`` makes it a segment again, ``create`` throws it away.

    Threads: all methods may be called from any thread; ``close`` once nobody uses the memory.
    """

    def __init__(
        self, *, shm_name: str, fd: int, mapped: mmap.mmap, superblock: layout.Superblock
    ) -> None:
        """Internal: use ``create`` or ``attach``. Takes over ``fd`` and ``mapped``."""
        self.shm_name: Final = shm_name
        """Entry in ``/dev/shm``."""
        self.node: Final = superblock.node
        self.size: Final = superblock.size
        """Bytes, superblock included; a multiple of ``SIZE_STEP``."""
        self.uuid: Final = superblock.uuid
        self.seed: Final = superblock.seed
        self.token: Final = secrets.token_bytes(16)
        """What a data server asks for; kept out of the shared memory."""
        self.memory: Final = memoryview(mapped)
        """All of the segment, writable. Valid until ``close``; slices keep the mapping alive."""
        self.attached = False
        """Whether a process of before has filled it."""
        self._mapped: mmap.mmap | None = mapped
        self._fd = fd
        self._words = self.memory[: layout.SUPERBLOCK_BYTES].cast("Q")
        self._closing = threading.Lock()

    @classmethod
    def create(
        cls,
        name: str,
        size: int,
        *,
        node: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Segment:
        """A new segment ``/dev/shm/kvstore.<name>``, reserved and pre-faulted.

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``, at most 128.
            size: bytes; rounded down to ``SIZE_STEP``, which is the least.
            node: who owns it, written in the superblock; ``name`` if not given.
            progress: called with bytes done and bytes in all after each ``RESERVE_BYTES``. What it
                raises ends the creation.

        Raises:
            ConfigError: a bad name or a size below ``SIZE_STEP``.
            NodeNameTakenError: a live process, or another user, owns a segment of this name.
            SharedMemoryTooSmallError: ``/dev/shm`` has no room; nothing is left behind.
            StartupError: ``/dev/shm`` is not there or cannot be written.
        """
        node = name if node is None else node
        _check_name(name)
        _check_name(node)
        if size < SIZE_STEP:
            raise ConfigError(
                f"a segment has at least 1 MiB, {size} bytes were asked for",
                advice='Give the size with its unit, like "4GiB".',
                size=size,
            )
        size -= size % SIZE_STEP
        shm_name = SHM_PREFIX + name
        fd = _open_locked(shm_name)
        try:
            _check_room(size)
            os.ftruncate(fd, size)
            mapped = mmap.mmap(fd, size)
            try:
                _reserve(fd, mapped, size, progress)
                superblock = layout.Superblock(
                    secrets.token_bytes(16), node, size, secrets.randbits(64), generation=1
                )
                packed = layout.pack_superblock(superblock)
                mapped[: len(packed)] = packed
                return cls(shm_name=shm_name, fd=fd, mapped=mapped, superblock=superblock)
            except BaseException:
                with contextlib.suppress(BufferError):
                    mapped.close()
                raise
        except BaseException:
            _unlink(shm_name)
            os.close(fd)
            raise

    @classmethod
    def attach(
        cls,
        name: str,
        size: int,
        *,
        node: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Segment | None:
        """The segment ``/dev/shm/kvstore.<name>`` that a process of before has left, with what it
        holds; None: there is none. Arguments as ``create``.

        Its generation grows, so nobody of before writes there any more.

        Raises:
            LeftOverMemoryError: it is of another size, node or format, or its superblock is
                damaged; it is left as it is.
            NodeNameTakenError: a live process, or another user, owns it.
        """
        node = name if node is None else node
        _check_name(name)
        shm_name = SHM_PREFIX + name
        fd = _open_left(shm_name)
        if fd < 0:
            return None
        try:
            superblock = _left_superblock(fd, shm_name, node, size - size % SIZE_STEP)
            if superblock is None:
                os.close(fd)
                return None
            mapped = mmap.mmap(fd, superblock.size)
            for start in range(0, superblock.size, RESERVE_BYTES):
                length = min(RESERVE_BYTES, superblock.size - start)
                with contextlib.suppress(OSError):  # then they are faulted in as they are used
                    populate(mapped, start, length, POPULATE_READ)
                if progress is not None:
                    progress(start + length, superblock.size)
            segment = cls(shm_name=shm_name, fd=fd, mapped=mapped, superblock=superblock)
        except BaseException:
            os.close(fd)
            raise
        segment.attached = True
        segment.bump_generation()
        return segment

    @property
    def fd(self) -> int:
        """Of the shared memory, for ``sendfile``; the segment keeps it; -1 once closed."""
        return self._fd

    @property
    def generation(self) -> int:
        """Counts mounts from 1; 0 once closed. A read of one aligned word: never torn."""
        try:
            return self._words[layout.GENERATION_OFFSET // 8]
        except ValueError:  # the memory was released
            return 0

    def bump_generation(self) -> int:
        """A new generation, and returns it: connections and writers of older ones stop."""
        generation = self.generation + 1
        self._words[layout.GENERATION_OFFSET // 8] = generation
        return generation

    @property
    def mark(self) -> Version:
        """The last that was kept."""
        at = layout.MARK_OFFSET // 8
        return Version(self._words[at], self._words[at + 1])

    def keep_mark(self, mark: Version) -> None:
        """Unless a newer one is kept. If we are killed half-way, an older one is."""
        if mark > self.mark:
            at = layout.MARK_OFFSET // 8
            self._words[at + 1] = 0
            self._words[at], self._words[at + 1] = mark

    def wipe(self, offsets: Sequence[int], epochs: Sequence[int], counters: Sequence[int]) -> int:
        """Wipe the header at each offset where one of that version stands; returns how many.

        Idempotent: an order that comes late, after the extent was used again, finds another version
        and wipes nothing. While that version stands the order has not been carried out, so the
        master has not given the extent to anyone: nobody writes between the look and the wipe.
        Offsets outside the segment are ignored.
        """
        wiped = 0
        for offset, epoch, counter in zip(offsets, epochs, counters, strict=True):
            if not layout.SUPERBLOCK_BYTES <= offset <= self.size - layout.HEADER_BYTES:
                continue
            place = self.memory[offset : offset + layout.HEADER_BYTES]
            found = layout.unpack(place, self.seed, offset)
            if found is not None and found.epoch == epoch and found.counter == counter:
                place[: len(layout.WIPE)] = layout.WIPE
                wiped += 1
        return wiped

    def close(self, *, unlink: bool = True) -> None:
        """Give the segment up. Idempotent.

        Clients that map it see generation 0 and stop. Memoryviews that were handed out stay valid;
        the memory is returned to the system when the last of them, and the last client, is gone.

        Args:
            unlink: remove the entry in ``/dev/shm``. Without, another process may ``attach`` it,
                and nobody writes there before.
        """
        with self._closing:
            if self._fd < 0:
                return
            if unlink:
                self._words[layout.GENERATION_OFFSET // 8] = 0
                _unlink(self.shm_name)
            else:
                self.bump_generation()
            self._words.release()
            _release(self.memory, self._mapped)
            self._mapped = None
            # The mapping holds a duplicate of the descriptor, so the lock is given back by name.
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


class Mapping:
    """A client's attachment to a segment on its own host. Threads: any."""

    def __init__(self, mapped: mmap.mmap, superblock: layout.Superblock) -> None:
        """Internal: use ``attach``. Takes over ``mapped``."""
        self.uuid: Final = superblock.uuid
        self.size: Final = superblock.size
        self.memory: Final = memoryview(mapped)
        """All of the segment, writable; slices keep the mapping alive, also after ``close``."""
        self._mapped: mmap.mmap | None = mapped
        self._words = self.memory[: layout.SUPERBLOCK_BYTES].cast("Q")
        self._closed = threading.Event()
        self._populating = threading.Thread(
            target=self._populate, args=(mapped,), name="kvstore-populate", daemon=True
        )
        self._populating.start()

    @classmethod
    def attach(cls, shm_name: str, uuid: bytes) -> Mapping | None:
        """Map ``/dev/shm/<shm_name>`` if it is there and is the segment of this ``uuid``.

        None when it is not: gone, replaced, of another user, or of another container's
        ``/dev/shm``. Such a segment is reached over the network instead.

        Page tables are filled in the background (80 ms per GiB), because a get that has to fault
        its pages in runs at a third of its speed and a put at a tenth.
        """
        if not shm_name.startswith(SHM_PREFIX) or "/" in shm_name:
            return None
        try:
            fd = os.open(_path(shm_name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        try:
            superblock = layout.unpack_superblock(os.pread(fd, layout.SUPERBLOCK_BYTES, 0))
            if superblock is None or superblock.uuid != uuid:
                return None
            if superblock.size != os.fstat(fd).st_size:
                return None
            return cls(mmap.mmap(fd, superblock.size), superblock)
        except (OSError, ValueError):
            return None
        finally:
            os.close(fd)

    @property
    def generation(self) -> int:
        """Of the owner's mount; 0: the owner has closed it. One aligned word: never torn."""
        try:
            return self._words[layout.GENERATION_OFFSET // 8]
        except ValueError:  # the memory was released
            return 0

    def watch(self, generation: int) -> Callable[[], bool]:
        """Tells whether the owner's mount is that one still. Keeps the memory mapped."""
        try:
            start = layout.GENERATION_OFFSET
            word = self.memory[start : start + 8].cast("Q")
        except ValueError:  # the memory was released
            return lambda: False
        return lambda: word[0] == generation

    def close(self) -> None:
        """Unmap, or leave that to the last memoryview that was handed out. Idempotent."""
        self._closed.set()
        self._populating.join()
        self._words.release()
        _release(self.memory, self._mapped)
        self._mapped = None

    def _populate(self, mapped: mmap.mmap) -> None:
        with contextlib.suppress(OSError):  # then they are faulted in as they are used
            for start in range(0, self.size, RESERVE_BYTES):
                length = min(RESERVE_BYTES, self.size - start)
                if self._closed.is_set() or not populate(mapped, start, length, POPULATE_READ):
                    return


def free_node_name(base: str) -> str:
    """``base``, or the first of ``base-2``, ``base-3`` ... whose segment no live process owns.

    A suggestion: two processes that ask at once get the same, and ``Segment.create`` decides.
    """
    number = 1
    while True:
        name = base if number == 1 else f"{base}-{number}"
        if not _is_locked(SHM_PREFIX + name):
            return name
        number += 1


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a node or segment",
            advice="Use 1 to 128 letters, digits, '.', '_' and '-', a letter or digit first.",
            name=name,
        )


def _path(shm_name: str) -> str:
    return f"{SHM_DIRECTORY}/{shm_name}"


def _open_locked(shm_name: str) -> int:
    """A descriptor of a new, empty, locked entry. A left-over one is unlinked first."""
    path = _path(shm_name)
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except PermissionError as error:
            raise _name_taken(shm_name, "another user") from error
        except OSError as error:
            raise StartupError(
                f"{path} cannot be created: {error.strerror}",
                advice="A node needs a writable /dev/shm.",
                path=path,
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Between open and lock its owner may have removed the entry: then the lock is on an
            # inode without a name, and the next round makes a new one.
            is_current = _is_same_file(fd, path)
            if is_current and os.fstat(fd).st_size == 0:
                return fd
            if is_current:
                os.unlink(path)
        except BlockingIOError as error:
            os.close(fd)
            raise _name_taken(shm_name, "a running process") from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _open_left(shm_name: str) -> int:
    """A locked descriptor of what a process of before has left; -1: nothing."""
    path = _path(shm_name)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise _name_taken(shm_name, "another user") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same_file(fd, path) and os.fstat(fd).st_size:
            return fd
    except BlockingIOError as error:
        os.close(fd)
        raise _name_taken(shm_name, "a running process") from error
    os.close(fd)
    return -1


def _left_superblock(fd: int, shm_name: str, node: str, size: int) -> layout.Superblock | None:
    """Of memory that can be used as the segment of that node and size; None: it was killed before
    it wrote one."""
    raw = os.pread(fd, layout.SUPERBLOCK_BYTES, 0)
    superblock = layout.unpack_superblock(raw)
    if superblock is None:
        why = layout.why_no_superblock(raw)
        if not why:
            return None
    elif superblock.size != os.fstat(fd).st_size:
        why = f"it has {os.fstat(fd).st_size} bytes, and its superblock says {superblock.size}"
    elif superblock.size != size:
        why = f"it has {superblock.size >> 20} MiB, and {size >> 20} MiB were asked for"
    elif superblock.node != node:
        why = f"it belongs to the node {superblock.node}"
    else:
        return superblock
    raise LeftOverMemoryError(
        f"{_path(shm_name)} was left by another process and cannot be used: {why}",
        advice="Start with what it was started with, or throw away what it holds: --discard.",
        path=_path(shm_name),
    )


def _name_taken(shm_name: str, owner: str) -> NodeNameTakenError:
    return NodeNameTakenError(
        f"{_path(shm_name)} belongs to {owner}",
        advice="Choose another node name, or stop the node that has it.",
        path=_path(shm_name),
    )


def _is_same_file(fd: int, path: str) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)


def _is_locked(shm_name: str) -> bool:
    try:
        fd = os.open(_path(shm_name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _check_room(size: int) -> None:
    room = os.statvfs(SHM_DIRECTORY)
    available = room.f_bavail * room.f_frsize
    if room.f_blocks and available < size:  # no blocks: a tmpfs without a limit
        raise _too_small(size, available)


def _too_small(size: int, available: int) -> SharedMemoryTooSmallError:
    return SharedMemoryTooSmallError(
        f"{SHM_DIRECTORY} has {available >> 20} MiB left, the segment needs {size >> 20} MiB",
        advice=(
            "Ask for less memory, or enlarge it: mount -o remount,size=... /dev/shm, "
            "docker run --shm-size=..., an emptyDir of medium Memory in Kubernetes."
        ),
        needed_bytes=size,
        available_bytes=available,
    )


def _reserve(
    fd: int, mapped: mmap.mmap, size: int, progress: Callable[[int, int], None] | None
) -> None:
    """Allocate and map every page now, so that no later touch can fail (SIGBUS) or be slow."""
    for start in range(0, size, RESERVE_BYTES):
        length = min(RESERVE_BYTES, size - start)
        try:
            os.posix_fallocate(fd, start, length)
            if not populate(mapped, start, length, POPULATE_WRITE):
                mapped[start : start + length] = bytes(length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT):
                raise
            room = os.statvfs(SHM_DIRECTORY)
            raise _too_small(size, start + room.f_bavail * room.f_frsize) from error
        if progress is not None:
            progress(start + length, size)


def _release(memory: memoryview, mapped: mmap.mmap | None) -> None:
    """Unmap now, or leave it to the last memoryview: then the caller drops its reference, too."""
    with contextlib.suppress(BufferError):
        memory.release()
        if mapped is not None:
            mapped.close()


def _unlink(shm_name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_path(shm_name))
