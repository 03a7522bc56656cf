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
from tests.support.accessibility import barriers
from tests.support.browser import Browser, browsing
from tests.support.processes import free_port
from tests.support.programs import skip
from tests.support.wait import until

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


def test_every_page_of_the_site_is_in_the_navigation() -> None:
    index = (HTML / "index.html").read_text()
    pages = {str(each.relative_to(HTML)) for each in HTML.rglob("*.html")}
    generated = {"index.html", "genindex.html", "search.html", "py-modindex.html"}
    assert [page for page in pages - generated if f'href="{page}"' not in index] == []


def test_the_reference_has_every_flag_error_and_verb(browser: Browser, address: str) -> None:
    for page, words in {
        "docs/settings.html": [each.flag for each in settings(MasterConfig)],
        "reference/commands.html": ["kvstore drain", "--discard", "--counters"],
        "reference/client.html": ["put_chain", "match_prefix", "AsyncClient", "PutOutcome"],
        "reference/calls.html": ["PutStart", "Lookup"],
        "docs/errors.html": [code for code in BY_CODE if code != "error"],
        "docs/metrics.html": ["kvstore_reuse_seconds"],
    }.items():
        browser.driver.get(f"{address}/{page}")
        text = browser.text("article")
        assert [word for word in words if word not in text] == [], page


WIDTHS: Final = 390, 1280, 1920
CUT: Final = """
const boxes = '.table-wrapper, .highlight, pre, table, img, p, li, dt, h1, h2, h3';
return [...document.querySelectorAll('article :is(' + boxes + ')')].filter((each) => {
  if (each.closest('.headerlink, .visually-hidden')) return false;
  const outer = each.parentElement.closest('.table-wrapper');
  const right = outer ? 0 : each.getBoundingClientRect().right;
  const cut = each.matches('.table-wrapper, .highlight, pre')
    && each.scrollWidth > each.clientWidth + 1;
  return cut || right > document.documentElement.clientWidth + 1;
}).map((each) => each.tagName + ': ' + each.textContent.trim().slice(0, 60));
"""
"""What one sees only by scrolling sideways."""


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_cut(browser: Browser, address: str, width: int) -> None:
    browser.driver.set_window_size(width, 1000)
    cut = {}
    for page in sorted(str(each.relative_to(HTML)) for each in HTML.rglob("*.html")):
        browser.driver.get(f"{address}/{page}")
        if found := browser.run(CUT):
            cut[page] = found[:3]
        assert browser.run("return document.documentElement.scrollWidth <= innerWidth"), page
    assert cut == {}


READ_MOST: Final = (
    "index.html", "search.html?q=miss", "docs/security.html", "docs/dashboard.html",
    "docs/settings.html", "docs/benchmarks/mooncake.html",
    "reference/client.html", "reference/commands.html",
)  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_nothing_stands_in_the_way_of_a_keyboard_a_screen_reader_or_weak_eyes(
    browser: Browser, address: str, theme: str
) -> None:
    browser.theme(theme)
    found = {}
    for page in READ_MOST:
        for width in WIDTHS[:2]:
            browser.driver.set_window_size(width, 1000)
            browser.driver.get(f"{address}/{page}")
            found[page, width] = barriers(browser)
    browser.theme("light")
    assert {where: what for where, what in found.items() if what} == {}


QUERIES: Final = {
    "miss": "docs/why", "install": "index", "slow": "docs/runbook", "docker": "docs/containers",
    "should I use": "docs/comparison", "redis": "docs/comparison", "tls": "docs/security",
    "kubernetes": "docs/containers", "grafana": "docs/dashboard", "gpu": "docs/gpu",
    "prometheus": "docs/metrics", "failover": "docs/high-availability", "rdma": "docs/transports",
    "benchmark": "docs/performance", "not found": "docs/why", "1p1d": "docs/proxy",
    "capacity": "docs/sizing", "sglang": "docs/engines/sglang", "quota": "docs/security",
    "quarantine": "docs/glossary", "lease_ms": "docs/settings", "eviction": "docs/glossary",
    "vllm": "docs/vllm", "backup": "docs/scope", "no space": "docs/errors",
    "testing": "docs/python", "out of memory": "docs/errors", "port": "docs/operations",
}  # fmt: skip
"""What a person types, and the page that it looks for."""


@pytest.mark.parametrize("query", QUERIES)
def test_the_search_shows_what_a_person_wants(browser: Browser, address: str, query: str) -> None:
    browser.driver.get(f"{address}/search.html?q={query.replace(' ', '+')}")
    links = "return [...document.querySelectorAll('#search-results li a')].map((a) => a.href)"
    until(lambda: "Search finished" in browser.text("#search-results"), within_s=30)
    first = [str(link).removeprefix(address).split(".html")[0] for link in browser.run(links)[:3]]
    assert f"/{QUERIES[query]}" in first
