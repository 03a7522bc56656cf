"""Capabilities as a master makes them, for tests that have no master."""

from __future__ import annotations

import struct

from kvstore.calls import SegmentInfo
from kvstore.memory.header import HEADER_BYTES
from kvstore.native import pure_python
from kvstore.runtime import tcp_protocol as protocol
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import Extent, Op

HOLDER = 0x1234_5678_9ABC_DEF0


def in_ms(seconds: float = 60.0) -> int:
    """An expiry: so long from now, on this host's clock."""
    return int((uptime() + seconds) * 1000)


def extent(
    token: bytes, generation: int, offset: int, size: int, op: int, *, holder: int = HOLDER,
    expires_ms: int | None = None, order: int = 0,
) -> Extent:  # fmt: skip
    """The extent of a payload of ``size`` bytes, with a capability for ``op``."""
    expires_ms = in_ms() if expires_ms is None else expires_ms
    mount = struct.pack("<16sQQ", token, generation, expires_ms)
    capability = pure_python.issue_capabilities(
        {1: mount}, [1], [offset], [size], holder, order, op
    )
    return Extent(offset, HEADER_BYTES + size, capability)


def held(segment: SegmentInfo, holder: int = HOLDER) -> SegmentInfo:
    """The segment as a master describes it to this holder."""
    key = protocol.holder_key(segment.token, segment.uuid, segment.generation, holder)
    return segment._replace(token=key, holder=holder)


def capability(segment: SegmentInfo, offset: int, size: int, op: Op, holder: int = HOLDER) -> bytes:
    """For an extent of the segment, which is described with its token."""
    token, generation = segment.token, segment.generation
    return extent(token, generation, offset, size, op, holder=holder).capability
