"""What a segment holds, as its node tells a master that does not know it.

    scan for headers ──► of two that overlap, the newer ──► newest first, behind its ancestors
                                                                 └──► messages, a few at a time

Everything here may take long and runs in a thread of its own; the headers' fields are all that is
kept of an object, some 400 bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.calls import NodeClaims
from kvstore.limits import Key, Namespace
from kvstore.memory import header as layout
from kvstore.memory.header import Header, extent_bytes
from kvstore.memory.segment import Segment

log = logging.getLogger("kvstore.node")

ROWS_PER_MESSAGE: Final = 512

Found = tuple[int, Header]
"""Offset and header."""


def take(segment: Segment) -> list[Found]:
    """Every object in the segment, in the order in which it is to be told.

    Nobody may write there meanwhile: fence first. Headers that a newer one's extent overlaps are
    wiped.
    """
    found, overlapped = apart(layout.scan(segment.memory, segment.seed))
    if overlapped:
        log.warning("overlapping_headers_wiped node=%s count=%d", segment.node, len(overlapped))
        segment.wipe(
            [offset for offset, _ in overlapped],
            [header.epoch for _, header in overlapped],
            [header.counter for _, header in overlapped],
        )
    return in_order(found)


def apart(found: Iterator[Found]) -> tuple[list[Found], list[Found]]:
    """Of those that overlap the newest; and the others. ``found`` is in order of offset."""
    kept: list[Found] = []
    lost: list[Found] = []
    for each in found:
        offset, header = each
        while kept and kept[-1][0] + extent_bytes(kept[-1][1].payload_size) > offset:
            if _version(kept[-1][1]) >= _version(header):
                lost.append(each)
                break
            lost.append(kept.pop())
        else:
            kept.append(each)
    return kept, lost


def verified(segment: Segment, found: list[Found]) -> list[Found]:
    """Those whose payload has the checksum that its header says; the headers of others are wiped,
    logged and not told."""
    good: list[Found] = []
    memory = segment.memory
    for each in found:
        offset, header = each
        start = offset + layout.HEADER_BYTES
        payload = memory[start : start + header.payload_size]
        if xxh3_64_intdigest(payload) == header.payload_checksum:
            good.append(each)
            continue
        log.warning(
            "corrupt_object_wiped node=%s namespace=%s key=%s offset=%d",
            segment.node,
            header.namespace,
            header.key.hex(),
            offset,
        )
        segment.wipe([offset], [header.epoch], [header.counter])
    return good


def in_order(found: list[Found]) -> list[Found]:
    """The newest first, but each behind its ancestors: so what was used last can be had first,
    and a chain is whole from its first block on."""
    found = sorted(found, key=_version_of, reverse=True)
    by_name: dict[tuple[Namespace, Key], Found] = {}
    for each in reversed(found):
        by_name[each[1].namespace, each[1].key] = each
    told: set[int] = set()
    ordered: list[Found] = []
    for each in found:
        chain: list[Found] = []
        at: Found | None = each
        while at is not None and at[0] not in told:
            told.add(at[0])
            chain.append(at)
            header = at[1]
            at = None if header.parent is None else by_name.get((header.namespace, header.parent))
        ordered += reversed(chain)
    return ordered


def claims(index: int, found: list[Found], *, first: bool, last: bool) -> NodeClaims:
    """One message. ``index``: which of the offered segments."""
    headers = [header for _, header in found]
    namespaces = list(dict.fromkeys(header.namespace for header in headers))
    places = {namespace: place for place, namespace in enumerate(namespaces)}
    return NodeClaims(
        segment=index,
        first=first,
        last=last,
        namespaces=namespaces,
        namespace_of=[places[header.namespace] for header in headers],
        keys=[header.key for header in headers],
        parents=[header.parent for header in headers],
        sizes=[header.payload_size for header in headers],
        epochs=[header.epoch for header in headers],
        counters=[header.counter for header in headers],
        offsets=[offset for offset, _ in found],
    )


def _version(header: Header) -> tuple[int, int]:
    return header.epoch, header.counter


def _version_of(found: Found) -> tuple[int, int]:
    return _version(found[1])
