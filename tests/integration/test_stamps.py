"""With identities a node that looks through its memory finds what its master has granted, and
nothing that an engine has made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from kvstore import Client, PutOutcome, calls
from kvstore.clocks import uptime
from kvstore.limits import Key, Namespace
from kvstore.memory.header import (
    EPOCH_OFFSET,
    HEADER_BYTES,
    MARK_OFFSET,
    SUPERBLOCK_BYTES,
    Header,
    check_of,
    extent_bytes,
    pack_into,
    write_stamp,
)
from kvstore.network.tcp_protocol import Extent
from kvstore.transport.base import Move
from kvstore.transport.tcp import TcpTransport
from tests.integration.test_drain import drain
from tests.integration.test_handover import shm_of
from tests.integration.test_restarts import (
    KEYS,
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


@pytest.mark.slow
def test_an_allocation_is_found_again_and_copies_are(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_AUTH", cluster._auth("admin"))
    cluster.start()
    first = cluster.nodes[0]
    client = cluster.client()
    memory = client.allocate(SIZE, kind="numpy")
    assert isinstance(memory, np.ndarray)
    memory[:] = 7
    assert client.put("allocated", memory) is STORED
    smaller = client.allocate(SIZE, kind="numpy")
    assert isinstance(smaller, np.ndarray)
    smaller[: SIZE // 2] = 8
    assert client.put("smaller", smaller[: SIZE // 2]) is STORED
    fill(cluster)
    del memory, smaller
    kill_master(cluster)
    cluster.master()
    values = cluster.client().get_many(["allocated", "smaller"], kind="bytes")
    assert values == [bytes([7]) * SIZE, bytes([8]) * (SIZE // 2)]
    second = cluster.node()
    assert drain(cluster, first).told["moved"] == objects(cluster)
    second.kill()
    kill_master(cluster)
    cluster.master()
    restarted(cluster, second)
    check(cluster)
    values = cluster.client().get_many(["allocated", "smaller"], kind="bytes")
    assert values == [bytes([7]) * SIZE, bytes([8]) * (SIZE // 2)]


def test_memory_of_a_device_is_found_by_the_next_master(cluster: Cluster) -> None:
    cluster.start(device="fake:0")
    fill(cluster)
    kill_master(cluster)
    cluster.master()
    check(cluster)


@pytest.mark.slow
def test_the_key_is_for_the_nodes_user_alone_and_goes_with_the_memory(cluster: Cluster) -> None:
    cluster.start()
    (node,) = cluster.nodes
    assert node.key.stat().st_mode & 0o777 == 0o600
    whole = node.key.read_bytes()
    node.kill()
    assert node.key.read_bytes() == whole
    again = restarted(cluster, node)
    assert node.key.read_bytes() == whole
    assert again.terminate() == 0
    assert not node.key.exists()


# --- what a writer of shared memory can do -------------------------------------------------------


def lie_in_superblock(cluster: Cluster) -> None:
    """An engine that has the memory of a node mapped to write says there that all other memory was
    away during a removal, and that a later master has been joined."""
    assert cluster._identities is not None
    liar = cluster.client(auth=cluster._identities.engine("liar", "a/*"), transports=("shm",))
    assert liar.put("k", b"v", namespace=MINE, wait_ms=5_000) is STORED
    (mapping,) = filter(None, shm_of(liar)._mappings.values())
    epoch = cluster.status().epoch
    words = mapping.memory[:SUPERBLOCK_BYTES].cast("Q")
    words[MARK_OFFSET // 8], words[MARK_OFFSET // 8 + 1] = epoch, (1 << 64) - 1
    words[EPOCH_OFFSET // 8] = later = epoch + 86_400_000
    words[EPOCH_OFFSET // 8 + 1] = check_of(later)
    words.release()


@pytest.mark.parametrize("kills_nodes", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_who_writes_into_the_superblock_empties_no_other_memory(
    cluster: Cluster, *, kills_nodes: bool
) -> None:
    cluster.start(2)
    fill(cluster)
    assert all(each.segments[0].used for each in cluster.status().nodes), "both have objects"
    lie_in_superblock(cluster)
    kill_master(cluster)
    if kills_nodes:
        for node in cluster.nodes:
            node.kill()
    cluster.master()
    for node in cluster.nodes[:] if kills_nodes else ():
        restarted(cluster, node)
    check(cluster)
    assert counter(cluster, "refused_claims") == 0
    master = cluster.master_server.errors
    assert "why=outdated" not in master
    assert "epoch_outrun" not in master


@pytest.mark.slow
def test_a_mark_is_still_known_when_all_have_started_again(cluster: Cluster) -> None:
    """Memory that was away during a removal is not believed, also after the lie of a writer."""
    cluster.start(2)
    away, there = cluster.nodes
    client = cluster.client()
    client.put_many([(key, content(key, SIZE)) for key in KEYS], replicas=2)
    away.kill()
    until(lambda: cluster.state_of(away) == "gone")
    assert client.remove(KEYS[0])
    lie_in_superblock(cluster)
    there.kill()
    kill_master(cluster)
    cluster.master()
    restarted(cluster, there)
    restarted(cluster, away)
    says(cluster.master_server, f"mark_found node={there.name}")
    values = cluster.client().get_many(KEYS)
    assert values == [None, *(content(key, SIZE) for key in KEYS[1:])]


@pytest.mark.slow
def test_memory_without_its_private_file_is_discarded(cluster: Cluster) -> None:
    """As memory in a hugetlbfs has, beside a ``/dev/shm`` that ended with its container; and as
    that of a process without an identity has none."""
    cluster.start()
    (node,) = cluster.nodes
    fill(cluster)
    node.kill()
    node.key.unlink()
    kill_master(cluster)
    cluster.master()
    again = restarted(cluster, node)
    says(again, "left_over_memory_discarded")
    assert objects(cluster) == 0


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


@pytest.mark.parametrize("kills_node", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_header_over_its_neighbours_neither_shows_nor_destroys_them(
    cluster: Cluster, attacked: tuple[Liar, Client], *, kills_node: bool
) -> None:
    liar, victim = attacked
    wide = 4 << 20
    liar.forge(liar.at, MINE, "wide", b"", size=wide)
    stamp, (token,) = liar.grants.stamps, liar.grants.tokens
    assert len(stamp) == 16
    # Its own stamp is good neither for another size, nor at another place, nor for another version.
    liar.forge(liar.at + 1024, MINE, "own", b"", size=wide, counter=token, stamp=stamp)
    liar.forge(liar.at + 2048, MINE, "own", b"", size=200_000, counter=token, stamp=stamp)
    liar.forge(liar.at + 3072, MINE, "own", b"", size=200_000, stamp=stamp)
    liar.end()
    whole(cluster, victim, kills_node=kills_node)
    assert liar.client.get_many(["wide", "own"], namespace=MINE) == [None, None]


@pytest.mark.slow
def test_a_liar_finds_what_it_was_granted(cluster: Cluster, attacked: tuple[Liar, Client]) -> None:
    """The stamp alone decides: the same header with it is believed."""
    liar, victim = attacked
    (token,) = liar.grants.tokens
    payload = liar.forged(liar.at + 1024, THEIRS, VICTIMS[0], b"of the liar").ljust(200_000, b"-")
    liar.forge(liar.at, MINE, "own", payload, counter=token, stamp=liar.grants.stamps)
    liar.end()
    whole(cluster, victim, kills_node=True)
    assert liar.client.get("own", namespace=MINE, kind="bytes") == payload
