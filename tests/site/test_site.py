"""The documentation site that ``make docs`` has built, in a real browser: navigation, search,
nothing from elsewhere."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvstore.config import MasterConfig, settings
from kvstore.errors import BY_CODE
from tests.support.browser import Browser, browsing
from tests.support.processes import free_port
from tests.support.programs import skip
from tests.support.waiting import until

HTML: Final = Path(__file__).parents[2] / "build/docs/html"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Served by a process of its own: a browser keeps connections open as it likes."""
    if not (HTML / "index.html").exists():
        skip("there is no site: make docs")
    port = free_port()
    command = [sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)]
    with subprocess.Popen(command, cwd=HTML, stderr=subprocess.DEVNULL) as server:
        try:
            until(lambda: answers(port), within_s=30)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.kill()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@pytest.fixture(scope="module")
def browser(address: str) -> Iterator[Browser]:
    with browsing() as browser:
        browser.driver.set_page_load_timeout(60)
        yield browser


@pytest.fixture(autouse=True)
def nothing_is_wrong(browser: Browser, address: str) -> Iterator[None]:
    """No page complains, or asks another host for anything."""
    browser.complaints()
    browser.requests()
    yield
    assert browser.complaints() == []
    elsewhere = [url for url in browser.requests() if not url.startswith((address, "data:"))]
    assert elsewhere == []


def test_every_page_of_the_navigation_can_be_read(browser: Browser, address: str) -> None:
    browser.driver.get(f"{address}/index.html")
    script = "return [...document.querySelectorAll('.sidebar-tree a.reference')].map((a) => a.href)"
    pages = sorted({str(url).partition("#")[0] for url in browser.run(script)})
    assert len(pages) > 30
    for page in pages:
        browser.driver.get(page)
        assert browser.text("h1"), page
        assert "404" not in browser.driver.title


def test_every_page_of_the_site_is_in_the_navigation() -> None:
    index = (HTML / "index.html").read_text()
    pages = {str(each.relative_to(HTML)) for each in HTML.rglob("*.html")}
    generated = {"index.html", "genindex.html", "search.html", "py-modindex.html"}
    decisions = {page for page in pages if page.startswith("docs/adr/0")}
    assert [page for page in pages - generated - decisions if f'href="{page}"' not in index] == []


def test_the_reference_has_every_flag_error_and_verb(browser: Browser, address: str) -> None:
    for page, words in {
        "docs/settings.html": [each.flag for each in settings(MasterConfig)],
        "reference/commands.html": ["kvstore drain", "--discard", "--snapshot"],
        "reference/client.html": ["put_chain", "match_prefix", "AsyncClient", "PutOutcome"],
        "reference/calls.html": ["PutStart", "Lookup"],
        "docs/errors.html": [code for code in BY_CODE if code != "error"],
        "docs/metrics.html": ["kvstore_reuse_seconds"],
    }.items():
        browser.driver.get(f"{address}/{page}")
        text = browser.text("article")
        assert [word for word in words if word not in text] == [], page


def test_the_search_finds_a_setting(browser: Browser, address: str) -> None:
    browser.driver.get(f"{address}/search.html?q=quarantine")
    until(lambda: "Glossary" in " ".join(browser.texts("#search-results li a")), within_s=30)


def test_a_link_to_a_heading_of_another_page(browser: Browser, address: str) -> None:
    browser.driver.get(f"{address}/docs/errors.html")
    browser.run("document.querySelector('a[href*=\"runbook.html#kvstorecorruptmemory\"]').click()")
    until(lambda: browser.driver.current_url.endswith("runbook.html#kvstorecorruptmemory"))
    assert browser.run("return document.querySelector('#kvstorecorruptmemory') !== null")
