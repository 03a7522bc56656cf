"""How replies are written for programs."""

from __future__ import annotations

from kvstore import calls
from kvstore.cli.json_output import plain


def test_replies_as_json() -> None:
    version = calls.Version(1, 2)
    assert plain({"a": (version, b"\x01", None)}) == {"a": [{"epoch": 1, "counter": 2}, "01", None]}
