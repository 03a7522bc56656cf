"""Checks of this host: shared memory, huge pages, NUMA, limits, RDMA, leftover memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.console.diagnostics.findings import Finding, of_row, ok, under
from kvstore.errors import MemoryLimitError
from kvstore.memory import cgroup, numa, pages
from kvstore.memory import shm_entries as memory_entries
from kvstore.memory.shm_entries import SHM_PREFIX, directories
from kvstore.runtime.formatting import size_text
from kvstore.runtime.host import SHM_DIRECTORY

GIB: Final = 1 << 30
HUGE_BYTES: Final = 2 << 20
OPEN_FILES_MIN: Final = 4_096
"""Enough for a master's 1,024 connections, a node's 256, and the files of their libraries."""

SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
RDMA_DEVICES: Final = Path("/sys/class/infiniband")
RDMA_FILES: Final = Path("/dev/infiniband")

_IPC_LOCK: Final = 1 << 14


def entries(node_memory: int) -> Iterator[Finding]:
    """Run all checks of ``/dev/shm`` and of hugetlbfs, one after another.

    Each creates a file for a moment, which a parallel check would count or take for leftover
    memory.
    """
    yield from under("shared memory", shared_memory(node_memory))
    yield from under("memory limit", memory_limit(node_memory))
    yield from under("huge pages", huge_pages())
    yield from under("left-overs", leftover_segments())


def shared_memory(node_memory: int) -> Iterator[Finding]:
    """Check that ``/dev/shm`` exists, is writable, and has ``node_memory`` bytes of space."""
    options = mount_options(SHM_DIRECTORY)
    if options is None and not os.path.isdir(SHM_DIRECTORY):
        yield of_row("no_shm", directory=SHM_DIRECTORY)
        return
    kind = "not a mount" if options is None else options[0]
    if kind != "tmpfs":
        yield of_row("shm_kind", directory=SHM_DIRECTORY, kind=kind)
    path = f"{SHM_DIRECTORY}/{SHM_PREFIX}doctor-{os.getpid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.close(fd)
        os.unlink(path)
    except OSError as error:
        yield of_row("shm_not_writable", directory=SHM_DIRECTORY, reason=error.strerror)
        return
    room = os.statvfs(SHM_DIRECTORY)
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    available = memory_available()
    has, wants = f"{size_text(free)} of {size_text(size)} free", size_text(node_memory)
    if room.f_blocks and free < node_memory:
        need = f"size={-(-(size - free + node_memory) // GIB)}g"
        yield of_row("shm_small", has=has, wants=wants, need=need, directory=SHM_DIRECTORY)
    elif available is not None and available < node_memory:
        yield of_row("memory_low", available=size_text(available), wants=wants)
    else:
        yield ok(f"{has if room.f_blocks else 'no limit'}, writable")


def memory_limit(node_memory: int) -> Iterator[Finding]:
    """Check that the cgroup limits of this process allow a node of ``node_memory`` bytes."""
    found = cgroup.limits()
    if not found:
        yield ok("no control group sets one")
        return
    what = f"{size_text(found[0].limit)} ({found[0].group}), {size_text(found[0].used)} taken"
    try:
        cgroup.check(node_memory)
    except MemoryLimitError as error:
        wants = size_text(node_memory)
        yield of_row("memory_limit", what=what, wants=wants, advice=error.advice)
    else:
        yield ok(what)


def huge_pages() -> Iterator[Finding]:
    """Check transparent huge pages by mapping one, and reserved ones by querying the kernel."""
    switch = read(SHMEM_ENABLED)
    if transparent_work():
        yield ok(f"{SHM_DIRECTORY} provides transparent ones, which nodes use")
    elif not switch:
        yield of_row("no_transparent_pages")
    elif "[deny]" in switch:
        yield of_row("transparent_pages_denied", switch=SHMEM_ENABLED)
    else:
        setting = (mount_options(SHM_DIRECTORY) or ("", ""))[1]
        why = "huge=never" if "huge=" not in setting else "memory is fragmented now"
        yield of_row("transparent_pages_off", directory=SHM_DIRECTORY, why=why)
    counts = []
    for size in sorted(Path("/sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        total = int(read(size / "nr_hugepages") or 0)
        free = int(read(size / "free_hugepages") or 0)
        if total:
            counts.append(f"{free} of {total} of {size.name.partition('-')[2]} free")
    reserved = f"reserved: {', '.join(counts)}"
    mounted = [directory for directory in directories() if directory != SHM_DIRECTORY]
    if not counts:
        yield ok("none reserved (--huge-pages reserved needs them)")
    elif not mounted:
        yield of_row("no_hugetlbfs", reserved=reserved)
    elif not any(os.access(each, os.W_OK) for each in mounted):
        yield of_row("hugetlbfs_not_writable", reserved=reserved, directory=mounted[0])
    else:
        yield ok(f"{reserved}, at {mounted[0]}")


def numa_nodes() -> Iterator[Finding]:
    nodes = numa.nodes_with_memory()
    if len(nodes) == 1:
        yield ok("one node")
        return
    advice = "Start one kvstore-node for each: " + "; ".join(f"--numa-node {n}" for n in nodes)
    yield ok(f"{len(nodes)} nodes with memory: {', '.join(map(str, nodes))}", advice)


def locked_memory(node_memory: int) -> Iterator[Finding]:
    """Check whether a segment can be locked, and whether that matters here."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    what = f"limited to {size_text(limit)}, less than a node's {size_text(node_memory)}"
    if may_lock_all():
        yield ok("no limit for this user (CAP_IPC_LOCK)")
    elif limit == resource.RLIM_INFINITY or limit >= node_memory:
        yield ok("no limit" if limit == resource.RLIM_INFINITY else f"up to {size_text(limit)}")
    elif rdma_devices():
        yield of_row("memory_not_registered", what=what)
    elif has_swap():
        yield of_row("memory_not_locked", what=what)
    else:
        yield ok(f"{what}; no locking needed here (no swap, no RDMA)")


def open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN
    yield of_row("few_files", holds=few, soft=soft, wanted=min(hard, 65_536))


def rdma() -> Iterator[Finding]:
    """Check RDMA devices, their ports, and whether this user may open them."""
    devices = rdma_devices()
    if not devices:
        yield ok("no device; bytes travel by shared memory and tcp")
        return
    for device in devices:
        states = []
        for port in sorted((device / "ports").glob("*")):
            state = (read(port / "state") or "?").partition(": ")[2] or "?"
            layer, rate = read(port / "link_layer") or "?", read(port / "rate") or "?"
            states.append(f"port {port.name} {state.lower()} ({layer}, {rate})")
        is_down = not any(" active " in state for state in states)
        shown = ", ".join(states) or "no port"
        yield of_row("link_down", holds=is_down, device=device.name, states=shown)
    verbs = sorted(RDMA_FILES.glob("uverbs*"))
    denied = [str(verb) for verb in verbs if not os.access(verb, os.R_OK | os.W_OK)]
    if not verbs:
        yield of_row("no_verbs", folder=RDMA_FILES)
    elif denied:
        yield of_row("verbs_denied", files=", ".join(denied), words=" ".join(denied))
    else:
        yield ok(f"{', '.join(map(str, verbs))} can be opened")
    for library in ("libibverbs.so.1", "librdmacm.so.1"):
        try:
            ctypes.CDLL(library)
        except OSError:
            yield of_row("no_rdma_library", library=library)


def leftover_segments() -> Iterator[Finding]:
    """Report memory of dead processes, which kvstore clean would remove."""
    found = memory_entries.left_overs()
    if found:
        size = sum(left.held for left in found)
        yield of_row("leftover_segments", count=len(found), size=size_text(size))
    else:
        yield ok("no memory of dead nodes")


def transparent_work() -> bool:
    """Return whether the kernel provides a huge page in shared memory on request."""
    path = f"{SHM_DIRECTORY}/{SHM_PREFIX}doctor-huge-{os.getpid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        os.unlink(path)
        os.ftruncate(fd, HUGE_BYTES)
        with mmap.mmap(fd, HUGE_BYTES) as mapped:
            pages.prefer_huge(mapped)
            if not pages.populate(mapped, 0, HUGE_BYTES, pages.POPULATE_WRITE):
                mapped[0] = 1
            return pages.huge_bytes(mapped) > 0
    except OSError:
        return False
    finally:
        os.close(fd)


def mount_options(directory: str) -> tuple[str, str] | None:
    """Return type and options of the file system mounted at ``directory``; None: none is."""
    found = None
    for line in (read(Path("/proc/self/mounts")) or "").splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if where == directory:
            found = kind, options  # the last mount hides earlier ones
    return found


def memory_available() -> int | None:
    for line in (read(Path("/proc/meminfo")) or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return None


def has_swap() -> bool:
    return len((read(Path("/proc/swaps")) or "").splitlines()) > 1


def may_lock_all() -> bool:
    for line in (read(Path("/proc/self/status")) or "").splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) & _IPC_LOCK)
    return False


def rdma_devices() -> list[Path]:
    return sorted(RDMA_DEVICES.glob("*"))


def read(path: Path) -> str | None:
    """Return the text of a small kernel file; None if it is missing or not readable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
