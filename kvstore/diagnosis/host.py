"""This host: shared memory, huge pages, NUMA, limits, RDMA, clock, memory that dead nodes left."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import time
from pathlib import Path
from typing import Final

from kvstore.diagnosis.findings import Finding, ok, problem, warning
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

RDMA_DEVICES: Final = Path("/sys/class/infiniband")
RDMA_FILES: Final = Path("/dev/infiniband")

_IPC_LOCK: Final = 1 << 14


def entries(node_memory: int) -> list[Finding]:
    """All checks of ``/dev/shm`` and of hugetlbfs.

    They run one after the other in one check: each creates a file for a moment, and a parallel
    check would count its pages, or take it for a dead node's.
    """
    return [
        *shared_memory(node_memory),
        *memory_limit(node_memory),
        *huge_pages(),
        *left_overs(),
    ]


def shared_memory(node_memory: int) -> list[Finding]:
    """Whether ``/dev/shm`` exists, is writable, and has room for a node of ``node_memory``
    bytes."""
    subject = "shared memory"
    options = mount_options(SHM_DIRECTORY)
    if options is None and not os.path.isdir(SHM_DIRECTORY):
        return [
            problem(
                subject, f"there is no {SHM_DIRECTORY}", f"mount -t tmpfs tmpfs {SHM_DIRECTORY}"
            )
        ]
    found = []
    if options is None or options[0] != "tmpfs":
        what = f"{SHM_DIRECTORY} is " + ("not a mount" if options is None else options[0])
        found.append(problem(subject, what, f"mount -t tmpfs tmpfs {SHM_DIRECTORY}"))
    path = f"{SHM_DIRECTORY}/{SHM_PREFIX}doctor-{os.getpid()}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.close(fd)
        os.unlink(path)
    except OSError as error:
        what = f"{SHM_DIRECTORY} is not writable: {error.strerror}"
        return [*found, problem(subject, what, f"mount -o remount,rw,mode=1777 {SHM_DIRECTORY}")]
    room = os.statvfs(SHM_DIRECTORY)
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    available = memory_available()
    if room.f_blocks and free < node_memory:
        need = size - free + node_memory
        advice = (
            f"mount -o remount,size={-(-need // GIB)}g {SHM_DIRECTORY}; docker run "
            f"--shm-size={-(-need // GIB)}g; in Kubernetes an emptyDir of medium Memory"
        )
        what = f"{size_text(free)} of {size_text(size)} free, a node wants {size_text(node_memory)}"
        found.append(problem(subject, what, advice))
    elif available is not None and available < node_memory:
        what = f"the system has {size_text(available)} left, a node wants {size_text(node_memory)}"
        advice = "Give the node less --memory, or stop other programs."
        found.append(problem(subject, what, advice))
    else:
        what = f"{size_text(free)} of {size_text(size)} free" if room.f_blocks else "no limit"
        found.append(ok(subject, f"{what}, writable"))
    return found


def memory_limit(node_memory: int) -> list[Finding]:
    """Whether the control groups of this process allow a node of ``node_memory`` bytes."""
    subject = "memory limit"
    found = cgroup.limits()
    if not found:
        return [ok(subject, "no control group sets one")]
    what = f"{size_text(found[0].limit)} ({found[0].group}), {size_text(found[0].used)} taken"
    try:
        cgroup.check(node_memory)
    except MemoryLimitError as error:
        return [problem(subject, f"{what}; a node wants {size_text(node_memory)}", error.advice)]
    return [ok(subject, what)]


def huge_pages() -> list[Finding]:
    """Transparent huge pages, found by trying; reserved ones, found by asking the kernel."""
    subject = "huge pages"
    found = []
    if transparent_work():
        found.append(ok(subject, f"{SHM_DIRECTORY} provides transparent ones, which nodes use"))
    else:
        switch = read(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled"))
        setting = (mount_options(SHM_DIRECTORY) or ("", ""))[1]
        why = "huge=never" if "huge=" not in setting else "memory is fragmented now"
        if not switch:
            found.append(
                warning(
                    subject, "the kernel has no transparent ones", "Take --huge-pages reserved."
                )
            )
        elif "[deny]" in switch:
            command = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
            found.append(warning(subject, "transparent ones are denied", command))
        else:
            advice = (
                f"mount -o remount,huge=advise {SHM_DIRECTORY} (for good: in /etc/fstab): nodes "
                "start ten times faster, see docs/memory.md"
            )
            what = f"{SHM_DIRECTORY} provides no transparent ones ({why})"
            found.append(warning(subject, what, advice))
    found += reserved_pages()
    return found


def reserved_pages() -> list[Finding]:
    subject = "huge pages"
    counts = []
    for size in sorted(Path("/sys/kernel/mm/hugepages").glob("hugepages-*kB")):
        total = int(read(size / "nr_hugepages") or 0)
        free = int(read(size / "free_hugepages") or 0)
        if total:
            counts.append(f"{free} of {total} of {size.name.partition('-')[2]} free")
    mounted = [each for each in directories() if each != SHM_DIRECTORY]
    if not counts:
        return [ok(subject, "none reserved (--huge-pages reserved needs them)")]
    if not mounted:
        command = "mkdir -p /dev/hugepages && mount -t hugetlbfs -o mode=1777 none /dev/hugepages"
        return [warning(subject, f"reserved: {', '.join(counts)}, but no hugetlbfs", command)]
    if not any(os.access(each, os.W_OK) for each in mounted):
        what = f"reserved: {', '.join(counts)}, but {mounted[0]} is not writable"
        return [warning(subject, what, f"chmod 1777 {mounted[0]}")]
    return [ok(subject, f"reserved: {', '.join(counts)}, at {mounted[0]}")]


def numa_nodes() -> list[Finding]:
    nodes = numa.nodes_with_memory()
    if len(nodes) == 1:
        return [ok("NUMA", "one node")]
    advice = "Start one kvstore-node for each: " + "; ".join(f"--numa-node {n}" for n in nodes)
    return [ok("NUMA", f"{len(nodes)} nodes with memory: {', '.join(map(str, nodes))}", advice)]


def locked_memory(node_memory: int) -> list[Finding]:
    """Whether a segment can be locked, and whether that matters here."""
    subject = "locked memory"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if may_lock_all():
        return [ok(subject, "no limit for this user (CAP_IPC_LOCK)")]
    if limit == resource.RLIM_INFINITY or limit >= node_memory:
        shown = "no limit" if limit == resource.RLIM_INFINITY else f"up to {size_text(limit)}"
        return [ok(subject, shown)]
    advice = (
        "ulimit -l unlimited (as root, or /etc/security/limits.conf: * - memlock unlimited); "
        "LimitMEMLOCK=infinity in a systemd unit; docker run --ulimit memlock=-1"
    )
    what = f"limited to {size_text(limit)}, less than a node's {size_text(node_memory)}"
    if rdma_devices():
        return [problem(subject, f"{what}: RDMA cannot register it", advice)]
    if has_swap():
        return [warning(subject, f"{what}: a node's memory may be swapped out", advice)]
    return [ok(subject, f"{what}; no locking needed here (no swap, no RDMA)")]


def open_files() -> list[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES_MIN:
        advice = f"ulimit -n {min(hard, 65_536)}; LimitNOFILE=65536 in a systemd unit"
        return [warning("open files", f"at most {soft} at once", advice)]
    return [ok("open files", f"at most {soft} at once")]


def clock() -> list[Finding]:
    """What a reading of the clock costs: with a poor clock source, as on some virtual machines,
    each reading is a system call."""
    source = read(Path("/sys/devices/system/clocksource/clocksource0/current_clocksource"))
    rounds = 2_000
    best_us = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(rounds):
            time.monotonic()
        best_us = min(best_us, (time.perf_counter() - start) * 1e6 / rounds)
    what = f"{source or 'unknown source'}, {best_us:.2f} µs a reading"
    if best_us > CLOCK_US_MAX:
        there = "/sys/devices/system/clocksource/clocksource0"
        advice = f"cat {there}/available_clocksource; echo tsc > {there}/current_clocksource"
        return [warning("clock", what, advice)]
    return [ok("clock", what)]


def rdma() -> list[Finding]:
    """RDMA devices, their ports, and whether this user may open them."""
    subject = "RDMA"
    devices = rdma_devices()
    if not devices:
        return [ok(subject, "no device; bytes travel by shared memory and tcp")]
    found = []
    for device in devices:
        states = []
        for port in sorted((device / "ports").glob("*")):
            state = (read(port / "state") or "?").partition(": ")[2] or "?"
            layer = read(port / "link_layer") or "?"
            states.append(
                f"port {port.name} {state.lower()} ({layer}, {read(port / 'rate') or '?'})"
            )
        what = f"{device.name}: {', '.join(states) or 'no port'}"
        if any(" active " in state for state in states):
            found.append(ok(subject, what))
        else:
            found.append(warning(subject, what, "ibv_devinfo shows more; is the link up?"))
    verbs = sorted(RDMA_FILES.glob("uverbs*"))
    denied = [str(each) for each in verbs if not os.access(each, os.R_OK | os.W_OK)]
    if not verbs:
        advice = "modprobe ib_uverbs; docker run --device=/dev/infiniband"
        found.append(problem(subject, f"there is no {RDMA_FILES}/uverbs*", advice))
    elif denied:
        advice = f"chmod 666 {' '.join(denied)} (for good: a udev rule), or run as their group"
        found.append(problem(subject, f"not permitted: {', '.join(denied)}", advice))
    else:
        found.append(ok(subject, f"{', '.join(map(str, verbs))} can be opened"))
    for library in ("libibverbs.so.1", "librdmacm.so.1"):
        try:
            ctypes.CDLL(library)
        except OSError:
            advice = "apt-get install libibverbs1 librdmacm1 ibverbs-providers"
            found.append(problem(subject, f"{library} is not installed", advice))
    return found


def left_overs() -> list[Finding]:
    """Memory files that no living process owns: they take memory until they are removed."""
    subject = "left-overs"
    left, size, unknown = [], 0, 0
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
                left.append(str(entry))
                size += entry.stat().st_blocks * 512
    if left:
        advice = (
            "A node that is restarted with the same name and --memory serves what its memory "
            "holds. Otherwise: kvstore clean"
        )
        what = f"{len(left)} memory files of dead nodes hold {size_text(size)}"
        return [warning(subject, what, advice)]
    others = f" ({unknown} of other users could not be checked)" if unknown else ""
    return [ok(subject, f"no memory of dead nodes{others}")]


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
    """Type and options of the file system that is mounted there."""
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
