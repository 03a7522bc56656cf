"""``kvstore why`` on a real store: engines whose blocks never meet, and what the command says."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.calls.fleet_records import FleetRecord
from kvstore.connectors.common.fingerprint import fingerprint
from kvstore.connectors.common.fleet import FleetRecords
from tests.support.cluster import SHORT, Cluster
from tests.support.processes import KVSTORE, run_python
from tests.support.wait import until

MODEL = "/models/Llama-3.1-8B"
BLOCKS = [bytes([number]) * 32 for number in range(16)]
LOG = logging.getLogger(__name__)
VALUES = [b"v" * 1_000] * len(BLOCKS)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SHORT) as cluster:
        yield cluster


class Engine:
    """A client that announces itself and names its namespace as adapters of engines do."""

    def __init__(self, client: Client, **described: object) -> None:
        self.client = client
        self.description = {"format": 1, "weights": "files 1a", "block_tokens": 16, **described}
        self.fingerprint = fingerprint(self.description)
        self.namespace = f"vllm/{self.fingerprint}/0"
        self.announce()

    def announce(self) -> None:
        FleetRecords(self.client, LOG).announce(
            FleetRecord("vllm", (MODEL,), self.fingerprint, (self.namespace,), self.description)
        )

    def put(self) -> None:
        self.client.put_chain(BLOCKS, VALUES, namespace=self.namespace)

    def ask(self) -> int:
        return self.client.match_prefix(BLOCKS, namespace=self.namespace)


def why(cluster: Cluster, *arguments: str, code: int = 1) -> str:
    done = run_python(
        *KVSTORE,
        "--master",
        cluster.address,
        "why",
        *arguments,
        variables={"PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def codes(cluster: Cluster, *arguments: str, code: int = 1) -> list[str]:
    return [
        cause["code"]
        for cause in json.loads(why(cluster, "--json", *arguments, code=code))["causes"]
    ]


@pytest.mark.parametrize("lane", [True, False], ids=["lane", "grpc"])
def test_the_field_in_which_two_engines_differ_is_named(cluster: Cluster, lane: bool) -> None:
    cluster.start()
    prefill = Engine(cluster.client(name="prefill-1", lane=lane), dtype="bfloat16")
    decode = Engine(cluster.client(name="decode-1", lane=lane), dtype="float16")
    prefill.put()
    assert decode.ask() == 0

    for asked in (["--model", MODEL], ["--model", "Llama-3.1-8B"], [decode.namespace]):
        shown = why(cluster, *asked)
        assert "prefill-1 writes Llama-3.1-8B" in shown
        assert "decode-1 reads under" in shown
        assert "dtype: bfloat16 writes, float16 reads" in shown
        assert "block_tokens:" not in shown

    cluster.master_server.process.send_signal(signal.SIGKILL)
    cluster.master_server.wait()
    cluster.master()
    until(lambda: any(row.objects for row in cluster.status().namespaces))

    assert codes(cluster, "--model", MODEL, code=0) == ["no_traffic", "no_traffic"]
    assert decode.ask() == 0
    assert "dtype: bfloat16 writes, float16 reads" in why(cluster, "--model", MODEL)
    assert prefill.ask() == len(BLOCKS)
    assert "fine" in codes(cluster, prefill.namespace, code=0)
