"""Hypothesis strategies for every message of ``kvstore.calls``, within the protocol's bounds."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvstore import calls
from kvstore.limits import (
    BLOCKS_MAX,
    CHAINS_MAX,
    PIN_MS_MAX,
    TTL_MS_MAX,
    Key,
    Namespace,
)

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
SIZES = st.integers(0, 1 << 48)
FLAGS = st.booleans()
VERSION = st.builds(calls.Version, U64, U64)
KEY = st.binary(min_size=1, max_size=256).map(Key)
PARENT = st.none() | KEY
NAMESPACE = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).map(Namespace)
ANY_NAMESPACE = st.just("") | NAMESPACE
NAME = st.from_regex(r"[a-z0-9.:_-]{1,40}", fullmatch=True)
TEXT = st.text(st.characters(codec="utf-8"), max_size=40)
BYTES = st.binary(max_size=40)
ANY_NAME = st.just("") | NAME
PROTOCOL = st.integers(1, 2**32 - 1)
EPOCH = st.integers(0, 1 << 62)
SIXTEEN = st.binary(min_size=16, max_size=16)
AVOID = st.lists(SIXTEEN, max_size=64).map(tuple)


def keys(*, distinct: bool = False, least: int = 0, most: int = 60) -> st.SearchStrategy[list[Key]]:
    """Keys of one length or of several."""

    def batch(one: st.SearchStrategy[Key]) -> st.SearchStrategy[list[Key]]:
        return st.lists(one, min_size=least, max_size=most, unique=distinct)

    hashes = st.binary(min_size=32, max_size=32).map(Key)
    return batch(hashes) | batch(KEY)


def column(rows: int, values: st.SearchStrategy[int] = U64) -> st.SearchStrategy[list[int]]:
    """Numbers, often all the same."""
    same = values.map(lambda value: [value] * rows)
    return same | st.lists(values, min_size=rows, max_size=rows)


def flags(rows: int) -> st.SearchStrategy[bytes]:
    return st.binary(min_size=rows, max_size=rows)


@st.composite
def placements(draw: st.DrawFn, rows: int | None = None) -> calls.Placements:
    rows = draw(st.integers(0, 40)) if rows is None else rows
    if not rows:
        return calls.NO_PLACEMENTS
    replicas = draw(column(rows, st.integers(0, 8)))
    extents = sum(replicas)
    return calls.Placements(
        draw(column(rows)),
        draw(column(rows)),
        draw(column(rows)),
        replicas,
        draw(column(extents)),
        draw(column(extents)),
    )


@st.composite
def prefix_matches(draw: st.DrawFn) -> calls.PrefixMatch:
    matched = draw(st.integers(0, 40))
    places = draw(st.just(calls.NO_PLACEMENTS) | placements(matched))
    return calls.PrefixMatch(matched, draw(U32), places)


@st.composite
def put_starts(draw: st.DrawFn) -> calls.PutStart:
    batch = draw(keys(distinct=True))
    return calls.PutStart(
        draw(NAMESPACE),
        batch,
        draw(column(len(batch), SIZES)),
        draw(PARENT),
        draw(FLAGS),
        draw(st.integers(1, 8)),
        draw(FLAGS),
        draw(st.integers(0, 3_600_000)),
        draw(st.just("") | NAME),
        draw(AVOID),
        draw(FLAGS),
        draw(U64),
    )


@st.composite
def grants(draw: st.DrawFn) -> calls.Grants:
    outcomes = bytes(draw(st.lists(st.sampled_from((1, 2, 3)), max_size=40)))
    granted = outcomes.count(1)
    replicas = draw(st.integers(0, 8))
    return calls.Grants(
        draw(U64),
        draw(U64),
        outcomes,
        replicas,
        draw(column(granted)),
        draw(column(granted * replicas)),
        draw(column(granted * replicas)),
    )


@st.composite
def renews(draw: st.DrawFn) -> calls.Renew:
    batch = draw(keys())
    placed = len(batch) if draw(st.booleans()) else 0
    return calls.Renew(
        draw(NAMESPACE),
        batch,
        draw(column(len(batch))),
        draw(column(len(batch))),
        draw(U64),
        draw(st.lists(U64, max_size=40)),
        tuple(draw(st.lists(SIXTEEN, min_size=placed, max_size=placed))),
        draw(column(placed)),
    )


@st.composite
def corrupt_reports(draw: st.DrawFn) -> calls.ReportCorrupt:
    batch = draw(keys())
    epochs, counters = draw(column(len(batch))), draw(column(len(batch)))
    uuids = draw(st.lists(SIXTEEN, min_size=len(batch), max_size=len(batch)))
    return calls.ReportCorrupt(draw(NAMESPACE), batch, epochs, counters, uuids)


@st.composite
def wipes(draw: st.DrawFn) -> calls.MasterWipe:
    rows, cut = draw(st.integers(0, 40)), draw(st.integers(0, 5))
    return calls.MasterWipe(
        draw(U64), draw(SIXTEEN), draw(column(rows)), draw(column(rows)), draw(column(rows)),
        draw(VERSION), draw(column(cut)), draw(column(cut)),
    )  # fmt: skip


ENGINE = st.none() | st.builds(calls.EngineAddress, NAME, U64, NAME, NAME)
ENTRY = st.from_regex(r"[a-z][a-z0-9._-]{0,20}", fullmatch=True)
DEVICE = st.none() | st.builds(calls.DevicePlace, NAME, ENTRY, NAME)
SEGMENT_INFO = st.builds(
    calls.SegmentInfo,
    U64,
    NAME,
    NAME,
    U64,
    SIXTEEN,
    NAME,
    NAME,
    SIXTEEN,
    U64,
    U64,
    ENGINE,
    PROTOCOL,
    DEVICE,
)
SEGMENT_STATUS = st.builds(
    calls.SegmentStatus, U64, U64, U64, U64, NAME, U64, U64, U64, ANY_NAME, U64, st.booleans()
)
NODE_STATUS = st.builds(
    calls.NodeStatus, NAME, NAME, NAME, NAME, U64, st.lists(SEGMENT_STATUS, max_size=3), ANY_NAME,
    TEXT, st.booleans(),
)  # fmt: skip
GONE_NODE = st.builds(calls.GoneNode, NAME, NAME, NAME, U64, U64, U64, st.booleans())
NAMESPACE_STATUS = st.builds(calls.NamespaceStatus, NAMESPACE, U64, U64, U64, U64)
OBJECT_ROW = st.builds(calls.ObjectRow, NAMESPACE, KEY, U64, U32, U64, U64, NAME)
CLIENT_TRAFFIC = st.builds(calls.ClientTraffic, TEXT, ANY_NAME, U64, U64, U64, U64, U64, BYTES)
MISSED_KEY = st.builds(calls.MissedKey, KEY, TEXT, ANY_NAME, U64, U64, U64, FLAGS)
NAMESPACE_TRAFFIC = st.builds(
    calls.NamespaceTraffic, NAMESPACE, U64, U64,
    *[st.lists(rows, max_size=3) for rows in (CLIENT_TRAFFIC, CLIENT_TRAFFIC, MISSED_KEY)],
    U64, U64, U64, U64, U64, U64,
)  # fmt: skip
PLACES = st.lists(U64, max_size=3)
BRANCH = st.builds(
    calls.Branch, NAMESPACE, U32, KEY, KEY, *[U64] * 12, FLAGS, PLACES, PLACES,
)  # fmt: skip
BLOCK = st.builds(calls.Block, KEY, NAME, BYTES, U64, U64, U64, U64, U64, U64, PLACES)
OFFER = st.builds(
    calls.SegmentOffer,
    st.integers(1, 1 << 48),
    SIXTEEN,
    ENTRY | st.just(""),
    NAME | st.just(""),
    SIXTEEN,
    U64,
    U64,
    FLAGS,
    VERSION,
    ENGINE,
    PROTOCOL,
    DEVICE,
)


@st.composite
def moves_started(draw: st.DrawFn) -> calls.MovesStarted:
    found = draw(grants())
    rows = len(found.tokens)
    names = st.lists(NAMESPACE, min_size=rows, max_size=rows)
    return calls.MovesStarted(
        draw(U64),
        draw(U64),
        draw(U64),
        draw(U64),
        draw(U64),
        draw(names),
        draw(keys(least=rows, most=rows)),
        draw(placements(rows)),
        found,
    )


REQUESTS: dict[type, st.SearchStrategy[Any]] = {
    calls.Join: st.builds(calls.Join, NAME, NAME, U32, U32, ANY_NAME, EPOCH),
    calls.MatchPrefix: st.builds(calls.MatchPrefix, st.lists(NAMESPACE, max_size=5), keys(), FLAGS),
    calls.Lookup: st.builds(calls.Lookup, NAMESPACE, keys()),
    calls.Exists: st.builds(calls.Exists, NAMESPACE, keys(), st.booleans()),
    calls.PutStart: put_starts(),
    calls.PutEnd: st.builds(calls.PutEnd, U64, st.lists(U64, max_size=40)),
    calls.PutRevoke: st.builds(
        calls.PutRevoke, U64, st.lists(U64, max_size=40), FLAGS, st.lists(U64, max_size=64)
    ),
    calls.Allocate: st.builds(
        calls.Allocate, SIZES, st.integers(0, 3_600_000), st.just("") | NAME, AVOID, FLAGS, U64
    ),
    calls.Commit: st.builds(
        calls.Commit, U64, U64, NAMESPACE, KEY, PARENT, SIZES, FLAGS, st.integers(0, TTL_MS_MAX)
    ),
    calls.Pin: st.builds(calls.Pin, NAMESPACE, keys(), st.integers(1, PIN_MS_MAX)),
    calls.Unpin: st.builds(calls.Unpin, NAMESPACE, keys()),
    calls.Renew: renews(),
    calls.Remove: st.builds(calls.Remove, NAMESPACE, keys()),
    calls.Clear: st.builds(calls.Clear, ANY_NAMESPACE, st.integers(1, 16_384)),
    calls.DescribeSegments: st.builds(calls.DescribeSegments, st.lists(U64, max_size=40)),
    calls.ReportFailure: st.builds(
        calls.ReportFailure, st.lists(U64, max_size=40), *[st.just("") | NAME] * 3, U64
    ),
    calls.ReportCorrupt: corrupt_reports(),
    calls.Status: st.builds(calls.Status, U64),
    calls.ListObjects: st.builds(
        calls.ListObjects,
        ANY_NAMESPACE,
        st.binary(max_size=256),
        U64,
        st.integers(1, 16_384),
    ),
    calls.StatObject: st.builds(calls.StatObject, NAMESPACE, KEY),
    calls.Traffic: st.builds(calls.Traffic, ANY_NAMESPACE, U64),
    calls.Chains: st.builds(calls.Chains, ANY_NAMESPACE, keys(most=20), st.integers(0, CHAINS_MAX)),
    calls.Blocks: st.builds(calls.Blocks, NAMESPACE, keys(), st.integers(0, BLOCKS_MAX)),
    calls.Drain: st.builds(calls.Drain, NAME, st.sampled_from(calls.DrainStep)),
    calls.StartMoves: st.builds(
        calls.StartMoves,
        NAME,
        U64,
        st.integers(1, 16_384),
        SIZES,
        AVOID,
        U64,
        st.booleans(),
        VERSION,
    ),
}

REPLIES: dict[type, st.SearchStrategy[Any]] = {
    calls.Joined: st.builds(
        calls.Joined,
        U64,
        st.integers(0, 65_535),
        TEXT,
        BYTES,
        U64,
        U64,
        TEXT,
        PROTOCOL,
        ANY_NAME,
        st.integers(0, 65_535),
        st.booleans(),
    ),
    calls.Matched: st.builds(calls.Matched, U64, U64, st.lists(prefix_matches(), max_size=4)),
    calls.Found: st.builds(calls.Found, U64, U64, placements()),
    calls.Existing: st.builds(calls.Existing, BYTES),
    calls.Grants: grants(),
    calls.PutEnded: st.builds(calls.PutEnded, BYTES),
    calls.Revoked: st.builds(calls.Revoked, U32),
    calls.Committed: st.builds(calls.Committed, st.integers(1, 5)),
    calls.Renewed: st.builds(calls.Renewed, U64, U64, BYTES, BYTES),
    calls.Pinned: st.builds(calls.Pinned, BYTES),
    calls.Unpinned: st.builds(calls.Unpinned, BYTES),
    calls.Removed: st.builds(calls.Removed, BYTES),
    calls.Cleared: st.builds(calls.Cleared, U64, U64),
    calls.Segments: st.builds(calls.Segments, U64, st.lists(SEGMENT_INFO, max_size=4)),
    calls.Reported: st.builds(calls.Reported, U32),
    calls.Dropped: st.builds(calls.Dropped, U32),
    calls.ClusterStatus: st.builds(
        calls.ClusterStatus,
        U64,
        TEXT,
        U64,
        st.lists(NODE_STATUS, max_size=3),
        st.lists(NAMESPACE_STATUS, max_size=3),
        st.lists(st.builds(calls.Counter, NAME, U64), max_size=5),
        NAME,
        TEXT,
        TEXT,
        U64,
        st.lists(GONE_NODE, max_size=3),
    ),
    calls.TrafficReport: st.builds(
        calls.TrafficReport, U64, U64, st.lists(NAMESPACE_TRAFFIC, max_size=3), U64
    ),
    calls.ChainsFound: st.builds(
        calls.ChainsFound, U64, U64, st.lists(BRANCH, max_size=3), st.booleans()
    ),
    calls.BlocksFound: st.builds(calls.BlocksFound, st.lists(BLOCK, max_size=3)),
    calls.Drained: st.builds(calls.Drained, U64, U64, U64, VERSION),
    calls.MovesStarted: moves_started(),
    calls.Listed: st.builds(calls.Listed, st.lists(OBJECT_ROW, max_size=5), U64),
    calls.ObjectDetail: st.builds(
        calls.ObjectDetail,
        st.none() | OBJECT_ROW,
        BYTES,
        U64,
        st.builds(calls.Version, U64, U64),
        U64,
        placements(),
        U64,
    ),
}


@st.composite
def claims(draw: st.DrawFn) -> calls.NodeClaims:
    found = draw(keys())
    rows = len(found)
    namespaces = draw(
        st.lists(NAMESPACE, unique=True, min_size=min(1, rows), max_size=min(3, rows))
    )
    places = st.integers(0, max(0, len(namespaces) - 1))

    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=rows, max_size=rows))

    return calls.NodeClaims(
        draw(st.integers(0, 63)), draw(FLAGS), draw(FLAGS), namespaces, column(places), found,
        column(PARENT), column(U64), column(U64), column(U64), column(U64),
    )  # fmt: skip


NODE_MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    calls.NodeJoin: st.builds(
        calls.NodeJoin,
        NAME,
        NAME,
        U32,
        U64,
        st.lists(OFFER, max_size=3),
        U32,
        EPOCH,
        ANY_NAME,
        ANY_NAME,
    ),
    calls.NodeBeat: st.builds(calls.NodeBeat, U64, st.booleans()),
    calls.NodeWiped: st.builds(calls.NodeWiped, U64),
    calls.NodeLeave: st.builds(calls.NodeLeave),
    calls.NodeClaims: claims(),
}

MASTER_MESSAGES: dict[type, st.SearchStrategy[Any]] = {
    calls.MasterAccepted: st.builds(
        calls.MasterAccepted,
        U64,
        st.integers(1, 3_600_000),
        st.integers(1, 86_400_000),
        st.lists(U64, max_size=5),
        PROTOCOL,
        ANY_NAME,
    ),
    calls.MasterBeat: st.builds(calls.MasterBeat, U64),
    calls.MasterWipe: wipes(),
    calls.MasterClaimed: st.builds(calls.MasterClaimed, U32),
}
