"""What a test must not leave behind: threads, descriptors, child processes, shared memory.

``snapshot`` says what there is; ``leaked`` compares with an earlier snapshot and gives what is on
its way out some time to go, because a closed channel's socket or a stopped server's thread may
outlive the call that ended it by a moment.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

GRACE_S = 5.0
SHM = Path("/dev/shm")
SHM_PREFIX = "kvstore"

# Threads and descriptors that a library makes once per process and keeps on purpose.
THREADS_KEPT = ("_poll_wrapper",)  # grpc.aio's completion queue
# grpc's eventfd and epoll, without a peer or a file to leak; what CUDA opens for its context.
DESCRIPTORS_KEPT = ("anon_inode:", "/dev/nvidia")
CHILDREN_KEPT = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


_shm_is_ours = True


def ignore_shared_memory() -> None:
    """Ignores shared memory from now on: other programs use it, too."""
    global _shm_is_ours
    _shm_is_ours = False


class Snapshot(NamedTuple):
    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[int, str]]
    children: frozenset[int]
    shared_memory: frozenset[str]


def snapshot() -> Snapshot:
    return Snapshot(_threads(), _descriptors(), _children(), _shared_memory())


def leaked(before: Snapshot, *, grace_s: float = GRACE_S) -> list[str]:
    """What there is more than ``before``, one line each, once the time of grace is over."""
    found = _compare(before, snapshot())
    if not found:
        return []
    deadline = time.monotonic() + grace_s
    while True:
        # Sockets and files in cycles are closed by the collector, which is no leak. Again and
        # again: what a finalizer ends, here or in a thread that it starts, may be a cycle as well.
        gc.collect()
        found = _compare(before, snapshot())
        if not found or time.monotonic() >= deadline:
            return found
        time.sleep(0.02)


def _compare(before: Snapshot, now: Snapshot) -> list[str]:
    lines = [f"thread {thread.name}" for thread in now.threads - before.threads]
    lines += _more_descriptors(before.descriptors, now.descriptors)
    lines += [
        f"child process {child}: {name}"
        for child in now.children - before.children
        if not any(kept in (name := _command(child)) for kept in CHILDREN_KEPT)
    ]
    lines += [f"shared memory {SHM / name}" for name in now.shared_memory - before.shared_memory]
    return sorted(lines)


def _more_descriptors(
    before: frozenset[tuple[int, str]], now: frozenset[tuple[int, str]]
) -> list[str]:
    """A socket in place of one that is gone is no leak: a client of a wider fixture, whose channel
    was idle, has a new one."""
    new = now - before
    sockets = sum(_is_socket(each) for each in new) - sum(_is_socket(each) for each in before - now)
    return [
        f"descriptor {number}: {what}"
        for number, what in new
        if sockets > 0 or not _is_socket((number, what))
    ]


def _is_socket(descriptor: tuple[int, str]) -> bool:
    return descriptor[1].startswith("socket:")


def _threads() -> frozenset[threading.Thread]:
    return frozenset(
        thread
        for thread in threading.enumerate()
        if not any(kept in thread.name for kept in THREADS_KEPT)
    )


def _descriptors() -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            what = os.readlink(f"/proc/self/fd/{name}")
            if not what.startswith(DESCRIPTORS_KEPT) and int(name) != _tracker_descriptor():
                found.add((int(name), what))
    return frozenset(found)


def _tracker_descriptor() -> int | None:
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    return getattr(getattr(tracker, "_resource_tracker", None), "_fd", None)


def _children() -> frozenset[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError):  # that thread has ended
            text = Path(f"/proc/self/task/{task}/children").read_text()
            found.update(int(child) for child in text.split())
    return frozenset(found)


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return "ended"


def _shared_memory() -> frozenset[str]:
    if not _shm_is_ours:
        return frozenset()
    try:
        return frozenset(name for name in os.listdir(SHM) if name.startswith(SHM_PREFIX))
    except OSError:
        return frozenset()
