"""``kvstore why`` on a real store: engines whose blocks never meet, and what the command says."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import AsyncClient, Client, calls
from kvstore.client.calling.stub import MasterStub
from kvstore.clocks import uptime
from kvstore.connectors.engine.fleet import FleetRecords
from kvstore.fingerprint import fingerprint
from kvstore.fleet import Record
from kvstore.limits import Key, Namespace
from kvstore.master.carriers import Endpoints
from kvstore.wire.frames import CALL, frame
from kvstore.wire.messages import encode_request
from tests.conformance.carrier_peers import RawLane
from tests.support.cluster import SHORT, Cluster
from tests.support.processes import KVSTORE, run_python
from tests.support.waiting import until

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
            Record("vllm", (MODEL,), self.fingerprint, (self.namespace,), self.description)
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
        assert "decode-1 asks under" in shown
        assert "dtype: bfloat16 writes, float16 asks" in shown
        assert "block_tokens:" not in shown

    cluster.master_server.process.send_signal(signal.SIGKILL)
    cluster.master_server.wait()
    cluster.master()
    until(lambda: any(row.objects for row in cluster.status().namespaces))

    assert codes(cluster, "--model", MODEL, code=0) == ["no_traffic", "no_traffic"]
    assert decode.ask() == 0
    assert "dtype: bfloat16 writes, float16 asks" in why(cluster, "--model", MODEL)
    assert prefill.ask() == len(BLOCKS)
    assert "fine" in codes(cluster, prefill.namespace, code=0)


def test_what_works_says_so_and_what_is_asked_by_the_command_is_no_traffic(
    cluster: Cluster,
) -> None:
    cluster.start()
    engine = Engine(cluster.client(name="both-1"))
    engine.put()
    assert engine.ask() == len(BLOCKS)
    before = cluster.client().traffic(engine.namespace)
    for _ in range(2):
        assert codes(cluster, "--model", MODEL, code=0) == ["fine"]
    after = cluster.client().traffic(engine.namespace)
    (one,), (other,) = before.namespaces, after.namespaces
    assert (one.questions, one.objects) == (other.questions, other.objects) == (1, 16)
    (putter,) = one.putters
    assert (putter.client, putter.address, putter.stored) == ("both-1", "local", 16)


def test_other_keys_and_other_namespaces_are_told_apart(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client(name="one")
    client.put_chain(BLOCKS, VALUES, namespace="here")
    client.match_prefix([b"\xff" + key[1:] for key in BLOCKS], namespace="here")
    assert codes(cluster, "here") == ["other_keys"]
    client.match_prefix(BLOCKS, namespace="there")
    assert codes(cluster, "there") == ["other_namespace"]
    assert "is stored in here" in why(cluster, "there")


def test_what_was_evicted_before_it_was_asked_for(cluster: Cluster) -> None:
    cluster.start(memory="8MiB")
    client = cluster.client(name="one")
    for number in range(40):
        client.put(f"k{number}", bytes(1 << 20), namespace="n", wait_ms=5_000)
    assert client.get("k0", namespace="n") is None
    shown = why(cluster, "n")
    assert "of n evicted" in shown
    assert "kvstore-node --memory" in shown


def test_a_pool_that_is_too_small_is_named_while_other_objects_are_left(cluster: Cluster) -> None:
    """Some chains were evicted, others are there: the pool is too small, no key differs."""
    cluster.start(memory="16MiB")
    writer = cluster.client(name="engine-a")
    chains = [[b"%2d/%d" % (chain, at) + b"." * 28 for at in range(4)] for chain in range(12)]
    for chain in chains:
        writer.put_chain(chain, [bytes(640 << 10)] * 4, namespace="agents", wait_ms=5_000)
    asker = cluster.client(name="engine-b")
    for chain in chains[:4]:
        assert asker.match_prefix(chain, namespace="agents") == 0

    shown = " ".join(why(cluster, "agents").split())

    assert "what engine-b asked for had been evicted before" in shown
    assert "PYTHONHASHSEED" not in shown
    (row,) = cluster.client().traffic("agents").namespaces
    assert f"{row.evicted} objects of agents evicted, {row.objects} left" in shown
    assert row.objects > 0

    asker.match_prefix([b"other" + key for key in chains[0]], namespace="agents")
    assert codes(cluster, "agents") == [
        "evicted" if row.evicted > row.objects else "perhaps_evicted"
    ]


def test_without_a_node_and_without_a_name(cluster: Cluster) -> None:
    cluster.master()
    assert codes(cluster) == ["no_node"]
    cluster.node()
    assert codes(cluster, "unknown", code=3) == []


def test_no_byte_of_a_stranger_reaches_the_terminal(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client(name="one")
    for number in range(256):
        namespace = f"\x1b[2J{chr(number)}\x07\r\n{number}"
        client.put(bytes([number]) + b"\x1b[31m", b"1", namespace=namespace)
        client.exists(bytes([number, 0x1B, 0x9B]), namespace=namespace)
        if number in (1, 27, 155):
            assert why(cluster, namespace).replace("\n", "").isprintable()
    for arguments in ([], ["--json"]):
        assert why(cluster, *arguments).replace("\n", "").isprintable()


def test_an_async_client_asks_the_same(cluster: Cluster) -> None:
    async def ask() -> None:
        async with AsyncClient(cluster.address, name="async-1") as client:
            await client.put("k", b"1", namespace="n")
            (row,) = (await client.traffic("n")).namespaces
            assert [each.client for each in row.putters] == ["async-1"]
            assert (await client.traffic("unknown")).namespaces == []

    cluster.start()
    asyncio.run(ask())


def test_a_client_of_the_release_before_is_known_by_its_name(cluster: Cluster) -> None:
    """It returns the token that it got, whatever is in it; here the parts of it, by hand."""
    cluster.start()
    stub = MasterStub(cluster.address, host="h", name="old-1")
    joined = stub.join(uptime() + 10)
    stub.close()
    request = calls.Exists(Namespace("n"), [Key(b"k")])
    ends = Endpoints("127.0.0.1", 0, cluster.lane_port, "", b"")
    with RawLane(ends, token=joined.lane_token) as lane:
        lane.sock.sendall(frame(1, CALL, b"Exists", encode_request(request)))
        assert lane.next() is not None
        assert lane.next() is not None
    (row,) = cluster.client().traffic("n").namespaces
    assert [(each.client, each.address) for each in row.askers] == [("old-1", "127.0.0.1")]
