"""Splitting of large calls into chunks, which the client sends in sequence.

A chunk takes the master a few milliseconds and at most ``REQUEST_BYTES_MAX``; the master refuses
larger calls. Each chunk is atomic, the complete call is not. Only calls that process each key or
namespace separately are split. A put is granted completely or not at all, so its size is limited
instead (``PUT_KEYS_MAX``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from kvstore import calls
from kvstore.calls import Reply, Request
from kvstore.limits import BATCH_KEYS_MAX, PUT_KEYS_MAX
from kvstore.native.packed_keys import keys_per_request

KEYS_PER_CHUNK: Final = 256
"""Removing these keys takes 2 ms."""

REPORTS_PER_CHUNK: Final = 64
"""Corrupt objects in one chunk; each writes a line to the log."""

LOOKUPS_PER_CHUNK: Final = 4_096
"""Looking up this many random keys among 10 million objects takes 5 ms."""

PROBES_PER_CHUNK: Final = BATCH_KEYS_MAX
"""Keys times namespaces of a match: a scan takes 5 ms, a search much less."""


class Chunking(NamedTuple):
    """Splits one kind of call, and merges the replies of its chunks."""

    is_large: Callable[[Any], bool]
    chunks: Callable[[Any], list[Request]]
    joined: Callable[[list[Any]], Reply]


def _ranges(count: int, step: int) -> list[slice]:
    return [slice(start, start + step) for start in range(0, count, step)]


def _chunked_by(*columns: str, rows_max: int = KEYS_PER_CHUNK) -> Callable[[Any], list[Request]]:
    """Split a request into chunks of ``rows_max`` rows of these equally long fields."""

    def chunks(request: Any) -> list[Request]:
        fields = {name: getattr(request, name) for name in columns}
        first = fields[columns[0]]
        step = min(rows_max, keys_per_request(first)) if columns[0] == "keys" else rows_max
        return [
            request._replace(**{name: column[rows] for name, column in fields.items()})
            for rows in _ranges(len(first), step)
        ]

    return chunks


def _flat(replies: Sequence[Any], name: str) -> bytes:
    return b"".join(bytes(getattr(reply, name)) for reply in replies)


def _match_chunks(request: calls.MatchPrefix) -> list[Request]:
    """Split a match. The states are in the last chunk, which does not know the matches of the
    others: its reply may exceed them, then the client sends another request."""
    step = max(1, PROBES_PER_CHUNK // len(request.keys))
    chunks: list[Request] = [
        request._replace(namespaces=request.namespaces[part], states=())
        for part in _ranges(len(request.namespaces), step)
    ]
    if request.states:
        chunks.append(request._replace(namespaces=()))
    return chunks


def _matched(replies: list[calls.MatchPrefixReply]) -> calls.MatchPrefixReply:
    matches = [match for reply in replies for match in reply.matches]
    lease_ms = min(reply.lease_ms for reply in replies)
    return calls.MatchPrefixReply(replies[0].epoch, lease_ms, matches, replies[-1].state)


def _found(replies: list[calls.LookupReply]) -> calls.LookupReply:
    *columns, capabilities = zip(*(reply.placements for reply in replies), strict=True)
    sizes, epochs, counters, replicas, segments, offsets = (
        list(chain.from_iterable(parts)) for parts in columns
    )
    made = b"".join(capabilities)
    placements = calls.Placements(sizes, epochs, counters, replicas, segments, offsets, made)
    return calls.LookupReply(replies[0].epoch, min(reply.lease_ms for reply in replies), placements)


def _renew_chunks(request: calls.Renew) -> list[Request]:
    by_key = _chunked_by("keys", "epochs", "counters", "uuids", "offsets")
    rows = by_key(request._replace(tokens=()))
    no_keys = request._replace(keys=(), epochs=(), counters=(), uuids=(), offsets=())
    tokens = _chunked_by("tokens")(no_keys)
    return rows + tokens


def _renewed(replies: list[calls.RenewReply]) -> calls.RenewReply:
    return replies[0]._replace(
        keys_leased=_flat(replies, "keys_leased"),
        tokens_leased=_flat(replies, "tokens_leased"),
        capabilities=_flat(replies, "capabilities"),
    )


def _rows(
    joined: Callable[[list[Any]], Reply], *columns: str, rows_max: int = KEYS_PER_CHUNK
) -> Chunking:
    """Return the splitter of a call with rows in these fields, which is large above
    ``rows_max``."""
    return Chunking(
        lambda request: len(getattr(request, columns[0])) > rows_max,
        _chunked_by(*columns, rows_max=rows_max),
        joined,
    )


def _exists_rows(request: calls.Exists) -> int:
    """Return the keys per chunk. Without leases, twice as many as of ``Lookup`` take the same
    time."""
    return LOOKUPS_PER_CHUNK if request.lease else 2 * LOOKUPS_PER_CHUNK


CHUNKINGS: Final[dict[type, Chunking]] = {
    calls.Exists: Chunking(
        lambda r: len(r.keys) > _exists_rows(r),
        lambda r: _chunked_by("keys", rows_max=_exists_rows(r))(r),
        lambda replies: calls.ExistsReply(_flat(replies, "presence")),
    ),
    calls.Lookup: _rows(_found, "keys", rows_max=LOOKUPS_PER_CHUNK),
    calls.MatchPrefix: Chunking(
        # The search for states reads no more than one namespace, however many there are.
        lambda r: len(r.keys) * (len(r.namespaces) + bool(r.states)) > PROBES_PER_CHUNK,
        _match_chunks,
        _matched,
    ),
    calls.PutEnd: _rows(
        lambda replies: calls.PutEndReply(_flat(replies, "outcomes")),
        "tokens",
        rows_max=PUT_KEYS_MAX,
    ),
    calls.PutRevoke: _rows(
        lambda replies: calls.PutRevokeReply(sum(reply.revoked for reply in replies)),
        "tokens",
        rows_max=PUT_KEYS_MAX,
    ),
    calls.Renew: Chunking(
        lambda r: len(r.keys) + len(r.tokens) > KEYS_PER_CHUNK, _renew_chunks, _renewed
    ),
    calls.Remove: _rows(lambda replies: calls.RemoveReply(_flat(replies, "removed")), "keys"),
    calls.ReportCorrupt: _rows(
        lambda replies: calls.ReportCorruptReply(sum(reply.dropped for reply in replies)),
        "keys",
        "epochs",
        "counters",
        "uuids",
        rows_max=REPORTS_PER_CHUNK,
    ),
}
