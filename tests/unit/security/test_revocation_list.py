"""The file of revoked numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from kvstore.runtime.watched_files import refused_files
from kvstore.security.identity import validated_identity
from kvstore.security.revocation_list import RevocationList


def has(file: RevocationList, number: str = "9c41f0aa52e3b817") -> bool:
    return file.has(validated_identity("x", ["engine"], reads=["a"], number=number))


@pytest.mark.usefixtures("files_at_once")
def test_a_list_that_lacks_numbers_changes_nothing(tmp_path: Path) -> None:
    """A list that was emptied, or was cut on a full disk, let in a revoked identity."""
    path = tmp_path / "revoked"
    path.touch()
    file = RevocationList(str(path))
    assert not has(file)
    path.write_text("1\n9c41f0aa52e3b817  # decode-7, 2026-11-26\n")
    assert has(file)
    assert not has(file, "9c41f0aa52e3b818")
    for content in ("", "1\n9c41f0", "1\n", "1\n9c41f0aa52e3b818\n"):
        path.write_text(content)
        assert has(file)
        assert not has(file, "9c41f0aa52e3b818")
        assert not has(file, "9c41f0")
        assert refused_files()["auth_revoked"] == 1
    path.write_text("1\n9c41f0aa52e3b817\n9c41f0aa52e3b818\n")
    assert has(file)
    assert has(file, "9c41f0aa52e3b818")
    assert refused_files()["auth_revoked"] == 0


@pytest.mark.parametrize(
    "line",
    ["9C41F0AA52E3B817", "0x9c41f0aa52e3b817", "9c:41:f0:aa:52:e3:b8:17", " 9c41f0aa52e3b817\r",
     "009c41f0aa52e3b817 # Grüße"],
)  # fmt: skip
def test_a_number_is_known_as_other_tools_write_it(tmp_path: Path, line: str) -> None:
    """Was compared as text, and a comment that was not ASCII left the whole file unread."""
    path = tmp_path / "revoked"
    path.write_text(f"# by hand: ü\n\n{line}\n", encoding="utf-8")
    assert has(RevocationList(str(path)))
    path.write_bytes(b"# \xff\n9c41f0aa52e3b817\n")
    assert has(RevocationList(str(path)))


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "cannot be read"), ("no list\n", "is no number"), ("9c41\n<html>\n", "is no number"),
     ("9c41\n52e3", "ends within a line"), ("9c41\n" * (16 << 18), "has more than 16777216 bytes")],
)  # fmt: skip
def test_without_a_list_no_process_starts(tmp_path: Path, content: str | None, said: str) -> None:
    """It started, and let in who was revoked."""
    path = tmp_path / "revoked"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=f"auth_revoked {path} .*{said}"):
        RevocationList(str(path))
