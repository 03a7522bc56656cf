"""Segments in POSIX shared memory: owned by a node (``Segment``), mapped by clients (``Mapping``).

The owner holds an exclusive ``flock`` on the entry in ``/dev/shm`` for as long as it lives. So a
name has one owner at a time, and an entry without a lock was left by an owner that was killed.
A segment of reserved huge pages is an entry of the same name in a hugetlbfs; where it is, is found
by looking.

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
import resource
import secrets
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Final, Literal

from kvstore.calls import Version
from kvstore.errors import (
    ConfigError,
    LeftOverMemoryError,
    NodeNameTakenError,
    SharedMemoryTooSmallError,
    StartupError,
)
from kvstore.memory import header as layout
from kvstore.memory import numa, pages
from kvstore.memory.pages import POPULATE_READ, POPULATE_WRITE, populate

SHM_DIRECTORY: Final = "/dev/shm"  # noqa: S108 - shared memory is what it is for
SHM_PREFIX: Final = "kvstore."

SIZE_STEP: Final = 1 << 20
"""Sizes are rounded down to it: what was asked for is a limit, and whole MiB are whole pages and
whole extents whatever the page size is."""

RESERVE_BYTES: Final = 64 << 20
"""Reserved and pre-faulted per step: some 80 ms, a good beat for a progress bar."""

RESERVE_THREADS_MAX: Final = 16
"""Clearing pages is bound by memory, not by processors; a few threads use all of it."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """How a segment's memory is taken; ``kvstore.config.NodeConfig`` says more of each."""

    huge_pages: Literal["auto", "off", "transparent", "reserved"] = "auto"
    """auto: transparent ones where ``/dev/shm`` gives them; transparent: those, or no segment;
    reserved: those of a hugetlbfs, or no segment."""
    numa_node: int = -1
    """Take all of it from this NUMA node; -1: as the kernel likes."""
    lock: Literal["auto", "off", "on"] = "off"
    """Keep it from being swapped out; auto: where the limit of locked memory allows it."""
    threads: int = 0
    """That clear pages; 0: as many as processors, at most ``RESERVE_THREADS_MAX``."""


class Segment:
    """A pool of memory, owned by this process.

    Life cycle: ``create``, then serve, then ``close``. After a crash the entry in ``/dev/shm``
    stays: ``attach`` makes it a segment again, ``create`` throws it away.

    Threads: all methods may be called from any thread; ``close`` once nobody uses the memory.
    """

    def __init__(
        self, *, path: str, fd: int, mapped: mmap.mmap, superblock: layout.Superblock, locked: bool
    ) -> None:
        """Internal: use ``create`` or ``attach``. Takes over ``fd`` and ``mapped``."""
        self.path: Final = path
        self.shm_name: Final = os.path.basename(path)
        """Entry in ``/dev/shm``, or in a hugetlbfs."""
        self.locked: Final = locked
        """Whether it cannot be swapped out."""
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
        options: MemoryOptions | None = None,
    ) -> Segment:
        """A new segment ``/dev/shm/kvstore.<name>``, reserved and pre-faulted.

        Args:
            name: letters, digits, ``.``, ``_`` and ``-``, at most 128.
            size: bytes; rounded down to ``SIZE_STEP``, which is the least, and to whole pages where
                huge ones are reserved.
            node: who owns it, written in the superblock; ``name`` if not given.
            progress: called in this thread with bytes done and bytes in all after each
                ``RESERVE_BYTES``. What it raises ends the creation.
            options: how the memory is taken.

        Raises:
            ConfigError: a bad name, a size below ``SIZE_STEP``, no such NUMA node.
            NodeNameTakenError: a live process, or another user, owns a segment of this name.
            SharedMemoryTooSmallError: there is no room; nothing is left behind.
            StartupError: ``/dev/shm`` is not there or cannot be written, or does not give what
                ``options`` insist on.
        """
        options = options or MemoryOptions()
        node = name if node is None else node
        _check_name(name)
        _check_name(node)
        if size < SIZE_STEP:
            raise ConfigError(
                f"a segment has at least 1 MiB, {size} bytes were asked for",
                advice='Give the size with its unit, like "4GiB".',
                size=size,
            )
        if options.numa_node >= 0:
            numa.check_node(options.numa_node)
        shm_name = SHM_PREFIX + name
        directory = _directory_for(options)
        _reclaim_elsewhere(shm_name, directory)
        size -= size % _step_of(directory)
        path = f"{directory}/{shm_name}"
        fd = _open_locked(path)
        try:
            _check_room(directory, size)
            os.ftruncate(fd, size)
            mapped = _map(fd, directory, size)
            try:
                locked = _take(fd, mapped, directory, options, progress)
                superblock = layout.Superblock(
                    secrets.token_bytes(16), node, size, secrets.randbits(64), generation=1
                )
                packed = layout.pack_superblock(superblock)
                mapped[: len(packed)] = packed
                return cls(path=path, fd=fd, mapped=mapped, superblock=superblock, locked=locked)
            except BaseException:
                with contextlib.suppress(BufferError):
                    mapped.close()
                raise
        except BaseException:
            _unlink(path)
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
        options: MemoryOptions | None = None,
    ) -> Segment | None:
        """The segment ``/dev/shm/kvstore.<name>`` that a process of before has left, with what it
        holds; None: there is none. Arguments as ``create``.

        Its generation grows, so nobody of before writes there any more.

        Raises:
            LeftOverMemoryError: it is of another size, node or format, its superblock is damaged,
                or it is of another kind of pages; it is left as it is.
            NodeNameTakenError: a live process, or another user, owns it.
            ConfigError, StartupError: as ``create``.
        """
        options = options or MemoryOptions()
        node = name if node is None else node
        _check_name(name)
        if options.numa_node >= 0:
            numa.check_node(options.numa_node)
        wanted = _directory_for(options)
        for directory in sorted(directories(), key=lambda each: each != wanted):
            path = f"{directory}/{SHM_PREFIX}{name}"
            fd = _open_left(path)
            if fd < 0:
                continue
            try:
                superblock = _left_superblock(fd, path, node, size - size % _step_of(wanted))
                if superblock is None:
                    os.close(fd)
                    continue
                if directory != wanted:
                    raise _of_no_use(path, f"memory of {wanted} was asked for")
                mapped = mmap.mmap(fd, superblock.size)
                locked = _take(fd, mapped, directory, options, progress, is_left=True)
                if options.huge_pages == "transparent" and not pages.huge_bytes(mapped):
                    raise _of_no_use(path, "it has small pages")
                segment = cls(path=path, fd=fd, mapped=mapped, superblock=superblock, locked=locked)
            except BaseException:
                os.close(fd)
                raise
            segment.attached = True
            segment.bump_generation()
            return segment
        return None

    @property
    def fd(self) -> int:
        """Of the shared memory, for ``sendfile``; the segment keeps it; -1 once closed, and where
        reserved huge pages are, which ``sendfile`` refuses."""
        return self._fd if self.path.startswith(f"{SHM_DIRECTORY}/") else -1

    def huge_bytes(self) -> int:
        """How much of it huge pages hold; 0 once closed. Slow: ``pages.huge_bytes``."""
        return 0 if self._mapped is None else pages.huge_bytes(self._mapped)

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
                _unlink(self.path)
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
        """Map the entry ``shm_name`` if it is there and is the segment of this ``uuid``.

        None when it is not: gone, replaced, of another user, or of another container's
        ``/dev/shm``. Such a segment is reached over the network instead.

        Page tables are filled in the background (150 ms per GiB of small pages, 1 ms of huge ones),
        because a get that has to fault its pages in runs at a third of its speed and a put at a
        tenth.
        """
        if not shm_name.startswith(SHM_PREFIX) or "/" in shm_name:
            return None
        for directory in directories():
            mapping = cls._attach(f"{directory}/{shm_name}", uuid)
            if mapping is not None:
                return mapping
        return None

    @classmethod
    def _attach(cls, path: str, uuid: bytes) -> Mapping | None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
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


def directories() -> Iterator[str]:
    """Where segments are: ``/dev/shm``, then each hugetlbfs of this host."""
    yield SHM_DIRECTORY
    with contextlib.suppress(OSError), open("/proc/self/mounts", encoding="utf-8") as mounts:
        for line in mounts:
            _, where, kind, *_ = line.split(" ")
            if kind == "hugetlbfs":
                yield where.encode().decode("unicode_escape")


def free_node_name(base: str) -> str:
    """``base``, or the first of ``base-2``, ``base-3`` ... whose segment no live process owns.

    A suggestion: two processes that ask at once get the same, and ``Segment.create`` decides.
    """
    number = 1
    while True:
        name = base if number == 1 else f"{base}-{number}"
        if not any(_is_taken(f"{each}/{SHM_PREFIX}{name}") for each in directories()):
            return name
        number += 1


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot name a node or segment",
            advice="Use 1 to 128 letters, digits, '.', '_' and '-', a letter or digit first.",
            name=name,
        )


def _directory_for(options: MemoryOptions) -> str:
    if options.huge_pages != "reserved":
        return SHM_DIRECTORY
    mounted = [directory for directory in directories() if directory != SHM_DIRECTORY]
    for directory in mounted:
        if os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            return directory
    what = f"{', '.join(mounted)} cannot be written" if mounted else "no hugetlbfs is mounted"
    raise StartupError(
        f"huge pages are to be reserved ones, and {what}",
        advice="As root: mkdir -p /dev/hugepages && mount -t hugetlbfs -o mode=1777 none "
        "/dev/hugepages; in Kubernetes, an emptyDir of medium HugePages.",
        key="huge_pages",
    )


def _step_of(directory: str) -> int:
    """What sizes of segments there are multiples of."""
    return SIZE_STEP if directory == SHM_DIRECTORY else os.statvfs(directory).f_bsize


def _reclaim_elsewhere(shm_name: str, directory: str) -> None:
    """Remove what a killed owner of this name left where we do not look for room now."""
    for other in directories():
        path = f"{other}/{shm_name}"
        if other == directory or not os.path.lexists(path):
            continue
        if _is_taken(path):
            raise _name_taken(path, "a running process")
        with contextlib.suppress(OSError):
            os.unlink(path)


def _open_locked(path: str) -> int:
    """A descriptor of a new, empty, locked entry. A left-over one is unlinked first."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except PermissionError as error:
            raise _name_taken(path, "another user") from error
        except OSError as error:
            raise StartupError(
                f"{path} cannot be created: {error.strerror}",
                advice=f"A node needs a writable {os.path.dirname(path)}.",
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
            raise _name_taken(path, "a running process") from error
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _open_left(path: str) -> int:
    """A locked descriptor of what a process of before has left; -1: nothing."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return -1
    except OSError as error:
        raise _name_taken(path, "another user") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_same_file(fd, path) and os.fstat(fd).st_size:
            return fd
    except BlockingIOError as error:
        os.close(fd)
        raise _name_taken(path, "a running process") from error
    os.close(fd)
    return -1


def _left_superblock(fd: int, path: str, node: str, size: int) -> layout.Superblock | None:
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
    raise _of_no_use(path, why)


def _of_no_use(path: str, why: str) -> LeftOverMemoryError:
    return LeftOverMemoryError(
        f"{path} was left by another process and cannot be used: {why}",
        advice="Start with what it was started with, or throw away what it holds: --discard.",
        path=path,
    )


def _name_taken(path: str, owner: str) -> NodeNameTakenError:
    return NodeNameTakenError(
        f"{path} belongs to {owner}",
        advice="Choose another node name, or stop the node that has it.",
        path=path,
    )


def _is_same_file(fd: int, path: str) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), named)


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether a living process owns this entry. Raises OSError: it is gone, or not ours to see."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(fd)


def _is_taken(path: str) -> bool:
    """Whether a segment of that name cannot be made."""
    try:
        return is_locked(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def _map(fd: int, directory: str, size: int) -> mmap.mmap:
    try:
        return mmap.mmap(fd, size)
    except OSError as error:
        if error.errno != errno.ENOMEM or directory == SHM_DIRECTORY:
            raise
        page = os.statvfs(directory).f_bsize
        raise SharedMemoryTooSmallError(
            f"the system has not enough huge pages left for a segment of {size >> 20} MiB",
            advice=f"It needs {size // page} of {page >> 10} KiB. As root: sysctl -w "
            f"vm.nr_hugepages=N (at start of the system, before memory is in pieces), or take "
            "--huge-pages auto.",
            needed_bytes=size,
        ) from error


def _check_room(directory: str, size: int) -> None:
    room = os.statvfs(directory)
    available = room.f_bavail * room.f_frsize
    if room.f_blocks and available < size:  # no blocks: without a limit
        raise _too_small(directory, size, available)


def _too_small(directory: str, size: int, available: int) -> SharedMemoryTooSmallError:
    return SharedMemoryTooSmallError(
        f"{directory} has {available >> 20} MiB left, the segment needs {size >> 20} MiB",
        advice=(
            f"Ask for less memory, or enlarge it: mount -o remount,size=... {directory}, "
            "docker run --shm-size=..., an emptyDir of medium Memory in Kubernetes."
        ),
        needed_bytes=size,
        available_bytes=available,
    )


def _take(
    fd: int,
    mapped: mmap.mmap,
    directory: str,
    options: MemoryOptions,
    progress: Callable[[int, int], None] | None,
    *,
    is_left: bool = False,
) -> bool:
    """Allocate and map every page now, as wished, so that no later touch can fail (SIGBUS) or be
    slow; whether all of it is locked. ``is_left``: what it holds stays."""
    size = len(mapped)
    if options.numa_node >= 0:
        _bind(mapped, options.numa_node)
    locked = options.huge_pages == "reserved" or _lock(mapped, options.lock)
    if options.huge_pages in ("auto", "transparent"):
        pages.prefer_huge(mapped)

    def take(start: int) -> int:
        length = min(RESERVE_BYTES, size - start)
        try:
            if not populate(mapped, start, length, POPULATE_WRITE) and not is_left:
                os.posix_fallocate(fd, start, length)
                mapped[start : start + length] = bytes(length)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFAULT):
                raise
            room = os.statvfs(directory)
            raise _too_small(directory, size, room.f_bavail * room.f_frsize) from error
        return length

    done = 0
    insists = options.huge_pages == "transparent" and not is_left
    threads = options.threads or min(len(os.sched_getaffinity(0)), RESERVE_THREADS_MAX)
    with contextlib.closing(
        _in_threads(take, range(0, size, RESERVE_BYTES), threads)
    ) as taken:  # closed, because it ends its threads then, whatever ``progress`` raises
        for length in taken:
            if not done and insists and not pages.huge_bytes(mapped):
                raise _no_transparent()
            done += length
            if progress is not None:
                progress(done, size)
    return locked


def _in_threads(
    work: Callable[[int], int], arguments: Sequence[int], threads: int
) -> Generator[int, None, None]:
    """The results of ``work``, as they come: of the first argument in this thread and alone,
    because what fails mostly fails there; of the others in ``threads`` threads, which have ended
    when this generator has, however it ends. Raises what ``work`` raises."""
    todo = iter(arguments)
    for first in todo:
        yield work(first)
        break
    results: SimpleQueue[int | Exception | None] = SimpleQueue()
    taking = threading.Lock()
    stopping = threading.Event()

    def run() -> None:
        try:
            while not stopping.is_set():
                with taking:
                    argument = next(todo, None)
                if argument is None:
                    break
                results.put(work(argument))
        except Exception as error:  # noqa: BLE001 - raised where the results are taken
            results.put(error)
        results.put(None)

    workers = [
        threading.Thread(target=run, name="kvstore-reserve", daemon=True)
        for _ in range(min(threads, len(arguments) - 1))
    ]
    try:
        for worker in workers:
            worker.start()
        running = len(workers)
        while running:
            result = results.get()
            if isinstance(result, Exception):
                raise result
            elif result is None:
                running -= 1
            else:
                yield result
    finally:
        stopping.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join()


def _no_transparent() -> StartupError:
    return StartupError(
        f"{SHM_DIRECTORY} gives no huge pages",
        advice="As root: mount -o remount,huge=advise /dev/shm; or reserve some and take "
        "--huge-pages reserved. kvstore doctor says more.",
        key="huge_pages",
    )


def _bind(mapped: mmap.mmap, numa_node: int) -> None:
    try:
        pages.bind(mapped, numa_node)
    except OSError as error:
        raise StartupError(
            f"memory cannot be bound to NUMA node {numa_node}: {error.strerror}",
            advice="Is this process (its cpuset, its container) allowed to use that node?",
            key="numa_node",
        ) from error


def _lock(mapped: mmap.mmap, wish: Literal["auto", "off", "on"]) -> bool:
    if wish == "off":
        return False
    try:
        pages.lock_on_fault(mapped)
    except OSError as error:
        if wish == "auto":
            return False
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        raise StartupError(
            f"{len(mapped) >> 20} MiB cannot be locked: {error.strerror}; the limit of locked "
            f"memory is {limit >> 10} KiB",
            advice="Raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in a systemd unit, "
            "docker run --ulimit memlock=-1; or leave out --lock-memory on.",
            key="lock_memory",
        ) from error
    return True


def _release(memory: memoryview, mapped: mmap.mmap | None) -> None:
    """Unmap now, or leave it to the last memoryview: then the caller drops its reference, too."""
    with contextlib.suppress(BufferError):
        memory.release()
        if mapped is not None:
            mapped.close()


def _unlink(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
