"""Five tenants share a store, with identities and quotas. One of them does harm: it fills the pool,
pins, removes and clears, guesses keys, probes and floods. The other four keep their memory and
their hits, are served in time, and neither see the attacker nor are seen by it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from urllib.parse import urlencode

import pytest

from kvstore import Client, PutOutcome, calls
from kvstore.errors import (
    KVStoreError,
    PermissionDeniedError,
)
from kvstore.limits import Key, Namespace
from kvstore.runtime.clock import uptime
from kvstore.security.credentials import Credentials
from tests.support.certificates import Identities
from tests.support.cluster import Cluster
from tests.support.http import request
from tests.support.processes import free_port
from tests.support.wait import until
from tests.support.workload import at_work, content

HONEST = ("ada", "bob", "cyd", "dan")
EVIL = "evil"
SIZE = 30_000
BLOCKS = 40
"""Of each honest tenant: 1.3 MiB with headers, within its guarantee."""
LONGEST_S = 10.0
"""No call of an honest client takes longer: the default time-out."""
TENANT = """
[{name}]
namespaces = ["{name}/*"]
guarantee = "{guarantee}"
limit = "{limit}"
pin_limit = "1MiB"
put_share = 0.2
"""


def space(name: str) -> str:
    return f"{name}/kv"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def cluster(tmp_path: Path, port: int, identities: Identities) -> Iterator[Cluster]:
    tenants = tmp_path / "tenants.toml"
    rows = [TENANT.format(name=name, guarantee="2MiB", limit="4MiB") for name in HONEST]
    rows.append(TENANT.format(name=EVIL, guarantee="0", limit="16MiB"))
    tenants.write_text("".join(rows))
    settings = {"tenants": tenants, "http_port": port, "events": "on", "put_deadline_ms": 10_000}
    with Cluster(tmp_path, settings=settings, identities=identities) as cluster:
        cluster.start(memory="16MiB")
        yield cluster


def client_of(cluster: Cluster, identities: Identities, name: str) -> Client:
    auth = identities.engine(name, f"{name}/*")
    return cluster.client(auth=auth, namespace=space(name), name=f"client-of-{name}")


class Attacker:
    """What one identity with valid rights of its own can do with its own client, and with calls
    that no client makes."""

    def __init__(self, client: Client, seed: int) -> None:
        self._client = client
        self._random = Random(seed)
        self.wrong: list[str] = []
        """Calls that were answered and must not be."""

    def fill(self, number: int) -> str:
        """As much as it can, without an end."""
        return self._client.put(f"junk-{number}", bytes(SIZE), wait_ms=0).name

    def pin(self, number: int) -> str:
        key = f"pin-{number}"
        self._client.put(key, bytes(SIZE), wait_ms=0)
        self._client.pin([key], 3600)
        return "pinned"

    def reach_out(self, number: int) -> str:
        """One call about what belongs to others."""
        victim = space(self._random.choice(HONEST))
        keys = [Key(b"block-%d" % self._random.randrange(BLOCKS))]
        asked = self._random.choice(self._of_others(Namespace(victim), keys))
        try:
            reply = self._client._stub.call(asked, uptime() + LONGEST_S)
        except PermissionDeniedError:
            return "refused"
        self.wrong.append(f"{asked!r:.200} was answered with {reply!r:.200}")
        return "answered"

    def flood(self, number: int) -> str:
        self._client.match_prefix([f"junk-{number}-{index}" for index in range(500)])
        return "asked"

    @staticmethod
    def _of_others(victim: Namespace, keys: list[Key]) -> list[calls.Request]:
        return [
            calls.Exists(victim, keys),
            calls.Lookup(victim, keys),
            calls.MatchPrefix([victim], keys, True),
            calls.PutStart(victim, keys, [10], None, False, 1, True, 0, ""),
            calls.Allocate(victim, 10, 0, ""),
            calls.Remove(victim, keys),
            calls.Clear(victim, 100),
            calls.Pin(victim, keys, 3_600_000),
            calls.ReportCorrupt(victim, keys, [1], [1], [bytes(16)]),
            calls.StatObject(victim, keys[0]),
            calls.ListObjects(victim, b"", 0, 10),
            calls.Traffic(victim),
            calls.Traffic(Namespace("")),
            calls.Clear(Namespace(""), 100),
        ]


class HonestClient:
    """A tenant that uses a few blocks, all within its guarantee."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self._name = name
        for number in range(BLOCKS):
            outcome = client.put(f"block-{number}", self._block(number))
            assert outcome is PutOutcome.STORED

    def use(self, number: int) -> str:
        """A hit, or a block that is replaced."""
        index = number % BLOCKS
        if number % 5 == 0:
            client, key = self._client, f"block-{index}"
            return client.put(key, self._block(index), overwrite=True).name
        read = self._client.get(f"block-{index}")
        if read is None:
            return "miss"
        return "right" if read == self._block(index) else "wrong"

    def _block(self, number: int) -> bytes:
        return content(f"{self._name}-{number}", SIZE)


@pytest.mark.slow
def test_an_attacker_does_no_harm_to_four_others(
    cluster: Cluster, identities: Identities, port: int
) -> None:
    honest = [HonestClient(client_of(cluster, identities, name), name) for name in HONEST]
    attackers = [Attacker(client_of(cluster, identities, EVIL), seed) for seed in range(4)]
    first = attackers[0]
    verbs: list[Callable[[int], str]] = [
        first.fill, attackers[1].pin, attackers[2].reach_out, attackers[3].flood,
    ]  # fmt: skip
    with contextlib.ExitStack() as stack:
        evil = [stack.enter_context(at_work(told(verb), longest_s=60)) for verb in verbs]
        good = [stack.enter_context(at_work(each.use, longest_s=LONGEST_S)) for each in honest]
        until(
            lambda: (
                all(sum(worker.counts.values()) >= 400 for worker in good)
                and sum(evil[0].counts.values()) >= 1_000
                and evil[2].counts.get("refused", 0) >= 200
                and all(worker.counts for worker in evil)
            ),
            within_s=120,
        )
    for name, worker in zip(HONEST, good, strict=True):
        assert set(worker.counts) <= {"right", "STORED"}, (name, worker.counts)
    assert first.wrong == attackers[2].wrong == []
    rows = {row.name: row for row in cluster.status().tenants}
    for name in HONEST:
        assert rows[name].bytes >= BLOCKS * SIZE, "all that it has put is still there"
    assert rows[EVIL].pinned <= 1 << 20
    assert_sees_only_its_own(cluster, identities, port, EVIL, others=HONEST)
    assert_sees_only_its_own(cluster, identities, port, "ada", others=(EVIL, *HONEST[1:]))


def told(verb: Callable[[int], str]) -> Callable[[int], str]:
    """The attacker goes on whatever it hears."""

    def tried(number: int) -> str:
        try:
            return verb(number)
        except KVStoreError as error:
            return error.code

    return tried


def assert_sees_only_its_own(
    cluster: Cluster, identities: Identities, port: int, name: str, others: tuple[str, ...]
) -> None:
    """In the status, by HTTP, in metrics, chains, traffic and events: no name, count or client of
    another tenant."""
    client = client_of(cluster, identities, name)
    status = client.status()
    assert [row.name for row in status.tenants] == [name]
    assert {row.name for row in status.namespaces} == {space(name)}
    tls = Credentials(identities.engine(name, f"{name}/*")).client()
    told = [repr((status.tenants, status.namespaces))]
    own = urlencode({"namespace": space(name)})
    assert request(port, "GET", f"/api/v1/chains?{own}", tls=tls).status == 200
    paths = ("status", "fleet", "notices", "history", "nodes", f"chains?{own}")
    told += [request(port, "GET", f"/api/v1/{path}", tls=tls).text for path in paths]
    told.append(request(port, "GET", "/metrics", tls=tls).text)
    for other in others:
        theirs = urlencode({"namespace": space(other)})
        key = urlencode({"key": b"block-1".hex()})
        for path in (
            f"chains?{theirs}", f"stat?{theirs}&{key}", f"events?{theirs}",
        ):  # fmt: skip
            answer = request(port, "GET", f"/api/v1/{path}", tls=tls)
            assert answer.status in (401, 403), (path, answer.status)
            assert b"block-" not in answer.body
        for text in told:
            assert space(other) not in text
            assert f"client-of-{other}" not in text
    with pytest.raises(KVStoreError):
        list(client.list_objects(namespace=space(others[0])))
