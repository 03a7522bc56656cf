"""Memory limits of the control groups of this process.

Pages of ``/dev/shm`` count for the group that accesses them first, and the kernel kills processes
of a full group without a message. So a node checks the limit first.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvstore.errors import MemoryLimitError

SELF: Final = Path("/proc/self")
UNLIMITED: Final = 1 << 60
"""Version 1 expresses "no limit" by a value of this size or more."""

OWN_BYTES: Final = 8 << 20
"""Memory of the node's process, besides page tables, which are 1/512 of its memory."""


class _Files(NamedTuple):
    """Names of files and fields in one version of control groups."""

    limit: str
    used: str
    cached: tuple[str, ...]
    """Lines of ``memory.stat`` with reclaimable memory."""


_V1: Final = _Files(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file")
)
_V2: Final = _Files("memory.max", "memory.current", ("active_file", "inactive_file"))


class CgroupLimit(NamedTuple):
    """The limit of this process's group, or of an ancestor."""

    group: str
    limit: int
    used: int
    """Bytes in use, without reclaimable ones."""

    @property
    def available(self) -> int:
        return max(0, self.limit - self.used)


def limits() -> list[CgroupLimit]:
    """The known limits of this process, least available memory first."""
    found = [limit for where, files in _groups() if (limit := _limit(where, files)) is not None]
    return sorted(found, key=lambda each: each.available)


def check(size: int) -> None:
    """Raises MemoryLimitError: a control group allows less than ``size`` more bytes."""
    tightest = next(iter(limits()), None)
    if tightest is None or not size or size + size // 512 + OWN_BYTES <= tightest.available:
        return
    most = max(0, (tightest.available - OWN_BYTES) * 512 // 513) >> 20
    raise MemoryLimitError(
        f"{size >> 20} MiB do not fit into the memory limit of the control group "
        f"{tightest.group}: {tightest.limit >> 20} MiB, of which {tightest.used >> 20} MiB are "
        "in use",
        advice=f"Give at most {most} MiB of --memory, or raise the limit, which counts /dev/shm: "
        "resources.limits.memory in Kubernetes, docker run --memory, MemoryMax= in a systemd unit. "
        "kvstore clean frees the memory of dead nodes.",
        needed_bytes=size,
        limit_bytes=tightest.limit,
        used_bytes=tightest.used,
    )


def _groups() -> Iterator[tuple[Path, _Files]]:
    """The directories of this process's groups, up to the highest visible one."""
    try:
        of = (SELF / "cgroup").read_text().splitlines()
        mounts = (SELF / "mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in of:
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if not is_v2 and "memory" not in controllers.split(","):
            continue
        for mount in mounts:
            before, _, behind = mount.partition(" - ")
            root, point = before.split(" ")[3:5]
            kind, _, options = behind.split(" ", 2)
            if is_v2 and kind != "cgroup2":
                continue
            if not is_v2 and not (kind == "cgroup" and "memory" in options.split(",")):
                continue
            top = Path(point.encode().decode("unicode_escape"))
            below = os.path.relpath(path, root)
            at = top if below.startswith("..") else top / below
            while True:
                yield at, _V2 if is_v2 else _V1
                if at == top:
                    break
                at = at.parent
            break


def _limit(where: Path, files: _Files) -> CgroupLimit | None:
    try:
        limit = int((where / files.limit).read_text())
        used = int((where / files.used).read_text())
        stat = (where / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):  # the root has no limit, and "max" is not a number
        return None
    if limit >= UNLIMITED:
        return None
    cached = sum(int(number) for name, _, number in (s.partition(" ") for s in stat)
                 if name in files.cached)  # fmt: skip
    return CgroupLimit(str(where), limit, max(0, used - cached))
