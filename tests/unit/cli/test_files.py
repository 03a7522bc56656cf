"""Files of ``kvstore put``."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cli import files
from kvstore.errors import ValueTooLargeError


def test_what_may_not_end_is_read_up_to_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "STREAM_BYTES_MAX", 1_000)
    with pytest.raises(ValueTooLargeError, match="not a regular file"):
        files.read_file("/dev/zero")
    file = tmp_path / "long"
    file.write_bytes(bytes(2_000))
    assert files.read_file(str(file)) == bytes(2_000)
