"""The inventory of a segment: its objects, as reported to a master that does not know them.

The node scans the segment for headers; of two extents that overlap, the newer counts. It reports
the newest objects first, but each after its ancestors, in messages of which a few are under way.

The functions here may take long, and ``kvstore.node.agent`` calls them in a separate thread. Of
each object they keep only the fields of its header, some 400 bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

from kvstore.calls import NodeClaims
from kvstore.limits import Key, Namespace
from kvstore.memory import header as layout
from kvstore.memory.header import Header, extent_bytes
from kvstore.memory.segment import NodeSegment
from kvstore.node.stamps import Stamps
from kvstore.texts import field_text

log = logging.getLogger("kvstore.node")

ROWS_PER_MESSAGE: Final = 512

Found = tuple[int, Header]
"""Offset and header."""


Attempt = tuple[int, int, int]
"""Offset, epoch and counter of a put."""


def take(segment: NodeSegment, given_up: Collection[Attempt] = ()) -> list[Found]:
    """Every object in the segment, in the order in which the node reports them.

    The segment must be fenced first, so that no client writes to it. Wipes headers that the extent
    of a newer one overlaps, and headers of puts that were given up, whose bytes may have arrived
    since.
    """
    if given_up:
        offsets, epochs, counters = zip(*given_up, strict=True)
        if wiped := segment.wipe(offsets, epochs, counters):
            log.info("late_headers_wiped node=%s count=%d", segment.node, wiped)
    found, overlapped = apart(segment.scan())
    if overlapped:
        log.warning("overlapping_headers_wiped node=%s count=%d", segment.node, len(overlapped))
        segment.wipe(
            [offset for offset, _ in overlapped],
            [header.epoch for _, header in overlapped],
            [header.counter for _, header in overlapped],
        )
    stamps = segment.believed
    if isinstance(stamps, Stamps):
        if refused := stamps.take_refused():
            log.warning("unstamped_headers node=%s count=%d", segment.node, refused)
        if adopted := stamps.adopt(segment, found):
            log.info("headers_stamped node=%s count=%d", segment.node, adopted)
    return in_order(found)


def apart(found: Iterator[Found]) -> tuple[list[Found], list[Found]]:
    """Splits ``found``, which is in order of offset, into the objects to keep, which are the newest
    of those that overlap, and the others."""
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


def verified(segment: NodeSegment, found: list[Found]) -> list[Found]:
    """The objects whose payload matches the checksum in the header. Other objects' headers are
    wiped and logged, and those objects are not reported."""
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
            field_text(header.namespace),
            header.key.hex(),
            offset,
        )
        segment.wipe([offset], [header.epoch], [header.counter])
    return good


def in_order(found: list[Found]) -> list[Found]:
    """Newest first, but each object after its ancestors: the newest objects are available first,
    and a chain is complete from its first block on."""
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
    """One message about ``found``. ``index``: the number of the offered segment."""
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
