"""The files of the dashboard's page, as text: what they must know of other parts."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import kvstore.master
from kvstore.console.dashboard.routes import runbook
from kvstore.console.diagnostics.rows import ROWS

PAGE = resources.files("kvstore.console.dashboard") / "page"


def test_every_event_of_the_master_has_a_sentence() -> None:
    script = (PAGE / "page.js").read_text()
    words = re.search(r"(?ms)^const CLUSTER_EVENT_TEXTS = \{(.*?)^\};", script)
    assert words is not None
    known = set(re.findall(r"(?m)^  (\w+): \(f\)", words[1]))
    (folder,) = map(Path, kvstore.master.__path__)
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    told = re.findall(r"(?:LogClusterEvent|notices\.add|_log_event)\(\s*([^),]*)", source)
    events = set(re.findall(r'(?<!== )"(\w+)"', " ".join(told)))
    assert {"leads", "node_undrained", "puts_expired"} <= events
    assert known == events


def test_the_runbook_that_masters_serve_has_every_section() -> None:
    page = runbook().decode()
    assert re.findall(r'<h2 id="(\w+)"', page) == [row.name.lower() for row in ROWS]
    assert "://" not in re.sub(r"<code>.*?</code>", "", page)
    assert "<code>kvstore drain NODE</code>" in page
    assert "`" not in page
