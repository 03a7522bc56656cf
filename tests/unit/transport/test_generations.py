"""A segment that was mounted anew is not touched under its older generation: both twins."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

import pytest

from kvstore import native
from kvstore.calls import SegmentInfo
from kvstore.errors import SegmentUnmountedError
from kvstore.memory.segment import OwnedSegment
from kvstore.native import pure_python
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import host_id
from kvstore.runtime.tcp_protocol import (
    STATUS_BYTES,
    Hello,
    Op,
    TransferStatus,
    pack_hello,
    pack_request,
    unpack_status,
)
from kvstore.transport import shm, tcp_connection
from kvstore.transport.common import RangeCopy
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp_server import DataServer

AT = 8_192


@pytest.fixture(params=[native.steps, pure_python], ids=["built", "slow"], autouse=True)
def twin(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (shm, tcp_connection):
        monkeypatch.setattr(module, "steps", request.param)


@pytest.fixture
def segment() -> Iterator[OwnedSegment]:
    with contextlib.closing(OwnedSegment.create(f"generations-{os.getpid()}", 1 << 20)) as segment:
        yield segment


def test_shared_memory_under_an_older_generation_is_gone(segment: OwnedSegment) -> None:
    info = SegmentInfo(
        1, segment.node, host_id(), segment.size, segment.uuid, segment.shm_name, "", segment.token,
        segment.seed, segment.generation,
    )  # fmt: skip
    transport = ShmTransport()
    soon = uptime() + 10
    row = AT, 5, 1, 1, b"k"
    data = memoryview(bytearray(b"datum"))
    transport.write(info, [RangeCopy(AT, data)], soon)
    segment.bump_generation()

    with pytest.raises(SegmentUnmountedError):
        transport.read(info, [RangeCopy(AT, data)], soon)
    with pytest.raises(SegmentUnmountedError):
        transport.write(info, [RangeCopy(AT, memoryview(b"other"))], soon)
    with pytest.raises(SegmentUnmountedError):
        transport.read_objects(info, "ns", [(*row, [data], b"")], True, soon)
    with pytest.raises(SegmentUnmountedError):
        transport.write_objects(info, "ns", [(*row, [data], b"", b"d", b"")], soon)
    with pytest.raises(SegmentUnmountedError):
        transport.memory(info)
    assert bytes(segment.memory[AT : AT + 5]) == b"datum"
    transport.close()


@pytest.mark.parametrize("op", list(Op))
def test_a_request_under_an_older_generation_is_refused(segment: OwnedSegment, op: Op) -> None:
    """Also before the node has ended the connection."""
    server = DataServer([segment], "127.0.0.1")
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
        sock.sendall(pack_hello(Hello(segment.uuid, segment.token, segment.generation)))
        assert unpack_status(sock.recv(STATUS_BYTES, socket.MSG_WAITALL)) is TransferStatus.OK
        segment.bump_generation()
        sock.sendall(pack_request(op, [(AT, 1)]) + (b"x" if op is Op.WRITE else b""))
        assert (
            unpack_status(sock.recv(STATUS_BYTES, socket.MSG_WAITALL)) is TransferStatus.UNMOUNTED
        )
        assert segment.memory[AT] == 0
    server.stop()
