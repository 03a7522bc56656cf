"""Dynamo's index of a store says how far each prefix is stored, whatever happens."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import pytest

from kvstore import Client
from kvstore.errors import NoSpaceError
from tests.engines.dynamo.index import Index, Router
from tests.support.cluster import Cluster
from tests.support.processes import free_port
from tests.support.wait import until

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
