"""Allocation of a segment's memory: huge pages, NUMA nodes, locks, threads that clear pages."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import resource
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Final, Literal

from kvstore.errors import MemoryLimitError, SharedMemoryTooSmallError, StartupError
from kvstore.memory import cgroup, pages
from kvstore.memory.pages import POPULATE_WRITE, populate
from kvstore.memory.shm_entries import directories
from kvstore.runtime.host import SHM_DIRECTORY

SIZE_STEP: Final = 1 << 20
"""Sizes are rounded down to multiples of this, which are whole pages and whole extents."""

RESERVE_BYTES: Final = 64 << 20
"""Bytes reserved and pre-faulted per step: some 80 ms."""

RESERVE_THREADS_MAX: Final = 16
"""Memory bandwidth limits clearing, and a few threads saturate it."""


@dataclass(frozen=True, kw_only=True)
class MemoryOptions:
    """Options of allocation; ``kvstore.config.NodeConfig`` explains each."""

    huge_pages: Literal["auto", "off", "transparent", "reserved"] = "auto"
    """auto: transparent ones if ``/dev/shm`` provides them; transparent: those, or an error;
    reserved: those of a hugetlbfs, or an error."""
    numa_node: int = -1
    """Allocate all memory from this NUMA node; -1: the kernel chooses."""
    threads: int = 0
    """Threads that clear pages; 0: one per processor, at most ``RESERVE_THREADS_MAX``."""
    group: str = ""
    """Name or number of a group whose members may map the segment; empty: none."""


def directory_for(options: MemoryOptions) -> str:
    if options.huge_pages != "reserved":
        return SHM_DIRECTORY
    mounted = [directory for directory in directories() if directory != SHM_DIRECTORY]
    for directory in mounted:
        if os.access(directory, os.R_OK | os.W_OK | os.X_OK):
            return directory
    what = f"{', '.join(mounted)} is not writable" if mounted else "no hugetlbfs is mounted"
    raise StartupError(
        f"reserved huge pages are required, but {what}",
        advice="As root: mkdir -p /dev/hugepages && mount -t hugetlbfs -o mode=1777 none "
        "/dev/hugepages; in Kubernetes, an emptyDir of medium HugePages.",
        key="huge_pages",
    )


def size_granularity(directory: str) -> int:
    """Sizes of segments in ``directory`` are multiples of this."""
    return SIZE_STEP if directory == SHM_DIRECTORY else os.statvfs(directory).f_bsize


def address_limit() -> int | None:
    """The limit of this process's address space in bytes (``ulimit -v``); None: none."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def mmap_error_text(what: str, size: int, error: OSError) -> str:
    """The text of an error of ``mmap``."""
    limit = address_limit()
    by = f"; ulimit -v allows this process {limit >> 20} MiB of addresses" if limit else ""
    why = (error.strerror or str(error)).lower()
    return f"{what} of {size >> 20} MiB cannot be mapped: {why}{by}"


def map_file(fd: int, directory: str, size: int) -> mmap.mmap:
    try:
        mapped = mmap.mmap(fd, size)
    except OSError as error:
        if error.errno == errno.ENOMEM and address_limit() is not None:
            raise MemoryLimitError(
                mmap_error_text(f"a segment in {directory}", size, error),
                advice="Raise that limit (ulimit -v unlimited; LimitAS= of systemd), or give less "
                "--memory.",
            ) from None
        if error.errno != errno.ENOMEM or directory == SHM_DIRECTORY:
            raise
        page = os.statvfs(directory).f_bsize
        raise SharedMemoryTooSmallError(
            f"the system has not enough huge pages left for a segment of {size >> 20} MiB",
            advice=f"It needs {size // page} of {page >> 10} KiB. As root: sysctl -w "
            f"vm.nr_hugepages=N (best at boot, before memory is fragmented), or use "
            "--huge-pages auto.",
            needed_bytes=size,
        ) from error
    mapped.madvise(mmap.MADV_DONTDUMP)
    return mapped


def check_room(directory: str, size: int) -> None:
    """Raises SharedMemoryTooSmallError or MemoryLimitError: ``directory`` lacks ``size`` bytes."""
    room = os.statvfs(directory)
    available = room.f_bavail * room.f_frsize
    if room.f_blocks and available < size:  # no blocks: the file system has no limit
        raise _too_small(directory, size, available)
    if directory == SHM_DIRECTORY:  # cgroups count reserved huge pages elsewhere
        cgroup.check(size)


def _too_small(directory: str, size: int, available: int) -> SharedMemoryTooSmallError:
    return SharedMemoryTooSmallError(
        f"{directory} has {available >> 20} MiB left, the segment needs {size >> 20} MiB",
        advice=(
            "Ask for less memory; or end the programs that still use the memory of an earlier node "
            f"of this name; or enlarge it: mount -o remount,size=... {directory}, "
            "docker run --shm-size=..., an emptyDir of medium Memory in Kubernetes."
        ),
        needed_bytes=size,
        available_bytes=available,
    )


def prefault_pages(
    fd: int, mapped: mmap.mmap, directory: str, options: MemoryOptions,
    progress: Callable[[int, int], None] | None, *, is_left: bool = False,
) -> bool:  # fmt: skip
    """Allocates and maps every page, so that no later access fails (SIGBUS) or is slow. Returns
    whether all pages are locked. ``is_left``: the file's content stays."""
    size = len(mapped)
    if options.numa_node >= 0:
        _bind(mapped, options.numa_node)
    locked = options.huge_pages == "reserved" or _lock(mapped)
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
    ) as taken:  # closing ends the threads, whatever ``progress`` raises
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
    """Yields the results of ``work`` in order of completion, and raises its errors. Processes the
    first argument in this thread, because most failures occur there, the others in ``threads``
    threads, which end before this generator."""
    first, *others = arguments
    yield work(first)
    with ThreadPoolExecutor(threads, "kvstore-reserve") as pool:
        try:
            for done in as_completed([pool.submit(work, other) for other in others]):
                yield done.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _no_transparent() -> StartupError:
    return StartupError(
        f"{SHM_DIRECTORY} provides no huge pages",
        advice="As root: mount -o remount,huge=advise /dev/shm; or reserve some and use "
        "--huge-pages reserved. See kvstore doctor.",
        key="huge_pages",
    )


def _bind(mapped: mmap.mmap, numa_node: int) -> None:
    try:
        pages.bind(mapped, numa_node)
    except OSError as error:
        raise StartupError(
            f"memory cannot be bound to NUMA node {numa_node}: {error.strerror}",
            advice="Check that the cpuset and container of this process allow that NUMA node.",
            key="numa_node",
        ) from error


def _lock(mapped: mmap.mmap) -> bool:
    """Locks the memory, if the limit of locked memory allows it."""
    try:
        pages.lock_on_fault(mapped)
    except OSError:
        return False
    return True
