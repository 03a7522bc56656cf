"""With identities a node that looks through its memory finds what its master has granted, and
nothing that an engine has made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from xxhash import xxh3_64_intdigest

from kvstore import Client, PutOutcome, calls
from kvstore.clocks import uptime
from kvstore.limits import Key, Namespace
from kvstore.memory.header import (
    HEADER_BYTES,
    Header,
    extent_bytes,
    pack_into,
    write_stamp,
)
from kvstore.network.tcp_protocol import Extent
from kvstore.transport.base import Move
from kvstore.transport.tcp import TcpTransport
from tests.integration.test_restarts import (
    check,
    counter,
    fill,
    kill_master,
    objects,
    restarted,
    says,
)
from tests.support.cluster import OVER_TCP_NODE, SHORT, Cluster
from tests.support.issuing import Identities
from tests.support.traffic import content
from tests.support.waiting import until

ReplyT = TypeVar("ReplyT")
STORED = PutOutcome.STORED
SIZE = 20_000
TCP = ("tcp",)
VICTIMS = [f"victim-{number}" for number in range(20)]
MINE, THEIRS = "a/x", "b/x"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SHORT, identities=Identities(tmp_path)) as cluster:
        yield cluster


# --- what was granted is found -------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_killed_master_and_a_killed_node_find_everything_again(
    cluster: Cluster, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_CLIENT_TRANSPORTS", transport)
    cluster.start()
    (node,) = cluster.nodes
    fill(cluster)
    count = objects(cluster)
    kill_master(cluster)
    cluster.master()
    check(cluster)
    assert counter(cluster, "claimed_objects") == count
    node.kill()
    kill_master(cluster)
    cluster.master()
    again = restarted(cluster, node)
    check(cluster)
    assert "unstamped_headers" not in node.errors + again.errors
    again.kill()
    restarted(cluster, again)
    check(cluster)


# --- what was made up is not ---------------------------------------------------------------------


class Liar:
    """An engine of ``a/*`` that writes what it likes into the extent of a put of its own."""

    def __init__(self, cluster: Cluster, size: int) -> None:
        assert cluster._identities is not None
        auth = cluster._identities.engine("liar", "a/*")
        self.client = cluster.client(auth=auth, transports=TCP, name="liar")
        self.client.exists("joined", namespace=MINE)
        names = Namespace(MINE), [Key(b"own")]
        self.grants = self._grants = self._ask(
            calls.PutStart(*names, [size], None, False, 1, False, 5_000, ""), calls.Grants
        )
        segments = self._ask(calls.DescribeSegments(self._grants.segments), calls.Segments)
        (self.segment,) = segments.segments
        (self.at,) = self._grants.offsets
        self._extent = Extent(self.at, size + HEADER_BYTES, self._grants.capabilities)

    def forge(self, offset: int, *row: Any, **more: Any) -> None:
        """Writes what ``forged`` makes."""
        self.write(offset, self.forged(offset, *row, **more))

    def forged(
        self, offset: int, namespace: str, key: str, payload: bytes, *, size: int | None = None,
        counter: int | None = None, stamp: bytes = bytes(16),
    ) -> bytes:  # fmt: skip
        """A header, valid at ``offset``, and a payload, which it describes unless ``size`` says
        else."""
        head = bytearray(HEADER_BYTES)
        header = Header(
            Namespace(namespace), Key(key.encode()), None, len(payload) if size is None else size,
            self._grants.epoch, (1 << 40) if counter is None else counter,
            xxh3_64_intdigest(payload), b"",
        )  # fmt: skip
        write_stamp(head, pack_into(head, header, self.segment.seed, offset), stamp)
        return bytes(head) + payload

    def write(self, offset: int, data: bytes) -> None:
        transport = TcpTransport()
        try:
            move = Move(offset, memoryview(data), extent=self._extent)
            transport.write(self.segment, [move], uptime() + 5)
        finally:
            transport.close()

    def end(self) -> None:
        self._ask(calls.PutEnd(self._grants.epoch, self._grants.tokens), calls.PutEnded)

    def _ask(self, request: calls.Request, kind: type[ReplyT]) -> ReplyT:
        reply = self.client._stub.call(request, uptime() + 10)
        assert isinstance(reply, kind)
        return reply


@pytest.fixture
def attacked(cluster: Cluster) -> tuple[Liar, Client]:
    """A liar whose extent begins before those of the victims, and the victims' reader."""
    cluster.node_module = OVER_TCP_NODE
    cluster.start()
    liar = Liar(cluster, 200_000)
    assert cluster._identities is not None
    auth = cluster._identities.engine("victim", "b/*")
    victim = cluster.client(auth=auth, transports=TCP, name="victim")
    victim.put_many([(key, content(key, SIZE)) for key in VICTIMS], namespace=THEIRS)
    victim.lookup(VICTIMS, namespace=THEIRS)
    placed = victim._state.context.placements._placed.values()
    assert sum(each.replicas[0].offset > liar.at for each in placed) == len(VICTIMS)
    return liar, victim


def whole(cluster: Cluster, victim: Client, *, kills_node: bool) -> None:
    """Master, or master and node, are killed; the victims find their objects, and the liar no
    object but its own."""
    (node,) = cluster.nodes
    if kills_node:
        node.kill()
    kill_master(cluster)
    cluster.master()
    if kills_node:
        restarted(cluster, node)
    until(lambda: objects(cluster) >= len(VICTIMS))
    values = victim.get_many(VICTIMS, namespace=THEIRS)
    assert values == [content(key, SIZE) for key in VICTIMS]
    names = {each.name: each.objects for each in cluster.status().namespaces}
    assert names.get(THEIRS) == len(VICTIMS)
    says(cluster.nodes[-1], "unstamped_headers")


@pytest.mark.parametrize("kills_node", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_key_of_others_does_not_get_the_bytes_of_a_liar(
    cluster: Cluster, attacked: tuple[Liar, Client], *, kills_node: bool
) -> None:
    liar, victim = attacked
    for number, key in enumerate(VICTIMS[:3]):
        at = liar.at + extent_bytes(0) * (1 + 10 * number)
        liar.forge(at, THEIRS, key, b"of the liar")
    liar.end()
    whole(cluster, victim, kills_node=kills_node)
