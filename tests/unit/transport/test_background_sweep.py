"""Mappings and connections of segments that are gone are given back."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from pathlib import Path

import pytest

from kvstore.calls import SegmentInfo
from kvstore.memory.segment import OwnedSegment
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import host_id
from kvstore.runtime.stream import Stream
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp import TcpTransport
from tests.unit.client.world import segment

NAME = f"sweep-{os.getpid()}"
SIZE = 4 << 20


def mapped() -> int:
    """How often this process maps the segment, besides its owner."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"/kvstore.{NAME}" in line for line in lines)


def place(owner: OwnedSegment) -> SegmentInfo:
    return segment(1)._replace(
        uuid=owner.uuid, size=owner.size, generation=owner.generation, host=host_id(),
        shm_name=owner.shm_name,
    )  # fmt: skip


def test_a_mapping_goes_when_its_segment_does_and_no_view_holds_it() -> None:
    with closing(ShmTransport()) as transport:
        owner = OwnedSegment.create(NAME, SIZE)
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
        assert not transport.can_reach(info)


def test_a_mapping_goes_when_another_segment_has_its_name() -> None:
    with closing(ShmTransport()) as transport:
        owner = OwnedSegment.create(NAME, SIZE)
        info = place(owner)
        assert transport.can_reach(info)
        os.rename(f"/dev/shm/kvstore.{NAME}", f"/dev/shm/kvstore.{NAME}-old")
        os.rename(f"/dev/shm/kvstore.{NAME}-old", f"/dev/shm/kvstore.{NAME}")
        transport.sweep()
        assert transport.memory(info), "it is the same one"
        os.unlink(f"/dev/shm/kvstore.{NAME}")  # as who takes its place after a kill
        with closing(OwnedSegment.create(NAME, SIZE)):
            transport.sweep()
            assert mapped() == 2, "the two owners'"
        owner.close()


def test_connections_that_a_node_has_ended_are_closed() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        closing(TcpTransport()) as transport,
    ):
        info = segment(1)._replace(address=f"127.0.0.1:{server.getsockname()[1]}")
        key = "a", info.uuid, 1, 0, b""
        connection = transport._take(key, info, 1e18, None)[1]
        pool = transport._pools[key]
        ours, theirs = socket.create_connection(server.getsockname()), server.accept()[0]
        connection._stream = Stream(ours)
        transport._give_back(key, pool, connection, is_usable=True)
        transport.sweep()
        assert pool.idle == [connection]
        theirs.close()
        deadline = uptime() + 10
        while not connection.has_ended:
            assert uptime() < deadline
            time.sleep(0.001)
        transport.sweep()
        assert ours.fileno() == -1
        assert not transport._pools


def test_the_log_tells_once_of_a_segment_of_this_host_that_is_not_mapped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here = segment(1)._replace(host=host_id(), shm_name=f"kvstore.{NAME}-gone", uuid=b"a" * 16)
    elsewhere = here._replace(host="another", uuid=b"b" * 16)
    with closing(ShmTransport()) as transport:
        for _ in range(3):
            assert not transport.can_reach(here)
            assert not transport.can_reach(elsewhere)
            transport.sweep()
    (record,) = caplog.records
    assert f"kvstore.{NAME}-gone is not here" in record.getMessage()
