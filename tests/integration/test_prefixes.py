"""The view of prefixes, and what it asks: real masters and nodes, and a real browser."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.client.client import Client
from kvstore.console.api.chains import BLOCKS_PATH, CHAINS_PATH
from kvstore.runtime.formatting import key_text
from tests.integration.test_dashboard import told
from tests.support.browser import Browser
from tests.support.cluster import Cluster
from tests.support.processes import free_port
from tests.support.wait import until

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
    assert answer["complete"]
    assert (trunk["above"], often["above"], once["above"]) == (0, 1, 1)
    assert (trunk["first"], trunk["last"]) == (key_text(SYSTEM[0]), key_text(SYSTEM[-1]))
    assert (trunk["matched"], trunk["matches_ended"], trunk["children"]) == (6, 0, 2)
    assert (often["matched"], often["size"]) == (5, 200)
    assert trunk["nodes"] == {cluster.nodes[0].name: 4}

    of_one = told(port, query(CHAINS_PATH, namespace="chat", key=FIRST[0].hex()))
    assert [row["blocks"] for row in of_one["branches"]] == [4, 1]

    blocks = told(port, query(BLOCKS_PATH, namespace="chat", key=FIRST[1].hex(), above="3"))
    assert [each["key"] for each in blocks["blocks"]] == [
        key.hex() for key in (FIRST[1], FIRST[0], SYSTEM[3], SYSTEM[2])
    ]
    assert blocks["blocks"][0]["nodes"] == [cluster.nodes[0].name]


# --- what a browser shows -------------------------------------------------------------------------


def test_a_browser_drills_down_from_a_namespace_to_its_blocks(
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
            "return [...document.querySelectorAll('#chains li')].map((e) => e.style.marginLeft[5])"
        )
        assert levels == ["0", "1", "1"]
        # Everything can be done with the keyboard.
        browser.run("document.querySelector('#chains .branch').focus()")
        assert browser.run("return document.activeElement.className") == "branch"
        browser.run("document.activeElement.click()")
        until(lambda: len(browser.texts("#branch-blocks tbody tr")) == 4)
        assert key_text(SYSTEM[3]) in browser.texts("#branch-blocks tbody tr")[0]
        assert cluster.nodes[0].name in browser.texts("#branch-blocks tbody tr")[0]
        browser.run("document.querySelector('#branch-close').click()")
        until(lambda: not browser.text("#branch"))
    assert browser.complaints() == []
