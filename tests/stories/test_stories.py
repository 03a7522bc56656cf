"""What the store promises, in twelve stories with real processes: read them in this order.

Each starts a store of its own, does what a user does, breaks something, and looks again. The tests
in ``tests/integration`` ask the same questions in every circumstance; ``make test-all`` runs those.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client, PutOutcome
from kvstore.client.sse_client import follow
from kvstore.console.api.lookups import REMOVE_PATH
from kvstore.errors import KVStoreError, NoSpaceError
from tests.integration.test_network import Net, far, near, net
from tests.support.cluster import SHORT, Cluster, Node
from tests.support.engines import World, play, stored
from tests.support.http import request
from tests.support.processes import Server, free_port
from tests.support.remote_clients import Remote, RemoteError
from tests.support.wait import until
from tests.support.workload import content

__all__ = ["far", "near", "net"]  # fixtures: two hosts with a network between them

KEYS = [f"key-{number}" for number in range(40)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A store whose leases and deadlines last about a second. Nothing is started yet; at the end
    every process must stop when it is told to, and leave nothing behind."""
    with Cluster(tmp_path, settings=SHORT) as cluster:
        yield cluster


def put_all(client: Client, replicas: int = 1) -> None:
    outcomes = client.put_many([(key, content(key)) for key in KEYS], replicas=replicas)
    assert set(outcomes) == {PutOutcome.STORED}


def found(client: Client) -> int:
    """How many of KEYS are there; what is there must have the right bytes."""
    values = client.get_many(KEYS)
    assert all(value in (None, content(key)) for key, value in zip(KEYS, values, strict=True))
    return sum(value is not None for value in values)


def killed(cluster: Cluster) -> Server:
    """The master, by kill -9."""
    cluster.master_server.kill()
    return cluster.master_server


def started_again(cluster: Cluster, node: Node) -> Node:
    """On the memory that it left behind, once the master knows what is in it."""
    again = cluster.node(name=node.name)
    until(lambda: "inventory_reported" in again.errors)
    return again


def test_one_process_puts_and_others_get_and_match(cluster: Cluster) -> None:
    cluster.start()
    prefill = Remote(cluster.address, {"transports": ["shm"]})
    prefill.ask("client.put_chain([b'b0', b'b1'], [content('b0'), content('b1')]) and None")
    prefill.close()
    for transport in ("shm", "tcp"):
        decode = cluster.client(transports=(transport,))
        assert decode.match_prefix([b"b0", b"b1", b"b2"]) == 2
        assert decode.get(b"b1") == content("b1")
        target = np.zeros(100_000, np.uint8)
        decode.get_into([b"b0"], [target])
        assert target.tobytes() == content("b0")
        assert decode.get(b"b2") is None, "a miss is None"


def test_a_killed_master_loses_nothing_and_a_killed_node_comes_back(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client(timeout_ms=1_000)
    put_all(client)

    killed(cluster)
    asked_at = time.monotonic()
    with pytest.raises(KVStoreError):
        client.put("while it is away", b"x")
    assert time.monotonic() - asked_at < 3, "no call outlasts its deadline"
    cluster.master()
    assert found(cluster.client()) == len(KEYS)

    cluster.nodes[0].kill()
    until(lambda: cluster.state_of(cluster.nodes[0]) == "gone")
    assert found(client) == 0, "misses, not errors: an engine computes instead"
    started_again(cluster, cluster.nodes[0])
    assert found(cluster.client()) == len(KEYS), "its memory was left in /dev/shm"


def test_what_was_removed_stays_removed(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client()
    put_all(client)
    view = client.get(KEYS[0], copy=False)
    assert client.remove_many(KEYS[:10]) == [True] * 10
    assert client.put(KEYS[1], b"another value") is PutOutcome.STORED
    assert bytes(view or b"") == content(KEYS[0]), "who reads it keeps it until the lease ends"
    del view
    killed(cluster)
    cluster.nodes[0].kill()
    cluster.master()
    started_again(cluster, cluster.nodes[0])
    other = cluster.client()
    until(lambda: other.get(KEYS[10]) is not None)
    assert other.get_many(KEYS[:10]) == [None, b"another value", *[None] * 8]


def test_a_full_pool_evicts_the_ends_of_prefixes_and_nothing_that_is_leased(
    cluster: Cluster,
) -> None:
    cluster.start(memory="16MiB")
    client = cluster.client()
    client.put_chain([b"system", b"prompt", b"question"], [content("chain")] * 3)
    held = client.get("held", copy=False) if client.put("held", content("held")) else None
    for number in range(40):  # of 1 MiB each
        assert client.put(f"{number}", bytes(1 << 20), wait_ms=5_000) is PutOutcome.STORED
        client.match_prefix([b"system", b"prompt"])
    assert client.match_prefix([b"system", b"prompt", b"question"]) == 2
    assert held is not None
    assert bytes(held) == content("held")
    kept = [number for number in range(40) if client.get(f"{number}", copy=False) is not None]
    assert kept == list(range(kept[0], 40)), "the oldest were evicted"
    with pytest.raises(NoSpaceError):  # all that is left is leased now
        client.put("one more", bytes(1 << 20), wait_ms=0)


def test_a_node_is_drained_and_leaves(cluster: Cluster) -> None:
    cluster.start()
    old = cluster.nodes[0]
    put_all(cluster.client())
    cluster.node()
    command = [sys.executable, "-m", "kvstore.cli.main", "drain", old.name]
    subprocess.run([*command, "--master", cluster.address], check=True, timeout=60)
    assert old.wait() == 0, old.errors
    assert found(cluster.client()) == len(KEYS)


def test_a_second_replica_survives_its_node_and_is_made_again(cluster: Cluster) -> None:
    cluster.settings["repair_after_ms"] = 500
    cluster.start(2)
    client = cluster.client()
    put_all(client, replicas=2)
    cluster.nodes[0].kill()
    assert found(client) == len(KEYS), "at once, from the other node"
    until(lambda: cluster.state_of(cluster.nodes[0]) == "gone")
    cluster.node()
    until(lambda: dict(cluster.status().counters).get("under_replicated_objects") == 0)
    cluster.nodes[1].kill()
    assert found(cluster.client()) == len(KEYS), "from the replicas that were made again"


def test_events_tell_what_is_there(cluster: Cluster) -> None:
    cluster.settings |= {"http_port": free_port(), "events": "on"}
    cluster.start()
    client = cluster.client()
    client.put_chain([b"\x01", b"\x02"], [b"one", b"two"])
    there: set[str] = set()
    for told in follow([f"127.0.0.1:{cluster.settings['http_port']}"]):
        if told.name == "stored":
            there.add(told.data["key"])
        elif told.name == "removed":
            there.remove(told.data["key"])
            break
        elif told.name == "complete":
            assert there == {"01", "02"}
            client.remove(b"\x02")
    assert there == {"01"}


def test_over_http_with_a_token(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-secret-of-this-store\n")
    port = free_port()
    cluster.settings |= {"http_port": port, "http_token_file": tmp_path / "token"}
    cluster.start()
    cluster.client().put(b"\x0a", b"value")
    keys = {"keys": ["0a"]}
    assert request(port, "POST", REMOVE_PATH, keys).status == 401
    assert request(port, "POST", REMOVE_PATH, keys, token="a-guess-of-a-stranger").status == 401
    done = request(port, "POST", REMOVE_PATH, keys, token="a-secret-of-this-store")
    assert (done.status, done.json) == (200, {"removed": [True]})
    assert cluster.client().get(b"\x0a") is None
    assert request(port, "GET", "/healthz").status == 200, "health needs none"


def test_a_proxy_between_one_prefiller_and_one_decoder(tmp_path: Path) -> None:
    async def scenario(world: World) -> None:
        prefiller, decoder = world.prefillers[0], world.decoders[0]
        prefiller.answer = stored(5)
        status, answer = await world.complete("a prompt of five words", max_tokens=9)
        assert (status, answer["from"]) == (200, decoder.address)
        [first], [second] = prefiller.calls, decoder.calls
        assert first.body["max_tokens"] == 1, "the prefiller computes the prompt's KV cache"
        assert second.body["max_tokens"] == 9, "the decoder finds it in the store"
        assert second.params["stored_tokens"] == 5
        await prefiller.stop()
        assert (await world.complete("a prompt of five words"))[0] == 200, "the decoder does both"

    play(tmp_path, scenario)


def test_a_fork_has_a_client_of_its_own(cluster: Cluster) -> None:
    cluster.start()
    client = cluster.client()
    put_all(client)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert found(client) == len(KEYS)
            client.put("of the child", b"x")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert found(client) == len(KEYS)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client.get("of the child") == b"x"


@pytest.mark.netns
def test_a_network_is_cut_and_mended(net: Net, near: Cluster, far: Remote) -> None:
    get = "client.get('k') == content('k')"
    far.ask("client.put('k', content('k')) and None")
    assert far.ask(get)
    for link in ("data", "control"):
        net.cut(link)
        with pytest.raises(RemoteError) as caught:
            far.ask("client.put('l', content('l'), wait_ms=500) and None")
        assert caught.value.took_s < 4, "its deadline is 3 s"
        net.mend(link)
        until(lambda: far.ask(get), within_s=20)
    assert near.state_of(near.nodes[0]) == "alive"


def test_everything_is_killed_and_started_again(cluster: Cluster) -> None:
    cluster.start(2)
    put_all(cluster.client())
    client = cluster.client()
    client.put("replaced", b"first")
    client.put("replaced", b"second", overwrite=True)
    killed(cluster)
    for node in cluster.nodes:
        node.kill()
    cluster.master()
    for node in cluster.nodes[:2]:
        started_again(cluster, node)
    assert found(cluster.client()) == len(KEYS)
    assert cluster.client().get("replaced") == b"second"
    assert client.get("replaced") == b"second", "a client of before goes on, too"
