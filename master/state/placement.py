"""Where a new object goes: the parent's segment, then the putter's own host, then most room.

One node that serves a whole chain answers a load in one request, and its death costs one chain
instead of a hole in many.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kvstore.master.state.records import MountedSegment


def preferred(
    segments: Iterable[MountedSegment], *, near: MountedSegment | None, host: str
) -> Iterator[MountedSegment]:
    """``segments`` in order of preference; ``near`` must be one of them, if given."""
    if near is not None:
        yield near  # it mostly has room, and then the caller does not look at the others
    yield from sorted(
        (segment for segment in segments if segment is not near),
        key=lambda segment: (
            segment.node.host != host,
            -segment.allocator.free_bytes,
            segment.segment_id,
        ),
    )
