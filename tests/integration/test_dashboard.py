"""The dashboard of real masters: what it serves, to whom, and what a real browser shows of it."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvstore._version import __version__
from kvstore.calls.fleet_records import FleetRecord
from kvstore.connectors.common.fleet import FleetRecords
from kvstore.console.dashboard.routes import FILES, NAMESPACES_SHOWN
from kvstore.limits import FLEET_NAMESPACE
from kvstore.security.credentials import Credentials
from tests.integration.test_high_availability import HaCluster
from tests.support.accessibility import barriers
from tests.support.browser import DESK, PHONE, TABLET, Browser, browsing
from tests.support.certificates import Identities
from tests.support.cluster import Cluster
from tests.support.etcd import running
from tests.support.http import request
from tests.support.processes import free_port
from tests.support.wait import until

VIEWS = ("overview", "nodes", "prefixes", "namespaces", "misses", "events")
PATHS = ("/", "/api/v1/status", "/api/v1/history", "/api/v1/cluster-events", "/api/v1/fleet")

PRINTABLE = "".join(map(chr, range(32, 127)))
HOSTILE = {
    "<script>document.title='run'</script>": "<script>document.title='run'</script>",
    "\"'><img src=x onerror=document.title='run'>": "\"'><img src=x onerror=document.title='run'>",
    "<b>&lt;&#x202e;</b>": "<b>&lt;&#x202e;</b>",
    "right\u202eto\u2066left\u200f": "right\\u{202e}to\\u{2066}left\\u{200f}",
    "nothing\u200b\u00ad\ufeff\u3164": "nothing\\u{200b}\\u{ad}\\u{feff}\\u{3164}",
    "lines\n\r\t\x1b[31m\x00\u2028": "lines\\u{a}\\u{d}\\u{9}\\u{1b}[31m\\u{0}\\u{2028}",
    "back\\u{202e}": "back\\\\u{202e}",
    "a  b\u00a0c ": "a  b\\u{a0}c ",
    "שלום": "שלום",
    PRINTABLE: PRINTABLE.replace("\\", "\\\\"),
    "x" * 128: "x" * 128,
}
"""Namespaces, and how they are shown."""


class Reply(NamedTuple):
    status: int
    headers: Message
    text: str


def asked(port: int, path: str, *, method: str = "GET", host: str = "") -> Reply:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    if host:
        request.add_header("Host", host)
    try:
        with urllib.request.urlopen(request, timeout=20) as got:
            return Reply(got.status, got.headers, got.read().decode())
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.headers, error.read().decode())


def told(port: int, path: str) -> Any:
    reply = asked(port, path)
    assert reply.status == 200, reply.text
    return json.loads(reply.text)


def events(port: int) -> list[str]:
    return [event for _, _, event, _ in told(port, "/api/v1/cluster-events")["events"]]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A master and two nodes, with the times that they have by default."""
    settings = {"http_port": free_port(), "http_names": "kv.example.com, kv"}
    with Cluster(tmp_path, settings=settings) as cluster:
        cluster.start(2)
        yield cluster


# --- what is served -------------------------------------------------------------------------------


def test_the_page_and_its_files_allow_nothing_from_elsewhere(cluster: Cluster, port: int) -> None:
    for path in (*FILES, *PATHS):
        reply = asked(port, path)
        assert reply.status == 200, path
        policy = reply.headers["Content-Security-Policy"]
        for part in ("default-src 'none'", "script-src 'self'", "frame-ancestors 'none'"):
            assert part in policy
        assert "unsafe" not in policy
        assert reply.headers["X-Content-Type-Options"] == "nosniff"
        assert reply.headers["Referrer-Policy"] == "no-referrer"
        assert not [name for name in reply.headers if name.lower().startswith("access-control")]
    page = asked(port, "/").text
    assert "://" not in page.replace("http://www.w3.org/2000/svg", ""), "nothing from elsewhere"


@pytest.mark.parametrize("path", PATHS)
def test_only_known_names_and_only_reading(cluster: Cluster, port: int, path: str) -> None:
    for host in ("localhost", "10.0.0.7", f"[::1]:{port}", "kv.example.com:443", "KV"):
        assert asked(port, path, host=host).status == 200, host
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
        refused = asked(port, path, host=host) if host else asked(port, path, host=" ")
        assert refused.status in (400, 421), host
        if refused.status == 421:
            assert "--http-names" in refused.text
    assert asked(port, path, method="HEAD").text == ""
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert asked(port, path, method=method).status == 405
    assert asked(port, "/api/v1/events", host="evil.example").status == 421
    for open_path in ("/healthz", "/readyz", "/metrics"):
        assert asked(port, open_path, host="evil.example").status == 200


def test_the_status_is_that_of_the_client_and_bounded(cluster: Cluster, port: int) -> None:
    with cluster.client() as client:
        for number in range(NAMESPACES_SHOWN + 20):
            client.put("k", b"x" * (100 + number), namespace=f"n{number:04}")

    def whole() -> Any:
        found = told(port, "/api/v1/status")
        return found if found["counters"].get("stored_objects") == NAMESPACES_SHOWN + 20 else None

    found = until(whole)
    assert found["leads"]
    assert len(found["nodes"]) == 2
    assert found["nodes"][0]["transports"] == ["shm", "tcp"]
    assert found["nodes"][0]["version"] == __version__
    assert len(found["namespaces"]) == NAMESPACES_SHOWN
    assert found["namespaces"][0]["name"] == f"n{NAMESPACES_SHOWN + 19:04}"
    others = found["other_namespaces"]
    assert (others["namespaces"], others["objects"]) == (20, 20)
    assert others["size"] == sum(100 + number for number in range(20))
    assert found["problems"] == [] or "slow" in found["problems"][0]["text"]


def test_a_master_that_stands_by_says_who_leads(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        cluster = HaCluster(tmp_path, stack.enter_context(running(tmp_path / "etcd")))
        stack.callback(cluster.close)
        first = cluster.add_master()
        until(lambda: cluster.leader() == first)
        port = free_port()
        second = cluster.add_master(http_port=port)
        found = until(lambda: (found := told(port, "/api/v1/status"))["leader"] and found)
        assert not found["leads"]
        assert found["leader"] == first
        assert found["leader_page"] == f"http://127.0.0.1:{port}/"
        assert found["problems"] == []
        assert told(port, "/api/v1/history")["at_ms"] == []
        assert events(port)[-1] == "stands_by"
        browser = stack.enter_context(browsing())
        browser.open(port)
        until(lambda: first in browser.text("#standby"))
        assert browser.text("#problems") == "", "no verdict: the leader may see an alarm"
        link = browser.run("return document.querySelector('#standby a').href")
        assert link == found["leader_page"]
        cluster.masters[first].kill()
        cluster.another_leads(first)
        assert cluster.leader() == second
        until(lambda: events(port)[-1] == "leads")
        until(lambda: browser.text("#tiles") and not browser.text("#standby"))


# --- what a browser shows -------------------------------------------------------------------------


def test_a_browser_shows_a_cluster_and_asks_nobody_else(
    cluster: Cluster, port: int, browser: Browser
) -> None:
    with cluster.client(namespace="vllm/ab/p0") as client:
        for fingerprint, dtype in (("ab", "bfloat16"), ("cd", "float8")):
            described = {"dtype": dtype, "block": 16}
            FleetRecords(client, logging.getLogger("test")).announce(
                FleetRecord(
                    "vllm", ("/models/m",), fingerprint, (f"vllm/{fingerprint}/p0",), described
                )
            )
        client.put_chain(["a", "b"], [b"x" * 5000, b"y" * 5000])
        browser.open(port)
        until(lambda: "Hit ratio" in browser.text("#tiles"))
        until(lambda: client.match_prefix(["a", "b", "c"])
              and all("/s" in browser.texts(".reading")[each] for each in (1, 2)),
              within_s=40, every_s=0.5)  # fmt: skip
        assert browser.run("return document.querySelector('.chart path').getAttribute('d')")
    browser.view("nodes")
    until(lambda: len(browser.texts(".node")) == 2)
    for node in cluster.nodes:
        assert node.name in browser.text("#view-nodes")
    browser.view("namespaces")
    until(lambda: "they differ in dtype" in browser.text("#fleet"))
    assert '"float8"' in browser.text("#fleet")
    until(lambda: "vllm, m" in browser.text("#namespace-rows"))
    browser.view("events")
    until(lambda: "And 1 more." in browser.text("#event-rows summary"))
    assert len(browser.texts("#event-rows tr")) == 2
    assert "This master leads, epoch" in browser.texts("#event-rows summary")[-1]
    assert browser.text("#event-rows tr:last-child code") == ""
    browser.run("document.querySelector('#event-rows tr:last-child summary').click()")
    assert browser.text("#event-rows tr:last-child code").startswith("leads epoch=")
    asked_for = browser.requests()
    assert f"http://127.0.0.1:{port}/api/v1/fleet" in asked_for
    for address in asked_for:
        assert address.startswith((f"http://127.0.0.1:{port}/", "data:")), address
    assert browser.complaints() == []


def test_nothing_stands_in_the_way_of_a_keyboard_a_screen_reader_or_weak_eyes(
    cluster: Cluster, port: int, browser: Browser
) -> None:
    with cluster.client(namespace="vllm/ab/p0") as client:
        for fingerprint, dtype in (("ab", "bfloat16"), ("cd", "float8")):
            described: dict[str, Any] = {"dtype": dtype}
            FleetRecords(client, logging.getLogger("test")).announce(
                FleetRecord(
                    "vllm", ("/models/m",), fingerprint, (f"vllm/{fingerprint}/p0",), described
                )
            )
        for number in range(9):
            client.put_chain(["a", f"b{number}"], [b"x" * 500] * 2)
        client.match_prefix(["a", "b1", "c"])
        client.match_prefix(["no"], namespace="vllm/cd/p0")
    cluster.nodes[0].kill()
    until(lambda: "node_dead" in events(port))
    until(lambda: told(port, "/api/v1/fleet")["models"], within_s=20)
    filled = {
        "overview": ".tile", "nodes": ".node", "prefixes": ".branch", "namespaces": "#fleet th",
        "misses": "#why-causes li", "events": "#event-rows tr",
    }  # fmt: skip
    found = {}

    def look(*where: object) -> None:
        browser.run("for (const e of document.querySelectorAll('details')) e.open = true")
        found[where] = barriers(browser)

    for theme in ("light", "dark"):
        browser.theme(theme)
        for size in (PHONE, TABLET, DESK):
            for view, selector in filled.items():
                browser.driver.get("about:blank")
                browser.open(port, view, size=size)
                until(partial(browser.texts, selector))
                look(theme, size, view)
            browser.view("prefixes")
            until(partial(browser.texts, ".branch"))
            browser.run("document.querySelector('.branch').click()")
            until(partial(browser.texts, "#branch-blocks td"))
            look(theme, size, "a branch")
            browser.driver.get(f"http://127.0.0.1:{port}/runbook")
            look(theme, size, "runbook")
    assert {where: what for where, what in found.items() if what} == {}


def test_tenants_are_shown_with_their_quotas(tmp_path: Path, browser: Browser) -> None:
    port, file = free_port(), tmp_path / "tenants.toml"
    file.write_text(
        '[acme]\nnamespaces = ["acme/*"]\nguarantee = "4MiB"\nlimit = "8MiB"\npin_limit = "1MiB"\n'
    )
    settings = {"http_port": port, "tenants": str(file)}
    with Cluster(tmp_path, settings=settings) as cluster:
        cluster.start()
        with cluster.client() as client:
            for number in range(80):
                client.put(f"{number}", b"x" * (1 << 17), namespace="acme/chat")
            client.put("k", b"x", namespace="other")

        def tenants() -> dict[str, Any]:
            return {row["name"]: row for row in told(port, "/api/v1/status")["tenants"]}

        until(lambda: tenants()["acme"]["evicted_by_own"])
        found = tenants()
        assert found["acme"]["limit_bytes"] == 8 << 20
        assert found["acme"]["namespaces"] == ["acme/*"]
        browser.open(port, "namespaces")
        until(lambda: browser.texts("#tenant-rows td.warning"))
        rows = browser.run(
            "return [...document.querySelectorAll('#tenant-rows tr')]"
            ".map((row) => [...row.cells].map((cell) => cell.textContent))"
        )
        by_name = {row[0]: row for row in rows}
        assert by_name["acme"][1] == "acme/*"
        assert by_name["acme"][3:7] == ["4.00 MiB", "8.00 MiB", "0 B", "0 B of 1.00 MiB"]
        assert int(by_name["acme"][8]) >= 4
        browser.open(port, "namespaces", size=PHONE)
        until(lambda: browser.texts("#tenant-rows td.warning"))
        place = "document.querySelector('#tenants .wide')"
        assert browser.run(f"return {place}.scrollWidth <= {place}.clientWidth")
        assert by_name["all others"][7] == "1"
        assert barriers(browser) == []
        assert browser.complaints() == []


def test_a_killed_node_is_shown_within_three_seconds(
    cluster: Cluster, port: int, browser: Browser
) -> None:
    browser.open(port)
    until(lambda: "Hit ratio" in browser.text("#tiles"))
    node = cluster.nodes[0]
    node.kill()
    killed = time.monotonic()
    until(lambda: f"Node {node.name}" in browser.text("#problems"), within_s=3.0)
    took_s = time.monotonic() - killed
    assert took_s < 3.0
    assert "suspect" in browser.text("#problems")
    assert browser.driver.title.startswith("(1) ")
    browser.run("document.querySelector('#problems a:not([hidden])').click()")
    until(lambda: browser.run("return location.hash") == "#kvstorenodesuspect")
    assert browser.text(":target") == "KvstoreNodeSuspect"
    assert barriers(browser) == []
    browser.open(port)
    browser.view("events")
    until(lambda: "is dead" in browser.text("#event-rows"))


def test_hostile_names_are_shown_and_never_run(
    cluster: Cluster, port: int, browser: Browser
) -> None:
    record = {
        "format": 1, "engine": "<img src=x onerror=document.title='run'>", "fingerprint": "\u202ef",
        "models": ["<script>document.title='run'</script>\u202e"],
        "namespaces": list(HOSTILE), "description": {"<b>\u202e": "</td><script>"},
    }  # fmt: skip
    with cluster.client() as client:
        for name in HOSTILE:
            client.put("k", b"x", namespace=name)
        for key, more in ((b"1", {}), (b"2", {"description": {"__proto__": 1}})):
            client.put(key, json.dumps(record | more).encode(), namespace=FLEET_NAMESPACE)
        client.put(b"3", b"\xff no record", namespace=FLEET_NAMESPACE)
    browser.open(port, "namespaces")
    until(lambda: set(HOSTILE.values()) <= set(browser.texts("#namespace-rows td:first-child")))
    until(lambda: "share no block" in browser.text("#fleet"))
    assert "<b>\\u{202e}" in browser.text("#fleet")
    for size in (PHONE, (320, 600), (1280, 900)):
        browser.open(port, "namespaces", size=size)
        for view in VIEWS:
            browser.view(view)
            until(lambda: browser.text("h1"))
            time.sleep(0.3)
            wide, window = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
            assert wide <= window, (view, size)
    assert browser.driver.title.startswith(("kvstore", "("))
    assert "run" not in browser.driver.title
    made = "return document.querySelectorAll('main script, main img, main b:not(.tile b)').length"
    assert browser.run(made) == 0
    assert browser.complaints() == []


def test_a_page_that_is_open_says_that_the_master_is_gone_and_goes_on(
    cluster: Cluster, port: int, browser: Browser
) -> None:
    browser.open(port)
    until(lambda: "Hit ratio" in browser.text("#tiles"))
    cluster.master_server.kill()
    until(lambda: "does not respond" in browser.text("#lost"))
    cluster.master()
    until(lambda: not browser.text("#lost"), within_s=30)
    until(lambda: "2 alive" in browser.text("#tiles"), within_s=30)


# --- with authentication required ----------------------------------------------------------------


@pytest.mark.slow
def test_an_observer_sees_the_page_and_its_numbers(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    port = free_port()
    settings = {"http_port": port, "events": "on"}
    with Cluster(tmp_path, settings=settings, identities=identities) as cluster:
        cluster.start()
        cluster.client(namespace="ours").put("k", b"v")

        def asked_as(who: str, path: str) -> int:
            return request(port, "GET", path, tls=Credentials(identities.file(who)).client()).status

        for path in (*FILES, "/metrics"):
            assert asked_as("observer", path) == 200, path
        for path in PATHS:
            assert asked_as("observer", path) == 200, path
        keys = ("/api/v1/chains?namespace=ours", "/api/v1/blocks?namespace=ours&key=6b")
        for path in keys:
            assert asked_as("observer", path) == 403, path
            assert asked_as("admin", path) == 200, path
        assert asked_as("observer", "/api/v1/events") == 403, "they name the key of each object"
