"""The file of revoked numbers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from kvstore.auth import revoked
from kvstore.auth.identity import identity
from kvstore.auth.revoked import Revoked
from kvstore.errors import ConfigError


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(revoked, "uptime", found)
    return found


def has(file: Revoked, number: str = "9c41f0aa52e3b817") -> bool:
    return file.has(identity("x", ["engine"], reads=["a"], number=number))


def test_a_number_counts_within_a_second(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "revoked"
    path.touch()
    file = Revoked(str(path))
    assert not has(file)
    path.write_text("9c41f0aa52e3b817  # decode-7, 2026-11-26\n")
    assert not has(file), "looks once a second"
    clock.now += 1.0
    assert has(file)
    assert not has(file, "9c41f0aa52e3b818")
    path.write_text("")
    clock.now += 1.0
    assert not has(file)


@pytest.mark.parametrize(
    "line",
    ["9C41F0AA52E3B817", "0x9c41f0aa52e3b817", "9c:41:f0:aa:52:e3:b8:17", " 9c41f0aa52e3b817\r",
     "009c41f0aa52e3b817 # Grüße"],
)  # fmt: skip
def test_a_number_is_known_as_other_tools_write_it(tmp_path: Path, line: str) -> None:
    """Was compared as text, and a comment that was not ASCII left the whole file unread."""
    path = tmp_path / "revoked"
    path.write_text(f"# by hand: ü\n\n{line}\n", encoding="utf-8")
    assert has(Revoked(str(path)))
    path.write_bytes(b"# \xff\n9c41f0aa52e3b817\n")
    assert has(Revoked(str(path)))


def test_certificates_without_a_number_are_never_revoked(tmp_path: Path) -> None:
    path = tmp_path / "revoked"
    path.write_text("\n# nothing\n0\n1\n")
    assert not has(Revoked(str(path)), "")
    assert not has(Revoked(""))


@pytest.mark.parametrize("content", [None, "no list\n", "9c41f0aa52e3b817\n<html>\n"])
def test_without_a_list_no_process_starts(tmp_path: Path, content: str | None) -> None:
    """It started, and let in who was revoked."""
    path = tmp_path / "revoked"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="the file of revoked identities"):
        Revoked(str(path))


@pytest.mark.parametrize("content", [None, "no list\n", "9c41f0aa52e3b818\n<html>\n"])
def test_who_was_revoked_stays_so_and_it_is_told_each_minute(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = tmp_path / "revoked"
    path.write_text("9c41f0aa52e3b817\n")
    file = Revoked(str(path))
    path.unlink()
    if content is not None:
        path.write_text(content)
    caplog.set_level(logging.INFO, "kvstore.auth")
    for _ in range(100):
        clock.now += 1.0
        assert has(file)
        assert not has(file, "9c41f0aa52e3b818")
    assert [record.message.split()[0] for record in caplog.records] == ["revoked_not_read"] * 2
    path.write_text("9c41f0aa52e3b818\n")
    clock.now += 1.0
    assert has(file, "9c41f0aa52e3b818")
