"""Checks of this host: shared memory, huge pages, NUMA, limits, RDMA, clock, left-over memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvstore.diagnosis.findings import Finding, ok, problem, under, warning, warning_if
from kvstore.errors import MemoryLimitError
from kvstore.memory import cgroup, numa, pages
from kvstore.memory.entries import SHM_DIRECTORY, SHM_PREFIX, directories, is_locked
from kvstore.texts import size_text

GIB: Final = 1 << 30
HUGE_BYTES: Final = 2 << 20
OPEN_FILES_MIN: Final = 4_096
"""Enough for a master's 1,024 connections, a node's 256, and the files of their libraries."""

CLOCK_US_MAX: Final = 1.0
"""The most that one reading of the clock may cost. A call reads it about ten times."""

CLOCK_SOURCE: Final = Path("/sys/devices/system/clocksource/clocksource0")
SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
RDMA_DEVICES: Final = Path("/sys/class/infiniband")
RDMA_FILES: Final = Path("/dev/infiniband")

_IPC_LOCK: Final = 1 << 14


def entries(node_memory: int) -> Iterator[Finding]:
    """All checks of ``/dev/shm`` and of hugetlbfs.

    They run one after the other in one check: each creates a file for a moment, and a parallel
    check would count its pages, or take it for a dead node's.
    """
    yield from under("shared memory", shared_memory(node_memory))
    yield from under("memory limit", memory_limit(node_memory))
    yield from under("huge pages", huge_pages())
    yield from under("left-overs", left_overs())


def shared_memory(node_memory: int) -> Iterator[Finding]:
    """Whether ``/dev/shm`` exists, is writable, and has room for a node of ``node_memory``
    bytes."""
    options = mount_options(SHM_DIRECTORY)
    mount = f"mount -t tmpfs tmpfs {SHM_DIRECTORY}"
    if options is None and not os.path.isdir(SHM_DIRECTORY):
        yield problem(f"there is no {SHM_DIRECTORY}", mount)
        return
    kind = "not a mount" if options is None else options[0]
    if kind != "tmpfs":
        yield problem(f"{SHM_DIRECTORY} is {kind}", mount)
    path = f"{SHM_DIRECTORY}/{SHM_PREFIX}doctor-{os.getpid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.close(fd)
        os.unlink(path)
    except OSError as error:
        command = f"mount -o remount,rw,mode=1777 {SHM_DIRECTORY}"
        yield problem(f"{SHM_DIRECTORY} is not writable: {error.strerror}", command)
        return
    room = os.statvfs(SHM_DIRECTORY)
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    available = memory_available()
    has, wants = f"{size_text(free)} of {size_text(size)} free", size_text(node_memory)
    if room.f_blocks and free < node_memory:
        need = f"size={-(-(size - free + node_memory) // GIB)}g"
        yield problem(
            f"{has}, a node wants {wants}",
            f"mount -o remount,{need} {SHM_DIRECTORY}; docker run --shm-{need}; in Kubernetes an "
            "emptyDir of medium Memory",
        )
    elif available is not None and available < node_memory:
        yield problem(
            f"the system has {size_text(available)} left, a node wants {wants}",
            "Give the node less --memory, or stop other programs.",
        )
    else:
        yield ok(f"{has if room.f_blocks else 'no limit'}, writable")


def memory_limit(node_memory: int) -> Iterator[Finding]:
    """Whether the control groups of this process allow a node of ``node_memory`` bytes."""
    found = cgroup.limits()
    if not found:
        yield ok("no control group sets one")
        return
    what = f"{size_text(found[0].limit)} ({found[0].group}), {size_text(found[0].used)} taken"
    try:
        cgroup.check(node_memory)
    except MemoryLimitError as error:
        yield problem(f"{what}; a node wants {size_text(node_memory)}", error.advice)
    else:
        yield ok(what)


def huge_pages() -> Iterator[Finding]:
    """Transparent huge pages, found by trying; reserved ones, found by asking the kernel."""
    switch = read(SHMEM_ENABLED)
    if transparent_work():
        yield ok(f"{SHM_DIRECTORY} provides transparent ones, which nodes use")
    elif not switch:
        yield warning("the kernel has no transparent ones", "Take --huge-pages reserved.")
    elif "[deny]" in switch:
        yield warning("transparent ones are denied", f"echo advise > {SHMEM_ENABLED}")
    else:
        setting = (mount_options(SHM_DIRECTORY) or ("", ""))[1]
        why = "huge=never" if "huge=" not in setting else "memory is fragmented now"
        yield warning(
            f"{SHM_DIRECTORY} provides no transparent ones ({why})",
            f"mount -o remount,huge=advise {SHM_DIRECTORY} (for good: in /etc/fstab): nodes "
            "start ten times faster, see docs/memory.md",
        )
    counts = []
    for size in sorted(Path("/sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        total = int(read(size / "nr_hugepages") or 0)
        free = int(read(size / "free_hugepages") or 0)
        if total:
            counts.append(f"{free} of {total} of {size.name.partition('-')[2]} free")
    reserved = f"reserved: {', '.join(counts)}"
    mounted = [each for each in directories() if each != SHM_DIRECTORY]
    if not counts:
        yield ok("none reserved (--huge-pages reserved needs them)")
    elif not mounted:
        command = "mkdir -p /dev/hugepages && mount -t hugetlbfs -o mode=1777 none /dev/hugepages"
        yield warning(f"{reserved}, but no hugetlbfs", command)
    elif not any(os.access(each, os.W_OK) for each in mounted):
        yield warning(f"{reserved}, but {mounted[0]} is not writable", f"chmod 1777 {mounted[0]}")
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
    """Whether a segment can be locked, and whether that matters here."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    what = f"limited to {size_text(limit)}, less than a node's {size_text(node_memory)}"
    advice = (
        "ulimit -l unlimited (as root, or /etc/security/limits.conf: * - memlock unlimited); "
        "LimitMEMLOCK=infinity in a systemd unit; docker run --ulimit memlock=-1"
    )
    if may_lock_all():
        yield ok("no limit for this user (CAP_IPC_LOCK)")
    elif limit == resource.RLIM_INFINITY:
        yield ok("no limit")
    elif limit >= node_memory:
        yield ok(f"up to {size_text(limit)}")
    elif rdma_devices():
        yield problem(f"{what}: RDMA cannot register it", advice)
    elif has_swap():
        yield warning(f"{what}: a node's memory may be swapped out", advice)
    else:
        yield ok(f"{what}; no locking needed here (no swap, no RDMA)")


def open_files() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN
    advice = f"ulimit -n {min(hard, 65_536)}; LimitNOFILE=65536 in a systemd unit"
    yield warning_if(few, f"at most {soft} at once", advice)


def clock() -> Iterator[Finding]:
    """What a reading of the clock costs: with a poor clock source, as on some virtual machines,
    each reading is a system call."""
    source = read(CLOCK_SOURCE / "current_clocksource")
    rounds = 2_000
    best_us = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(rounds):
            time.monotonic()
        best_us = min(best_us, (time.perf_counter() - start) * 1e6 / rounds)
    what = f"{source or 'unknown source'}, {best_us:.2f} µs a reading"
    there = CLOCK_SOURCE
    command = f"cat {there}/available_clocksource; echo tsc > {there}/current_clocksource"
    yield warning_if(best_us > CLOCK_US_MAX, what, command)


def rdma() -> Iterator[Finding]:
    """RDMA devices, their ports, and whether this user may open them."""
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
        what = f"{device.name}: {', '.join(states) or 'no port'}"
        is_down = not any(" active " in state for state in states)
        yield warning_if(is_down, what, "ibv_devinfo shows more; is the link up?")
    verbs = sorted(RDMA_FILES.glob("uverbs*"))
    denied = [str(each) for each in verbs if not os.access(each, os.R_OK | os.W_OK)]
    if not verbs:
        advice = "modprobe ib_uverbs; docker run --device=/dev/infiniband"
        yield problem(f"there is no {RDMA_FILES}/uverbs*", advice)
    elif denied:
        advice = f"chmod 666 {' '.join(denied)} (for good: a udev rule), or run as their group"
        yield problem(f"not permitted: {', '.join(denied)}", advice)
    else:
        yield ok(f"{', '.join(map(str, verbs))} can be opened")
    for library in ("libibverbs.so.1", "librdmacm.so.1"):
        try:
            ctypes.CDLL(library)
        except OSError:
            advice = "apt-get install libibverbs1 librdmacm1 ibverbs-providers"
            yield problem(f"{library} is not installed", advice)


def left_overs() -> Iterator[Finding]:
    """Memory files that no living process owns: they take memory until they are removed."""
    left, size, unknown = 0, 0, 0
    for directory in directories():
        try:
            entries = sorted(Path(directory).glob(f"{SHM_PREFIX}*"))
        except OSError:
            continue
        for entry in entries:
            owned = is_owned(entry)
            if owned is None:
                unknown += 1
            elif not owned:
                left += 1
                size += entry.stat().st_blocks * 512
    if left:
        yield warning(
            f"{left} memory files of dead nodes hold {size_text(size)}",
            "Start the node again with the same --name and --memory: it serves what its memory "
            "holds. kvstore clean deletes that for good: only if the node will not come back.",
        )
    else:
        others = f" ({unknown} of other users could not be checked)" if unknown else ""
        yield ok(f"no memory of dead nodes{others}")


# --- what the checks read ----------------------------------------------------------------------


def is_owned(entry: Path) -> bool | None:
    """Whether a living process has ``entry`` locked; None: this user may not look."""
    try:
        return is_locked(entry)
    except FileNotFoundError:
        return True  # removed meanwhile
    except OSError:
        return None


def transparent_work() -> bool:
    """Whether the kernel provides a huge page in shared memory on request."""
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
    """Type and options of the file system that is mounted at ``directory``; None: none is."""
    found = None
    for line in (read(Path("/proc/self/mounts")) or "").splitlines():
        _, where, kind, options, *_ = line.split(" ")
        if where == directory:
            found = kind, options  # the last mount hides those before it
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
    """The text of a small kernel file; None where it is missing or not readable."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
