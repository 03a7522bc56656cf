"""What ``kvstore doctor`` finds out about the directories of ``--disk``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.console.diagnostics import disks as checks
from kvstore.console.diagnostics.disks import disks


def test_a_disk_is_measured_and_its_wear_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "PIECES", 4)
    monkeypatch.setattr(checks, "READ_MIN", 0)
    room = os.statvfs(tmp_path)
    half = room.f_blocks * room.f_frsize // 2
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    found = [finding for finding in disks(str(tmp_path), half, 3.0) if finding.state == "ok"]
    assert "/s written" in found[0].found
    assert "up to 1.5 drive writes a day" in found[0].found
    assert "over 5 years lasts 3.3 years" in found[0].found
    monkeypatch.setattr(checks, "READ_MIN", 1 << 60)
    slow = list(disks(str(tmp_path), 1, 3.0))
    assert [finding.state for finding in slow] == ["warning"]
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_directory_that_cannot_be_used_is_a_problem(tmp_path: Path) -> None:
    found = list(disks(f"{tmp_path}/absent,", 1, 3.0))
    assert [(each.state, "absent: No such file" in each.found) for each in found] == [
        ("problem", True)
    ]
    small = next(iter(disks(str(tmp_path), 1 << 60, 3.0)))
    assert (small.state, "left, the file of the node takes" in small.found) == ("problem", True)
