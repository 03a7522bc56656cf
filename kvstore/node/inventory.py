"""The inventory of a segment: its objects, as reported to a master that does not know them.

The node scans the segment for headers; of two extents that overlap, the newer counts. It reports
the newest objects first, but each after its ancestors.

A client that may write can make a valid header in its extents or, if it maps the memory, anywhere:
of another namespace, with a version above all others, or a size that covers its neighbours. So with
authentication a node accepts only headers with a MAC of its master (``kvstore.memory.header``), and
discards memory of a process without an identity, which has no MACs.

With MACs the newer need not be the later: a copy for repair keeps the version of its object. An
engine could write the header of an earlier object, and read the copy as part of that. So a header
that covers an older one counts only if its payload matches the checksum: to forge it, the engine
would have to know the bytes between, including a MAC.

``kvstore.node.agent`` calls the functions in a separate thread. They keep some 400 bytes an object.
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
    """Sets the key of this segment's header MACs. Raises StartupError: it cannot be kept."""
    is_kept = segment.traits.survives_process
    key = segment.keep_private().now.key if is_kept else secrets.token_bytes(16)
    verifier = HeaderVerifier(key)
    segment.header_mac_key = key
    segment.header_filter, segment.header_signer = verifier, verifier.sign


class HeaderVerifier:
    """A ``kvstore.memory.header.HeaderFilter``. One thread at a time uses it."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._rejected = 0

    def __call__(self, offset: int, header: Header, header_mac: bytes) -> bool:
        is_valid = hmac.compare_digest(self.sign(offset, header), header_mac)
        self._rejected += not is_valid
        return is_valid

    def sign(self, offset: int, header: Header) -> bytes:
        name, key, _, size, epoch, counter, _, _ = header
        columns = [offset], [size], [epoch], [counter], [name], [key]
        return steps.compute_header_macs({0: self.key}, [0], *columns)

    def take_rejected(self) -> int:
        """The number of valid headers without a valid MAC since the last call."""
        rejected, self._rejected = self._rejected, 0
        return rejected


def build_inventory(segment: Medium, given_up: Collection[Attempt] = ()) -> list[Found]:
    """Lists the objects in the segment, in the order of the report. The segment must be fenced.

    Wipes headers that a newer extent overlaps, and headers of abandoned puts (``given_up``), whose
    bytes may have arrived since.
    """
    if given_up:
        offsets, epochs, counters = zip(*given_up, strict=True)
        if wiped := segment.wipe(offsets, epochs, counters):
            log.info("late_headers_wiped node=%s count=%d", segment.node, wiped)
    verifier = segment.header_filter
    is_intact = (lambda _: True) if verifier is None else _ChecksumCache(segment)
    found, overlapped = resolve_overlaps(segment.scan(), is_intact)
    if overlapped:
        log.warning("overlapping_headers_wiped node=%s count=%d", segment.node, len(overlapped))
        segment.wipe(
            [offset for offset, _ in overlapped],
            [header.epoch for _, header in overlapped],
            [header.counter for _, header in overlapped],
        )
    if isinstance(verifier, HeaderVerifier) and (rejected := verifier.take_rejected()):
        log.warning("headers_without_mac node=%s count=%d", segment.node, rejected)
    return sort_for_report(found)


def resolve_overlaps(
    found: Iterator[Found], is_intact: Callable[[Found], bool]
) -> tuple[list[Found], list[Found]]:
    """Splits objects in order of offset into the newest of those that overlap, and the others.
    ``is_intact`` decides whether an object that covers the start of an older one is kept."""
    kept: list[Found] = []
    lost: list[Found] = []
    for row in found:
        offset, header = row
        while kept and kept[-1][0] + extent_bytes(kept[-1][1].payload_size) > offset:
            if _version(kept[-1][1]) >= _version(header) and is_intact(kept[-1]):
                lost.append(row)
                break
            lost.append(kept.pop())
        else:
            kept.append(row)
    return kept, lost


class _ChecksumCache:
    """Checks payloads against their checksums. Reads each object once, and no more bytes in total
    than the segment has, beyond which no payload matches: honest objects do not overlap."""

    def __init__(self, segment: Medium) -> None:
        self._segment = segment
        self._bytes_left = segment.size
        self._known: dict[int, bool] = {}

    def __call__(self, found: Found) -> bool:
        offset, header = found
        if offset not in self._known:
            self._bytes_left -= header.payload_size
            self._known[offset] = self._bytes_left >= 0 and is_payload_intact(self._segment, found)
        return self._known[offset]


def is_payload_intact(segment: Medium, found: Found) -> bool:
    """Whether the payload matches the checksum in the header."""
    offset, header = found
    start = offset + layout.HEADER_BYTES
    return segment.checksum(start, header.payload_size) == header.payload_checksum


def verified(segment: Medium, found: list[Found]) -> list[Found]:
    """The objects whose payload matches the checksum. Wipes and logs the headers of the others."""
    good: list[Found] = []
    for row in found:
        if is_payload_intact(segment, row):
            good.append(row)
            continue
        offset, header = row
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
    """Sorts the newest first, but each object after its ancestors, so that a chain can be read from
    its first block on."""
    found = sorted(found, key=lambda each: _version(each[1]), reverse=True)
    by_name: dict[tuple[Namespace, Key], Found] = {}
    for each in reversed(found):
        by_name[each[1].namespace, each[1].key] = each
    reported: set[int] = set()
    ordered: list[Found] = []
    for each in found:
        chain: list[Found] = []
        at: Found | None = each
        while at is not None and at[0] not in reported:
            reported.add(at[0])
            chain.append(at)
            header = at[1]
            at = None if header.parent is None else by_name.get((header.namespace, header.parent))
        ordered += reversed(chain)
    return ordered


def claims(index: int, found: list[Found], *, first: bool, last: bool) -> NodeClaims:
    """Builds one message. ``index``: the number of the offered segment."""
    headers = [header for _, header in found]
    namespaces = list(dict.fromkeys(header.namespace for header in headers))
    indices = {namespace: index for index, namespace in enumerate(namespaces)}
    return NodeClaims(
        segment=index, first=first, last=last, namespaces=namespaces,
        namespace_of=[indices[header.namespace] for header in headers],
        keys=[header.key for header in headers], parents=[header.parent for header in headers],
        sizes=[header.payload_size for header in headers],
        epochs=[header.epoch for header in headers],
        counters=[header.counter for header in headers], offsets=[offset for offset, _ in found],
    )  # fmt: skip


def _version(header: Header) -> tuple[int, int]:
    return header.epoch, header.counter
