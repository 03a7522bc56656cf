"""The view of misses, and what it asks: why nothing is found, who puts and asks, evictions."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import Client
from kvstore.calls.fleet_records import FleetRecord
from kvstore.connectors.common.fleet import FleetRecords
from kvstore.console.api.diagnostics import TRAFFIC_PATH, WHY_PATH
from kvstore.http.operations import PATH as OPENAPI_PATH
from kvstore.limits import FLEET_NAMESPACE
from kvstore.security.credentials import Credentials
from tests.integration.test_dashboard import asked, told
from tests.support.browser import Browser
from tests.support.certificates import Identities
from tests.support.cluster import Cluster
from tests.support.http import request
from tests.support.processes import free_port
from tests.support.wait import until

BLOCKS = [bytes([number]) * 32 for number in range(1, 9)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings={"http_port": free_port()}) as cluster:
        cluster.start(1)
        yield cluster


def announce(client: Client, fingerprint: str, **described: object) -> str:
    """Puts the record of an engine. Returns its namespace."""
    space = f"vllm/{fingerprint}/p0"
    record = FleetRecord("vllm", ("/models/m",), fingerprint, (space,), described)
    FleetRecords(client, logging.getLogger("test")).announce(record)
    return space


def apart(cluster: Cluster) -> tuple[str, str]:
    """Two engines of a model that share no block: the namespaces of the one that puts, and of the
    one that asks."""
    writer, asker = cluster.client(name="prefill-1"), cluster.client(name="decode-1")
    here = announce(writer, "aaaaaaaa", dtype="bfloat16")
    there = announce(asker, "bbbbbbbb", dtype="float16")
    writer.put_chain(BLOCKS, [b"x"] * len(BLOCKS), namespace=here)
    assert asker.match_prefix(BLOCKS, namespace=there) == 0
    return here, there


def test_the_answers_are_those_of_the_command_and_described(cluster: Cluster, port: int) -> None:
    here, there = apart(cluster)
    for query in ("", f"?namespace={there}", "?model=m"):
        found = told(port, WHY_PATH + query)
        (cause, *_) = found["causes"]
        assert cause["code"] == "other_fingerprint"
        assert cause["fields"] == ["dtype: bfloat16 writes, float16 reads"]
        (party,) = [each for each in found["groups"] if there in each["namespaces"]]
        assert [row["client"] for row in party["readers"]] == ["decode-1"]
        assert party["missed"]["text"].startswith("hex:0101")
        assert found["notes"] == []
    assert asked(port, f"{WHY_PATH}?namespace=nowhere").status == 404
    assert asked(port, f"{WHY_PATH}?namespace=a&model=m").status == 400
    traffic = told(port, TRAFFIC_PATH)
    counted = ("put", "put_bytes", "queries", "found")
    rows = {row["client"]: [row[each] for each in counted] for row in traffic["engines"]}
    assert rows["prefill-1"] == [8, 8, 0, 0]
    assert rows["decode-1"] == [0, 0, 8, 0]
    none = {row["name"]: row["queries_without_hit"] for row in traffic["namespaces"]}
    assert (none[here], none[there]) == (0, 1)
    assert FLEET_NAMESPACE not in none
    paths = told(port, OPENAPI_PATH)["paths"]
    assert {"200", "503"} <= set(paths[TRAFFIC_PATH]["get"]["responses"])
    assert "404" in paths[WHY_PATH]["get"]["responses"]


def test_a_browser_says_why_and_who(cluster: Cluster, port: int, browser: Browser) -> None:
    with cluster.client(name="filler") as client:
        for number in range(80):  # of 32 MiB
            client.put(f"{number}", b"x" * (1 << 20), namespace="full")
    _, there = apart(cluster)
    until(lambda: told(port, "/api/v1/fleet")["models"], within_s=20)
    browser.open(port, "misses")
    until(lambda: "dtype: bfloat16 writes, float16 reads" in browser.text("#why-causes"))
    assert "start both with the same --dtype" in browser.text("#why-causes")
    browser.run("document.querySelector('#why-seen summary').click()")
    assert "decode-1" in browser.text("#why-groups")
    until(lambda: "prefill-1" in browser.text("#engine-rows"))
    full = until(lambda: [row for row in browser.texts("#eviction-rows tr") if "full" in row])
    assert "full0" not in full[0], "objects of it were evicted"
    until(lambda: there in "".join(browser.texts("#why-of option")))
    browser.run(
        "const s = document.querySelector('#why-of'); s.value = arguments[0];"
        "s.dispatchEvent(new Event('change'))",
        "full",
    )
    until(lambda: "no client looks up keys" in browser.text("#why-causes"))
    assert browser.complaints() == []


@pytest.mark.slow
def test_the_answers_have_the_rights_of_the_request(tmp_path: Path) -> None:
    identities = Identities(tmp_path)
    identities.engine("ours", "ours", FLEET_NAMESPACE)
    port = free_port()
    with Cluster(tmp_path, settings={"http_port": port}, identities=identities) as cluster:
        cluster.start()
        client = cluster.client(name="engine")
        client.put("k", b"v", namespace="theirs")
        assert client.match_prefix(["k"], namespace="ours") == 0

        def asked_as(who: str, path: str) -> tuple[int, Any]:
            found = request(port, "GET", path, tls=Credentials(identities.file(who)).client())
            return found.status, json.loads(found.text) if found.status == 200 else found.text

        for path in (WHY_PATH, TRAFFIC_PATH):
            assert asked_as("observer", path)[0] == 403
            assert asked_as("ours", path)[0] == 403
            assert asked_as("ours", f"{path}?namespace=theirs")[0] == 403
            assert asked_as("admin", path)[0] == 200
        status, found = asked_as("ours", f"{WHY_PATH}?namespace=ours")
        assert status == 200
        assert [party["name"] for party in found["groups"]] == ["ours"]
        assert "theirs" not in json.dumps(found), "where the key is, is a secret of others"
        assert any("admin" in note for note in found["notes"])
        assert "theirs" in json.dumps(asked_as("admin", f"{WHY_PATH}?namespace=ours")[1])
        status, found = asked_as("ours", f"{TRAFFIC_PATH}?namespace=ours")
        assert [row["name"] for row in found["namespaces"]] == ["ours"]
