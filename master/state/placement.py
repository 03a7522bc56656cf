"""Chooses where a new object goes: the parent's segment, the putter's host, then most room.

If one node holds a whole chain, a load of the chain is one request, and the death of the node costs
one chain instead of tearing a hole in many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.master.state.records import MountedSegment


def preferred(
    segments: Iterable[MountedSegment], *, near: MountedSegment | None, host: str
) -> Iterator[MountedSegment]:
    """``segments`` in order of preference; ``near`` must be one of them, if given."""
    if near is not None:
        yield near  # it usually has room, and then the caller stops here
    yield from sorted(
        (segment for segment in segments if segment is not near),
        key=lambda segment: (
            segment.node.host != host,
            -segment.allocator.free_bytes,
            segment.segment_id,
        ),
    )
