"""What capabilities cost: ``python -m bench.capabilities``.

* *seal*: the master makes the capabilities of a batch.
* *mac*: one MAC alone, of the bytes that a capability's is of.
* *read*, *write*: a client's transport reads or writes a batch of objects on a data server, over
  loopback, with the segment's token and with capabilities. Both take turns, some calls at a time,
  so that a busy machine slows both. The difference is what the request's longer records and the
  node's checks cost, on both sides together.

Every number is in ns per object: the median over the calls, then over the rounds.
"""

from __future__ import annotations

import os
import statistics
import struct
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

import click

from kvstore.calls import SegmentInfo
from kvstore.cli.options import json_option
from kvstore.cli.show import print_json
from kvstore.clocks import uptime, uptime_ms
from kvstore.memory.header import extent_bytes
from kvstore.memory.segment import NodeSegment
from kvstore.native import steps
from kvstore.native.kinds import CAPABILITY_BYTES, ReadRow, WriteRow
from kvstore.network.tcp_protocol import Op, holder_key
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.tcp_server import DataServer

BATCHES: Final = (1, 64)
SIZE: Final = 4096
SEGMENT_BYTES: Final = 16 << 20
START: Final = 1 << 20
HOLDER: Final = 7
FOR_MS: Final = 3_600_000
TURN: Final = 100
"""Calls until it is another one's turn: the server's thread of a connection has to find a core."""


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--calls", type=click.IntRange(min=1), default=2_000, show_default=True,
              help="Calls per row and round.")  # fmt: skip
@json_option
def main(rounds: int, calls: int, as_json: bool) -> None:
    """Measure what capabilities cost, on the master, the client and the node."""
    segment = NodeSegment.create(f"bench-{os.getpid()}", SEGMENT_BYTES)
    with closing(segment):
        servers = [DataServer([segment], "127.0.0.1", capabilities=each) for each in (False, True)]
        for server in servers:
            server.start()
        try:
            ports = [server.port for server in servers]
            found = [_round(segment, ports, calls) for _ in range(rounds)]
        finally:
            for server in servers:
                server.stop()
    rows = {name: round(statistics.median(each[name] for each in found)) for name in found[0]}
    if as_json:
        print_json(rows)
        return
    for name, ns in rows.items():
        click.echo(f"{name:<24}{ns:>10,} ns per object")


def _round(segment: NodeSegment, ports: list[int], calls: int) -> dict[str, float]:
    """``ports``: of the server without capabilities, and of that with them."""
    mounts = {1: struct.pack("<16sQQ", segment.token, segment.generation, uptime_ms() + FOR_MS)}
    info = _described(segment, ports[0])
    key = holder_key(segment.token, segment.uuid, segment.generation, HOLDER)
    held = _described(segment, ports[1])._replace(token=key, holder=HOLDER)
    found = {"mac": _ns([lambda: steps.siphash(segment.token, bytes(64))], calls)[0]}
    with closing(TcpTransport()) as transport:
        for batch in BATCHES:
            offsets = [START + index * extent_bytes(SIZE) for index in range(batch)]
            columns = [1] * batch, offsets, [SIZE] * batch

            def seal(op: Op, columns: tuple[list[int], list[int], list[int]] = columns) -> bytes:
                return steps.seal(mounts, *columns, HOLDER, 0, op)

            found[f"seal {batch}"] = _ns([lambda: seal(Op.READ)], calls)[0] / batch
            for op in (Op.WRITE, Op.READ):
                with_token = moving(transport, info, op, offsets, SIZE, b"")
                with_capabilities = moving(transport, held, op, offsets, SIZE, seal(op))
                plain, sealed = _ns([with_token, with_capabilities], calls)
                found[f"{op.name.lower()} {batch}, token"] = plain / batch
                found[f"{op.name.lower()} {batch}, capabilities"] = sealed / batch
    return found


def moving(
    transport: TcpTransport, info: SegmentInfo, op: Op, offsets: list[int], size: int, column: bytes
) -> Callable[[], object]:
    """A call that moves an object of so many bytes at each offset."""
    cut = range(0, CAPABILITY_BYTES * len(offsets), CAPABILITY_BYTES)
    capabilities = [column[at : at + CAPABILITY_BYTES] for at in cut]
    data = [[memoryview(bytearray(size))] for _ in offsets]
    rows = zip(offsets, data, capabilities, strict=True)
    if op is Op.READ:
        reads: list[ReadRow] = [(at, size, 1, 1, b"key", into, shown) for at, into, shown in rows]
        return lambda: transport.read_objects(info, "bench", reads, True, uptime() + 30)
    writes: list[WriteRow] = [
        (at, size, 1, 1, b"key", source, b"", b"d", shown) for at, source, shown in rows
    ]
    return lambda: transport.write_objects(info, "bench", writes, uptime() + 30)


def _ns(some: list[Callable[[], object]], calls: int) -> list[float]:
    """The median time of each of these, which take turns."""
    took: list[list[int]] = [[] for _ in some]
    for _ in range(-(-calls // TURN)):
        for index, call in enumerate(some):
            for _ in range(TURN):
                started = time.perf_counter_ns()
                call()
                took[index].append(time.perf_counter_ns() - started)
    return [statistics.median(each) for each in took]


def _described(segment: NodeSegment, port: int) -> SegmentInfo:
    return SegmentInfo(
        1, segment.node, "", segment.size, segment.uuid, "", f"127.0.0.1:{port}", segment.token,
        segment.seed, segment.generation,
    )  # fmt: skip


if __name__ == "__main__":
    main()
