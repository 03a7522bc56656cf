"""The page about the proxy names every option, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvstore.config import ProxyConfig, Setting, settings

PAGE = (Path(__file__).parents[3] / "docs" / "proxy.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `--")]


@pytest.mark.parametrize("setting", settings(ProxyConfig), ids=lambda setting: setting.key)
def test_the_page_names_the_option_and_its_default(setting: Setting) -> None:
    flag, default = setting.flag, setting.default or "none"
    row = next((row for row in ROWS if f"`{flag}`" in row), None)
    assert row is not None, flag
    assert re.search(rf"\b{re.escape(default)}\b", row.split("|")[2]), row
