"""Dynamo's index of a store says how far each prefix is stored, whatever happens."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from kvstore import Client, KVStoreError
from kvstore.errors import NoSpaceError
from tests.engines.dynamo.index import Index, Router
from tests.integration.test_high_availability import HaCluster
from tests.support.cluster import Cluster
from tests.support.etcd import running
from tests.support.processes import free_port
from tests.support.waiting import until

NAMESPACE = "vllm/f/g0/p0t0"
TOPIC = f"kv@pool:kvstore@{NAMESPACE}"
BLOCK = bytes(64 << 10)


def key(number: int) -> bytes:
    """32 bytes, as of vLLM's hashes."""
    return random.Random(number).randbytes(32)


def chains(count: int, depth: int) -> list[list[bytes]]:
    """Prompts of which each shares the first half with the one before."""
    found: list[list[bytes]] = []
    for chain in range(count):
        shared = found[-1][: depth // 2] if chain % 4 else []
        new = [key(1_000 * chain + number) for number in range(depth - len(shared))]
        found.append(shared + new)
    return found


def addresses() -> str:
    return ",".join(f"tcp://127.0.0.1:{free_port()}" for _ in range(2))


def hashes(chain: Sequence[bytes]) -> list[int]:
    return [int.from_bytes(each[-8:], "big") for each in chain]


def agree(
    client: Client, index: Index, prompts: Sequence[Sequence[bytes]], *routers: Router
) -> list[int]:
    """Once the index says of every prompt what the store says. Returns that."""
    found: list[int] = []

    def same() -> bool:
        nonlocal found
        for router in routers:
            router.read(within_s=0.1)
        found = [client.match_prefix(chain) for chain in prompts]
        return found == [index.match(hashes(chain)) for chain in prompts]

    until(same, within_s=60)
    return found


def put(client: Client, prompts: Sequence[Sequence[bytes]]) -> None:
    """Waits for memory: a node that has joined, and leases that end."""
    for chain in prompts:

        def stored(chain: Sequence[bytes] = chain) -> bool:
            with contextlib.suppress(NoSpaceError):
                client.put_chain(chain, [BLOCK] * len(chain), wait_ms=5_000)
                return True
            return False

        until(stored, within_s=60)


@pytest.mark.timeout(300)
def test_the_index_follows_puts_evictions_removals_deaths_gaps_and_restarts(
    cluster: Cluster,
) -> None:
    cluster.settings |= {
        "http_port": free_port(), "events": addresses(),
        "lease_ms": 1_000, "put_deadline_ms": 1_000, "late_write_ms": 0,
    }  # fmt: skip
    cluster.start(2)
    index = Index()
    router = Router(cluster.settings["events"], TOPIC, index)
    with contextlib.closing(router), cluster.client(namespace=NAMESPACE) as client:
        prompts = chains(20, 16)
        put(client, prompts[:10])
        assert agree(client, index, prompts, router)[:10] == [16] * 10

        put(client, chains(120, 16))  # 64 MiB hold a part of these
        assert 0 < sum(agree(client, index, prompts, router)) < 20 * 16

        put(client, prompts)
        agree(client, index, prompts, router)
        client.remove_many([chain[5] for chain in prompts])
        assert max(agree(client, index, prompts, router)) == 5
        put(client, prompts)  # what was below those is found again
        assert max(agree(client, index, prompts, router)) == 16

        client.remove(prompts[0][0])
        router.lose()
        put(client, prompts[:1])
        agree(client, index, prompts, router)

        before = sum(client.match_prefix(chain) for chain in prompts)
        cluster.nodes[0].kill()
        until(lambda: sum(client.match_prefix(chain) for chain in prompts) < before)
        lost = agree(client, index, prompts, router)

        cleared = router.cleared
        cluster.master_server.kill()
        cluster.master()
        until(lambda: [client.match_prefix(chain) for chain in prompts] == lost)

        def begun() -> bool:
            router.read(within_s=0.1)
            return router.cleared > cleared

        until(begun)  # the term of the new master
        assert agree(client, index, prompts, router) == lost


@pytest.mark.timeout(300)
def test_the_index_follows_an_election(tmp_path: Path) -> None:
    prompts = chains(8, 12)
    with contextlib.ExitStack() as stack:
        cluster = HaCluster(tmp_path, stack.enter_context(running(tmp_path / "etcd")))
        stack.callback(cluster.close)
        published = [addresses(), addresses()]
        first = cluster.add_master(http_port=free_port(), events=published[0])
        until(lambda: cluster.leader() == first)
        cluster.add_master(http_port=free_port(), events=published[1])
        cluster.node()
        index = Index()
        routers = [Router(each, TOPIC, index) for each in published]
        for router in routers:
            stack.callback(router.close)
        client = cluster.client(namespace=NAMESPACE)
        put(client, prompts)
        assert agree(client, index, prompts, *routers) == [12] * 8
        cluster.masters[first].kill()
        cluster.another_leads(first)

        def removed() -> bool:
            with contextlib.suppress(KVStoreError):
                client.remove(prompts[0][3])
                return True
            return False

        until(removed)
        assert agree(client, index, prompts, *routers)[0] == 3
        cluster.finish()


@pytest.mark.timeout(120)
def test_dynamos_indexer_takes_no_block_without_its_tokens(
    cluster: Cluster, tmp_path: Path
) -> None:
    """A router that indexes by tokens learns nothing from a store, which does not know them. The
    same event with tokens is taken."""
    cluster.settings |= {"http_port": free_port(), "events": addresses()}
    cluster.start()
    log = (tmp_path / "indexer.log").open("wb")
    port = free_port()
    context = zmq.Context()
    engine = context.socket(zmq.PUB)
    engine_at = f"tcp://127.0.0.1:{engine.bind_to_random_port('tcp://127.0.0.1')}"
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    with contextlib.ExitStack() as stack:
        stack.enter_context(log)
        stack.callback(context.destroy, 0)
        indexer = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(indexer.wait)
        stack.callback(indexer.kill)
        until(lambda: asked(port, "/workers") is not None, within_s=60)
        at, replay_at = cluster.settings["events"].split(",")
        for number, endpoint in ((1, at), (2, engine_at)):
            about: dict[str, Any] = {
                "instance_id": number,
                "endpoint": endpoint,
                "model_name": f"m{number}",
            }
            about |= {"block_size": 16} | ({"replay_endpoint": replay_at} if number == 1 else {})
            assert asked(port, "/register", about) is not None
        client = cluster.client(namespace=NAMESPACE)
        record = {"models": ["m1"], "block_size": 16, "namespaces": [NAMESPACE]}
        client.put("m1/f", json.dumps(record).encode(), namespace="vllm-fleet")
        tokens: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": [5],
            "parent_block_hash": None,
        }
        tokens |= {"token_ids": list(range(16)), "block_size": 16, "lora_id": None}
        sent = 0

        def taken() -> bool:
            nonlocal sent
            client.put(key(sent), b"x")
            batch: Any = msgpack.packb([1.0, [tokens], 0])
            engine.send_multipart((b"", sent.to_bytes(8, "big"), batch))
            sent += 1
            said = Path(log.name).read_text(errors="replace")
            dump = asked(port, "/dump") or {}
            return "token_ids too short" in said and bool(blocks(dump, "m2"))

        until(taken, within_s=60)
        assert blocks(asked(port, "/dump") or {}, "m1") == []


def asked(port: int, path: str, body: object = None) -> Any:
    """None: no answer yet."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=None if body is None else json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        pytest.fail(f"{path}: {error.code} {error.read().decode()}")
    except OSError:
        return None


def blocks(dump: dict[str, Any], model: str) -> list[Any]:
    """Events of a model that carry blocks."""
    return [each for name, told in dump.items() if name.startswith(model) for each in events(told)]


def events(told: Any) -> list[Any]:
    if isinstance(told, dict):
        told = told.get("events", [])
    return [each for each in told if "stored" in json.dumps(each)]
