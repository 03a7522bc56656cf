"""Limits of control groups, as files in a folder say them; and one of this host's, where we may."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import MemoryLimitError
from kvstore.memory import cgroup

MIB = 1 << 20
V1 = Path("/sys/fs/cgroup/memory")


def group(path: Path, *, limit: str, used: int, cached: int = 0, v1: bool = False) -> None:
    path.mkdir(parents=True, exist_ok=True)
    (path / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(f"{limit}\n")
    (path / ("memory.usage_in_bytes" if v1 else "memory.current")).write_text(f"{used}\n")
    name = "total_inactive_file" if v1 else "inactive_file"
    (path / "memory.stat").write_text(f"anon 7\n{name} {cached}\nshmem 9\n")


def process(monkeypatch: pytest.MonkeyPatch, at: Path, cgroups: str, mounts: str) -> None:
    """What ``/proc/self`` says."""
    (at / "self").mkdir()
    (at / "self" / "cgroup").write_text(cgroups)
    (at / "self" / "mountinfo").write_text(mounts)
    monkeypatch.setattr(cgroup, "SELF", at / "self")


def test_the_tightest_of_a_group_and_those_above_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "fs"
    mounts = f"30 23 0:26 / {top} rw,nosuid shared:9 - cgroup2 cgroup2 rw\n"
    process(monkeypatch, tmp_path, "0::/kube/pod/container\n", mounts)
    group(top / "kube", limit="max", used=1)
    group(top / "kube/pod", limit=str(512 * MIB), used=300 * MIB, cached=100 * MIB)
    group(top / "kube/pod/container", limit=str(1024 * MIB), used=200 * MIB)

    found = cgroup.limits()

    assert [(each.limit // MIB, each.used // MIB) for each in found] == [(512, 200), (1024, 200)]
    cgroup.check(300 * MIB)
    with pytest.raises(MemoryLimitError, match=r"400 MiB do not fit .* 512 MiB, of which 200 MiB"):
        cgroup.check(400 * MIB)


@pytest.fixture
def limited() -> Iterator[Path]:
    """A group of 64 MiB on this host."""
    path = V1 / f"kvstore-test-{uuid.uuid4().hex}"
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(64 * MIB))
    except OSError:
        pytest.skip("no control group (version 1) can be made here")
    yield path
    path.rmdir()


def test_a_segment_that_does_not_fit_is_refused_and_a_half_made_one_removed_first(
    limited: Path,
) -> None:
    """Without the check the kernel kills the process."""
    name = f"cgroup-{os.getpid()}"
    half_made = Path(f"/dev/shm/kvstore.{name}")
    half_made.touch()
    os.truncate(half_made, 256 * MIB)
    program = (
        "import os, pathlib, sys\n"
        f"pathlib.Path({str(limited / 'cgroup.procs')!r}).write_text(str(os.getpid()))\n"
        "from kvstore.memory.segment import OwnedSegment\n"
        f"assert OwnedSegment.attach({name!r}, 256 << 20) is None\n"
        f"OwnedSegment.create({name!r}, int(sys.argv[1]) << 20).close()\n"
    )
    run = [sys.executable, "-c", program]
    refused = subprocess.run([*run, "256"], check=False, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 1
    assert "MemoryLimitError: 256 MiB do not fit" in refused.stderr
    assert "64 MiB" in refused.stderr
    assert not half_made.exists()
    subprocess.run([*run, "8"], check=True, timeout=60)
