"""The inventory of a segment: its objects, as reported to a master that does not know them.

The node scans the segment for headers; of two extents that overlap, the newer counts. It reports
the newest objects first, but each after its ancestors, in messages of which a few are under way.

Every client that may write somewhere can make a valid header: within its own extents or, if it has
the memory mapped, anywhere. It may name an object that the master did not grant: of another
namespace, of a version above all others, or of a size that covers its neighbours. So with
identities a node believes those headers alone whose stamp its master has made
(``kvstore.memory.header``). Memory of a process without an identity has no stamps: a node with one
discards it.

With stamps the newer need not be the later: a copy for repair keeps the version of its object. An
engine could write the header of an object that was there before, and read
the copy as part of that. So a header which covers an older one counts only if its payload is right:
the engine would have to know the bytes between, a stamp among them, to make up the checksum.

The functions here may take long, and ``kvstore.node.agent`` calls them in a separate thread. Of
each object they keep only the fields of its header, some 400 bytes.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Collection, Iterator

from kvstore.calls import NodeClaims
from kvstore.limits import Key, Namespace
from kvstore.memory import header as layout
from kvstore.memory.header import Header, extent_bytes
from kvstore.memory.medium import Medium
from kvstore.native import steps
from kvstore.runtime.formatting import field_text

log = logging.getLogger("kvstore.node")

Found = tuple[int, Header]
"""Offset and header."""


Attempt = tuple[int, int, int]
"""Offset, epoch and counter of a put."""


def enable_header_macs(segment: Medium) -> None:
    """Has the master make stamps for this segment.

    Raises:
        StartupError: the key cannot be kept.
    """
    is_kept = segment.traits.survives_process
    key = segment.keep_private().now.key if is_kept else secrets.token_bytes(16)
    segment.header_mac_key, segment.header_filter = key, HeaderVerifier(key)


class HeaderVerifier:
    """See ``kvstore.memory.header.ExpectedBytes``. One thread at a time uses it."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._refused = 0

    def __call__(self, offset: int, header: Header, stamp: bytes) -> bool:
        is_right = hmac.compare_digest(self._made(offset, header), stamp)
        self._refused += not is_right
        return is_right

    def take_rejected(self) -> int:
        """How many valid headers lacked their stamp since it was last asked."""
        refused, self._refused = self._refused, 0
        return refused

    def _made(self, offset: int, header: Header) -> bytes:
        name, key, _, size, epoch, counter, _, _ = header
        columns = [offset], [size], [epoch], [counter], [name], [key]
        return steps.stamp({0: self.key}, [0], *columns)


def build_inventory(segment: Medium, given_up: Collection[Attempt] = ()) -> list[Found]:
    """Every object in the segment, in the order in which the node reports them.

    The segment must be fenced first, so that no client writes to it. Wipes headers that the extent
    of a newer one overlaps, and headers of puts that were given up, whose bytes may have arrived
    since.
    """
    if given_up:
        offsets, epochs, counters = zip(*given_up, strict=True)
        if wiped := segment.wipe(offsets, epochs, counters):
            log.info("late_headers_wiped node=%s count=%d", segment.node, wiped)
    stamps = segment.header_filter
    is_right = (lambda _: True) if stamps is None else _ChecksumCache(segment)
    found, overlapped = resolve_overlaps(segment.scan(), is_right)
    if overlapped:
        log.warning("overlapping_headers_wiped node=%s count=%d", segment.node, len(overlapped))
        segment.wipe(
            [offset for offset, _ in overlapped],
            [header.epoch for _, header in overlapped],
            [header.counter for _, header in overlapped],
        )
    if isinstance(stamps, HeaderVerifier) and (refused := stamps.take_rejected()):
        log.warning("headers_without_mac node=%s count=%d", segment.node, refused)
    return sort_for_report(found)


def resolve_overlaps(
    found: Iterator[Found], is_right: Callable[[Found], bool]
) -> tuple[list[Found], list[Found]]:
    """Splits ``found``, which is in order of offset, into the objects to keep, which are the newest
    of those that overlap, and the others. ``is_right``: whether an object that covers the beginning
    of an older one is to be kept all the same."""
    kept: list[Found] = []
    lost: list[Found] = []
    for each in found:
        offset, header = each
        while kept and kept[-1][0] + extent_bytes(kept[-1][1].payload_size) > offset:
            if _version(kept[-1][1]) >= _version(header) and is_right(kept[-1]):
                lost.append(each)
                break
            lost.append(kept.pop())
        else:
            kept.append(each)
    return kept, lost


class _ChecksumCache:
    """Says whether the payload of an object matches its checksum. Reads each object once, and not
    more bytes in all than the segment has: what is beyond that does not match. Where nobody lies,
    the objects that are asked for do not overlap."""

    def __init__(self, segment: Medium) -> None:
        self._segment = segment
        self._bytes_left = segment.size
        self._known: dict[int, bool] = {}

    def __call__(self, found: Found) -> bool:
        offset, header = found
        if offset not in self._known:
            self._bytes_left -= header.payload_size
            self._known[offset] = self._bytes_left >= 0 and is_whole(self._segment, found)
        return self._known[offset]


def is_whole(segment: Medium, found: Found) -> bool:
    """Whether the payload matches the checksum in the header."""
    offset, header = found
    start = offset + layout.HEADER_BYTES
    return segment.checksum(start, header.payload_size) == header.payload_checksum


def verified(segment: Medium, found: list[Found]) -> list[Found]:
    """The objects whose payload matches the checksum in the header. Other objects' headers are
    wiped and logged, and those objects are not reported."""
    good: list[Found] = []
    for each in found:
        if is_whole(segment, each):
            good.append(each)
            continue
        offset, header = each
        log.warning(
            "corrupt_object_wiped node=%s namespace=%s key=%s offset=%d",
            segment.node,
            field_text(header.namespace),
            header.key.hex(),
            offset,
        )
        segment.wipe([offset], [header.epoch], [header.counter])
    return good


def sort_for_report(found: list[Found]) -> list[Found]:
    """Newest first, but each object after its ancestors: the newest objects are available first,
    and a chain is complete from its first block on."""
    found = sorted(found, key=lambda each: _version(each[1]), reverse=True)
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
