"""Mappings and connections of segments that are gone are given back."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

from kvstore.calls import SegmentInfo
from kvstore.memory.segment import NodeSegment
from kvstore.network.host import host_id
from kvstore.transport.shm import ShmTransport
from tests.unit.client.world import segment

NAME = f"sweep-{os.getpid()}"
SIZE = 4 << 20


def mapped() -> int:
    """How often this process maps the segment, besides its owner."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/kvstore.{NAME}" in line for line in lines)


def place(owner: NodeSegment) -> SegmentInfo:
    return segment(1)._replace(
        uuid=owner.uuid, size=owner.size, generation=owner.generation, host=host_id(),
        shm_name=owner.shm_name,
    )  # fmt: skip


def test_a_mapping_goes_when_its_segment_does_and_no_view_holds_it() -> None:
    with closing(ShmTransport()) as transport:
        owner = NodeSegment.create(NAME, SIZE)
        info = place(owner)
        view = transport.memory(info)[4096:4106]
        transport.sweep()
        assert transport.memory(info)
        owner.close()
        assert mapped() == 1
        transport.sweep()
        assert mapped() == 1
        assert bytes(view) == bytes(10), "what was handed out stays"
        view.release()
        del view
        assert mapped() == 0
        assert not transport.reaches(info)


def test_a_mapping_goes_when_another_segment_has_its_name() -> None:
    with closing(ShmTransport()) as transport:
        owner = NodeSegment.create(NAME, SIZE)
        info = place(owner)
        assert transport.reaches(info)
        os.rename(f"/dev/shm/kvstore.{NAME}", f"/dev/shm/kvstore.{NAME}-old")
        os.rename(f"/dev/shm/kvstore.{NAME}-old", f"/dev/shm/kvstore.{NAME}")
        transport.sweep()
        assert transport.memory(info), "it is the same one"
        os.unlink(f"/dev/shm/kvstore.{NAME}")  # as who takes its place after a kill
        with closing(NodeSegment.create(NAME, SIZE)):
            transport.sweep()
            assert mapped() == 2, "the two owners'"
        owner.close()
