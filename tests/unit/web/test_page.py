"""The files of the dashboard's page, as text: what they must know of other parts."""

from __future__ import annotations

import re
import runpy
from importlib import resources
from pathlib import Path

import pytest

import kvstore.master
from kvstore.diagnosis.problems import ADVICE

ROOT = Path(__file__).parents[3]
PAGE = resources.files("kvstore.web.dashboard") / "page"


def test_every_event_of_the_master_has_a_sentence() -> None:
    script = (PAGE / "page.js").read_text()
    words = re.search(r"(?ms)^const WORDS = \{(.*?)^\};", script)
    assert words is not None
    known = set(re.findall(r"(?m)^  (\w+): \(f\)", words[1]))
    (folder,) = map(Path, kvstore.master.__path__)
    source = "".join(path.read_text() for path in folder.rglob("*.py"))
    told = re.findall(r"(?:Notice|notices\.add|_notice)\(\s*([^),]*)", source)
    events = set(re.findall(r'(?<!== )"(\w+)"', " ".join(told)))
    assert {"leads", "node_undrained", "puts_expired"} <= events
    assert known == events


def rendered(source: str) -> str:
    return str(runpy.run_path(str(ROOT / "docs/site/runbook.py"))["page"](source))


def test_the_page_of_the_runbook_is_made_from_its_source() -> None:
    source = (ROOT / "docs/runbook.md").read_text()
    page = (PAGE / "runbook.html").read_text()
    assert page == rendered(source), "make reference"
    anchors = set(re.findall(r'id="(\w+)"', page))
    assert anchors >= {name.lower() for name in re.findall(r"(?m)^## (\w+)", source)}
    assert "://" not in re.sub(r"<(code|pre)>.*?</\1>", "", page, flags=re.DOTALL)
    for target in re.findall(r'href="#(\w+)"', page):
        assert target in anchors


def test_what_a_runbook_may_be_made_of() -> None:
    page = rendered("## A b\n\n**x**: `<i>*` [y](z.md#c),\n*em* [A](#a-b)\n\n    a < b\n    c")
    assert '<h2 id="a b">A b</h2>' in page
    assert (
        "<p><strong>x</strong>: <code>&lt;i&gt;*</code> y (<code>docs/z.md</code>), "
        '<em>em</em> <a href="#a-b">A</a></p>'
    ) in page
    assert "<pre>a &lt; b\nc</pre>" in page
    for unknown in ("* a list", "| a | table |", "<b>", "1. one", "### three"):
        with pytest.raises(ValueError, match="not known"):
            rendered(unknown)


def test_each_problem_has_its_section_of_the_runbook() -> None:
    sections = set(re.findall(r"(?m)^## (\w+)", (ROOT / "docs/runbook.md").read_text()))
    source = (ROOT / "kvstore/diagnosis/problems.py").read_text()
    named = set(re.findall(r'"(Kvstore\w+|[A-Z]\w+ed|Draining)"', source))
    assert {"KvstoreNodeDead", "EventsDropped", "Draining"} <= named
    assert named <= sections
    assert named == ADVICE.keys(), "each has its line of advice"
