"""The view of prefixes, and what it asks: real masters and nodes, and a real browser."""

from __future__ import annotations

import json
import logging
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.client.sync import Client
from kvstore.connectors.engine.fleet import FleetRecords
from kvstore.fleet import Record
from kvstore.texts import key_text
from kvstore.web.api.chains import BLOCKS_PATH, CHAINS_PATH, FIND_PATH
from kvstore.web.server.endpoints import PATH as OPENAPI_PATH
from tests.integration.test_api import post
from tests.integration.test_dashboard import HOSTILE, asked, told
from tests.support.browser import PHONE, Browser
from tests.support.cluster import Cluster
from tests.support.processes import free_port
from tests.support.waiting import until

SYSTEM = [b"system %d" % number for number in range(4)]
FIRST = [b"first %d" % number for number in range(3)]
SECOND = [b"second %d" % number for number in range(2)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    settings = {"http_port": free_port(), "http_names": "kv.example.com"}
    with Cluster(tmp_path, settings=settings) as cluster:
        cluster.start(1)
        yield cluster


def converse(client: Client, namespace: str = "chat") -> None:
    """Two conversations with one system prompt, the second of which is matched more often."""
    for turns in (FIRST, SECOND):
        chain = [*SYSTEM, *turns]
        client.put_chain(chain, [b"x" * 100] * len(chain), namespace=namespace)
    client.match_prefix([*SYSTEM, *FIRST], namespace=namespace)
    for _ in range(5):
        client.match_prefix([*SYSTEM, *SECOND], namespace=namespace)


def query(path: str, **values: str) -> str:
    return f"{path}?{urllib.parse.urlencode(values)}"


# --- for programs ---------------------------------------------------------------------------------


def test_two_conversations_branch_after_their_system_prompt(cluster: Cluster, port: int) -> None:
    with cluster.client() as client:
        converse(client)
        found = client.chains("chat")
        assert client.chains(None).branches
    assert [row.blocks for row in found.branches] == [4, 2, 3]

    answer = told(port, query(CHAINS_PATH, namespace="chat"))
    trunk, often, once = answer["branches"]
    assert answer["whole"]
    assert (trunk["above"], often["above"], once["above"]) == (0, 1, 1)
    assert (trunk["first"], trunk["last"]) == (key_text(SYSTEM[0]), key_text(SYSTEM[-1]))
    assert (trunk["matched"], trunk["ended"], trunk["children"]) == (6, 0, 2)
    assert (often["matched"], often["size"]) == (5, 200)
    assert trunk["nodes"] == {cluster.nodes[0].name: 4}

    of_one = told(port, query(CHAINS_PATH, namespace="chat", key=FIRST[0].hex()))
    assert [row["blocks"] for row in of_one["branches"]] == [4, 1]

    blocks = told(port, query(BLOCKS_PATH, namespace="chat", key=FIRST[1].hex(), above="3"))
    assert [each["key"] for each in blocks["blocks"]] == [
        key.hex() for key in (FIRST[1], FIRST[0], SYSTEM[3], SYSTEM[2])
    ]
    assert blocks["blocks"][0]["nodes"] == [cluster.nodes[0].name]


def test_pasted_keys_are_found_as_hexadecimal_and_as_text(cluster: Cluster, port: int) -> None:
    keys = [bytes([number]) * 32 for number in range(1, 13)]
    with cluster.client() as client:
        client.put_chain(keys[:7], [b"x"] * 7, namespace="hashes")
        client.put_chain(["ab", "cd"], [b"x"] * 2, namespace="words")
        before = {row.name: row.value for row in client.status().counters}
        for text in (
            ",".join(key.hex() for key in keys),
            json.dumps([f"0x{key.hex()}" for key in keys]),
            "\n".join(key_text(key) for key in keys),
        ):
            status, answer = post(port, FIND_PATH, {"text": text})
            assert status == 200
            [found] = answer["found_in"]
            assert (answer["keys"], found["namespace"]) == (12, "hashes")
            assert (found["found"], found["leading"], found["chain"]) == (7, 7, True)
            assert [each["state"] for each in found["blocks"]] == ["complete"] * 7 + ["absent"] * 5
            assert found["blocks"][0]["nodes"] == [cluster.nodes[0].name]
        [found] = post(port, FIND_PATH, {"text": "ab cd ef", "namespaces": ["words", "none"]})[1][
            "found_in"
        ]
        assert (found["namespace"], found["leading"]) == ("words", 2)
        after = {row.name: row.value for row in client.status().counters}
    for name in ("matched_objects", "missed_objects"):
        assert before.get(name) == after.get(name), "it is neither a match nor a miss"


def test_wrong_questions_are_refused(cluster: Cluster, port: int) -> None:
    for bad in (
        query(CHAINS_PATH, key="xyz"),
        query(CHAINS_PATH, key="ab"),  # in which namespace?
        query(CHAINS_PATH, count="129"),
        query(CHAINS_PATH, count="-1"),
        query(CHAINS_PATH, namespace="x" * 129),
        query(BLOCKS_PATH, key="ab", above="257"),
        BLOCKS_PATH + "?" + "&".join(["key=ab"] * 257),
    ):
        assert asked(port, bad).status == 400, bad
    for text in ("", "[1]", "[", "  ,, ", "0xzz", "g" * 300, "ab " * 1025):
        assert post(port, FIND_PATH, {"text": text})[0] == 400, text
    assert post(port, FIND_PATH, {"text": "ab"}, kind="text/plain")[0] == 400
    for path in (CHAINS_PATH, BLOCKS_PATH):
        assert asked(port, path, host="evil.example").status == 421
        assert asked(port, path, method="POST").status == 405
    assert post(port, FIND_PATH, {"text": "ab"}, host="evil.example")[0] == 421


def test_the_paths_are_described(cluster: Cluster, port: int) -> None:
    paths = told(port, OPENAPI_PATH)["paths"]
    for path in (CHAINS_PATH, BLOCKS_PATH, FIND_PATH):
        [(_, described)] = paths[path].items()
        assert {"200", "400", "503"} <= set(described["responses"])


# --- what a browser shows -------------------------------------------------------------------------


def test_a_browser_drills_down_from_a_namespace_to_a_block(
    cluster: Cluster, port: int, browser: Browser
) -> None:
    with cluster.client() as client:
        converse(client)
        client.put("alone", b"x", namespace="other")
        browser.open(port, "prefixes")
        until(lambda: len(browser.texts("#chains .branch")) == 4)
        until(lambda: "chat" in "".join(browser.texts("#chains-of option")))
        browser.run(
            "const s = document.querySelector('#chains-of'); s.value = 'chat';"
            "s.dispatchEvent(new Event('change'))"
        )
        until(lambda: len(browser.texts("#chains .branch")) == 3)
        rows = browser.texts("#chains li")
        assert "4 blocks" in rows[0]
        assert "matched 6 times" in rows[0]
        assert "matched 5 times" in rows[1]
        levels = browser.run(
            "return [...document.querySelectorAll('#chains li')].map((e) => e.className)"
        )
        assert levels == ["level0", "level1", "level1"]
        # Everything can be done with the keyboard.
        browser.run("document.querySelector('#chains .branch').focus()")
        assert browser.run("return document.activeElement.className") == "branch"
        browser.run("document.activeElement.click()")
        until(lambda: len(browser.texts("#branch-blocks tbody tr")) == 4)
        assert key_text(SYSTEM[3]) in browser.texts("#branch-blocks tbody tr")[0]
        browser.run("document.querySelector('#branch-blocks button').click()")
        until(lambda: "version" in browser.text("#block-text"))
        assert cluster.nodes[0].name in browser.text("#block-text")
        browser.run("document.querySelector('#branch-close').click()")
        until(lambda: not browser.text("#branch"))
    assert browser.complaints() == []


def test_chains_fold_below_their_namespaces(cluster: Cluster, port: int, browser: Browser) -> None:
    with cluster.client() as client:
        for space in range(25):
            for number in range(9 if space < 4 else 1):
                chain = ["system", f"{number} a", f"{number} b"]
                client.put_chain(chain, [b"x"] * 3, namespace=f"space {space}")
        for number in range(7):
            client.put(f"alone {number}", b"x", namespace="space 0")
        record = Record("vllm", ("/models/m",), "ab", ("space 0",), {})
        FleetRecords(client, logging.getLogger("test")).announce(record)
    until(lambda: told(port, "/api/v1/fleet")["models"], within_s=20)

    def shown(selector: str) -> int:
        script = "return document.querySelectorAll(arguments[0]).length"
        return int(browser.run(script, selector))

    def click(selector: str) -> None:
        browser.run("document.querySelector(arguments[0]).click()", selector)

    browser.open(port, "prefixes")
    until(lambda: shown(".space") == 20)
    assert browser.text("#chains-more") == "Show 6 more namespaces"
    assert shown(".space h2 [aria-expanded=true]") == 3
    assert browser.run("return document.documentElement.scrollHeight") < 3000
    click("#chains-more")
    assert shown(".space") == 26
    browser.run(
        "const s = document.querySelector('#chains-of'); s.value = 'space 0';"
        "s.dispatchEvent(new Event('change'))"
    )
    until(lambda: shown(".space") == 1 and browser.text(".space h2"))
    until(lambda: "vllm, m" in browser.text(".space h2"))
    assert shown(".branch:not([hidden])") == 4, "of 8 chains"
    assert shown(".level1") == 0
    click("li .more:not([hidden])")
    assert shown(".branch:not([hidden])") == 8
    fold = "button.fold:not([hidden])"
    assert browser.run(f"return document.querySelector('{fold}').ariaLabel").startswith("9 cont")
    click(fold)
    assert shown(".level1") == 9
    browser.requests()
    for _ in range(2):  # when the second question leaves, the first has been answered and shown
        until(lambda: any(CHAINS_PATH in each for each in browser.requests()))
    assert shown(".level1") == 9, "what is open stays open"
    click(fold)
    assert shown(".level1") == 0
    assert browser.complaints() == []


def test_a_browser_finds_pasted_keys(cluster: Cluster, port: int, browser: Browser) -> None:
    keys = [bytes([number]) * 32 for number in range(1, 13)]
    with cluster.client() as client:
        client.put_chain(keys[:7], [b"x"] * 7, namespace="hashes")
    browser.open(port, "prefixes")

    def paste(text: str) -> None:
        browser.run(
            "document.querySelector('#find-text').value = arguments[0];"
            "document.querySelector('#find button').click()",
            text,
        )

    until(lambda: "hashes" in "".join(browser.texts("#chains-of option")))
    paste(" ".join(key.hex() for key in keys))
    until(lambda: "7 of 12 blocks are there" in browser.text("#find-found"))
    assert "number 8" in browser.text("#find-found")
    assert cluster.nodes[0].name in browser.text("#find-found")
    browser.run("document.querySelector('#find-found summary').click()")
    browser.run("document.querySelector('#find-found .block').click()")
    until(lambda: "version" in browser.text("#block-text"))
    browser.run("document.querySelector('#branch-close').click()")
    paste("ffff")
    until(lambda: "None of 1 block is there" in browser.text("#find-note"))
    paste("<script>")
    until(lambda: "None of 1 block" in browser.text("#find-note"))
    paste("[")
    until(lambda: "JSON" in browser.text("#find-note"))
    unwanted = [each for each in browser.complaints() if "400" not in each]
    assert unwanted == []


def test_hostile_keys_and_namespaces_are_shown_and_never_run(
    cluster: Cluster, port: int, browser: Browser
) -> None:
    keys: list[Any] = [
        *HOSTILE, *(bytes([byte]) for byte in range(256)), b"\xff<script>", b"x" * 256,
    ]  # fmt: skip
    keys = [each[:60] if isinstance(each, str) else each for each in keys]
    keys = list(dict.fromkeys(each.encode() if isinstance(each, str) else each for each in keys))
    with cluster.client() as client:
        for name in HOSTILE:
            client.put_chain(["k1", name[:60] + "!"], [b"x", b"x"], namespace=name)
        client.put_chain(keys, [b"x"] * len(keys), namespace="keys")
        client.match_prefix(keys, namespace="keys")
        client.match_prefix(keys[:5], namespace="keys")
    for size in (PHONE, (320, 600), (1280, 900)):
        browser.open(port, "prefixes", size=size)
        until(lambda: len(browser.texts("#chains .space")) > len(HOSTILE))
        browser.run(
            "for (const head of document.querySelectorAll('.space [aria-expanded=false]')) "
            "head.click()"
        )
        shown = "".join(browser.texts("#chains :is(bdi, .name)"))
        assert "\u202e" not in shown
        assert "\\u{202e}" in shown
        browser.run(
            "[...document.querySelectorAll('#chains .space')]"
            ".find((e) => e.querySelector('bdi').textContent === 'keys')"
            ".querySelector('.branch').click()"
        )
        until(lambda: browser.texts("#branch-blocks tbody tr"))
        wide, window = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window, size
        browser.run("document.querySelector('#branch').close()")
        wide, window = browser.run("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window, size
    assert "run" not in browser.driver.title
    assert browser.run("return document.querySelectorAll('main script, main img').length") == 0
    assert browser.complaints() == []
