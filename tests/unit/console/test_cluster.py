"""What the doctor says of a node on this host."""

from __future__ import annotations

import os
from pathlib import Path

from kvstore.calls import SegmentInfo
from kvstore.console.diagnostics.cluster import by_shm
from kvstore.memory.segment import OwnedSegment
from kvstore.runtime.host import SHM_DIRECTORY, host_id


def test_a_file_that_was_truncated_is_named() -> None:
    segment = OwnedSegment.create(f"doctor-{os.getpid()}", 1 << 20)
    info = SegmentInfo(
        1, segment.node, host_id(), segment.size, segment.uuid, segment.shm_name, "", segment.token,
        segment.seed, segment.generation,
    )  # fmt: skip
    try:
        assert [finding.state for finding in by_shm(info)] == ["ok"]
        os.truncate(Path(SHM_DIRECTORY, segment.shm_name), 1 << 19)
        (finding,) = by_shm(info)
        assert (finding.state, "524288 of 1048576" in finding.found) == ("problem", True)
        assert "--discard" in finding.advice
    finally:
        os.truncate(Path(SHM_DIRECTORY, segment.shm_name), 1 << 20)
        segment.close()
