"""What encryption of a node's data port costs: ``python -m bench.encryption``.

A node process serves the same segment three times: with its token (*plain*), with capabilities, and
with capabilities within TLS. This process reads and writes objects there, over loopback, as a
client's transport does. The three take turns within each round, so that a busy machine slows all.

* *bulk*: 64 objects of 1 MiB in one call, in GB/s, and its share of *plain* in the same round.
* *batch*: 64 objects of 4 KiB in one call, *one*: a single one, in us per object.
* *connect*: a connection until it is greeted, in ms.
* *processor*: seconds that client and node used per GB of *bulk* reads, both together.

Each number is the median over the rounds, with the smallest and the largest.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import click

from bench.capabilities import moving
from kvstore.auth import authority
from kvstore.auth.certificates import Wanted
from kvstore.auth.credentials import Credentials
from kvstore.auth.data_port import ClientEnd, NodeEnd
from kvstore.auth.revoked import Revoked
from kvstore.bench.timing import processor_seconds, timed
from kvstore.calls import SegmentInfo
from kvstore.cli.options import json_option
from kvstore.cli.show import print_json
from kvstore.clocks import uptime, uptime_ms
from kvstore.memory.header import extent_bytes
from kvstore.memory.segment import NodeSegment
from kvstore.native import steps
from kvstore.network.tcp_protocol import Op, holder_key
from kvstore.transport.tcp import TcpTransport
from kvstore.transport.tcp_client import ClientConnection
from kvstore.transport.tcp_server import DataServer

MIB: Final = 1 << 20
SEGMENT_BYTES: Final = 128 * MIB
HOLDER: Final = 7
FOR_MS: Final = 3_600_000
SHAPES: Final = {"bulk": (MIB, 64, 8), "batch": (4096, 64, 40), "one": (4096, 1, 100)}
"""Bytes of an object, objects in a call, calls in a turn."""
CONNECTS: Final = 20


WAYS: Final[dict[str, tuple[bool, bool]]] = {
    "plain": (False, False), "capabilities": (False, True), "tls": (True, True),
}  # fmt: skip


class Way(NamedTuple):
    segment: SegmentInfo
    token: bytes
    """Of the segment, with which capabilities are made."""
    transport: TcpTransport
    tls: ClientEnd | None


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@json_option
def main(rounds: int, as_json: bool) -> None:
    """Measure what encryption of bulk bytes costs, on client and node."""
    found: dict[str, list[float]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        node, client = _identities(folder)
        segments = stack.enter_context(_node(node))
        tls = ClientEnd(Credentials(client))
        ways = [Way(each, segments[0].token, TcpTransport(tls=tls), tls) for each in segments]
        for way in ways:
            stack.enter_context(closing(way.transport))
        for _ in range(rounds):
            for name, value in _round(ways):
                found.setdefault(name, []).append(value)
    if as_json:
        print_json({name: sorted(values) for name, values in found.items()})
        return
    for name, values in found.items():
        middle = statistics.median(values)
        click.echo(f"{name:<34}{middle:>9.2f}   {min(values):.2f} to {max(values):.2f}")


def _identities(folder: Path) -> tuple[str, str]:
    """Files of a node and of an engine."""
    now = datetime.now(UTC)
    authority.create(folder / "authority", now)
    made = []
    for wanted in (Wanted("node", ("node",)), Wanted("engine", ("engine",), ("*",), ("*",))):
        leaf = authority.issue(folder / "authority", wanted, now)
        path = folder / wanted.name
        authority.write_file(path, authority.content_of(leaf, "bench"))
        made.append(str(path))
    return made[0], made[1]


@contextmanager
def _node(auth: str) -> Iterator[list[SegmentInfo]]:
    """A process that serves a segment: the segment as each of ``WAYS`` sees it."""
    name = f"bench-{os.getpid()}"
    command = [sys.executable, "-m", __spec__.name, "--serve", name, auth]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield list(_described(name, json.loads(process.stdout.readline())))
        finally:
            process.stdin.close()
            process.wait(30)


def _described(name: str, told: dict[str, Any]) -> Iterator[SegmentInfo]:
    uuid, token, generation = (
        bytes.fromhex(told["uuid"]),
        bytes.fromhex(told["token"]),
        told["generation"],
    )
    key = holder_key(token, uuid, generation, HOLDER)
    for (encrypts, capabilities), port in zip(WAYS.values(), told["ports"], strict=True):
        is_holder = capabilities
        yield SegmentInfo(
            1, name, "", SEGMENT_BYTES, uuid, "", f"127.0.0.1:{port}", key if is_holder else token,
            told["seed"], generation, holder=HOLDER * is_holder, encrypts=encrypts,
        )  # fmt: skip


def _serve(name: str, auth: str) -> None:
    tls = NodeEnd(Credentials(auth), Revoked(""))
    with closing(NodeSegment.create(name, SEGMENT_BYTES)) as segment:
        servers = [
            DataServer(
                [segment], "127.0.0.1", capabilities=capabilities,
                tls=tls if encrypts else None,
            )
            for encrypts, capabilities in WAYS.values()
        ]  # fmt: skip
        for server in servers:
            server.start()
        told = {
            "uuid": segment.uuid.hex(), "token": segment.token.hex(), "seed": segment.seed,
            "generation": segment.generation, "ports": [server.port for server in servers],
        }  # fmt: skip
        print(json.dumps(told), flush=True)
        sys.stdin.read()
        for server in servers:
            server.stop()


def _round(ways: list[Way]) -> Iterator[tuple[str, float]]:
    for shape, (size, count, calls) in SHAPES.items():
        for op in (Op.WRITE, Op.READ):
            verb = f"{shape} {op.name.lower()}"
            took: dict[str, float] = {}
            for name, way in zip(WAYS, ways, strict=True):
                call = _call(way, op, size, count)
                call()  # connects
                before = processor_seconds(os.getpid())
                took[name] = _median_s(call, calls)
                used = processor_seconds(os.getpid()) - before
                if shape == "bulk":
                    yield f"{verb}, {name}, GB/s", size * count / took[name] / 1e9
                    if op is Op.READ:
                        gigabytes = size * count * calls / 1e9
                        yield f"processor, {name}, s/GB", used / gigabytes
                else:
                    yield f"{verb}, {name}, us", took[name] / count * 1e6
            if shape == "bulk":
                yield f"{verb}, tls of plain, %", 100 * took["plain"] / took["tls"]
    for name, way in zip(WAYS, ways, strict=True):

        def connect(way: Way = way) -> None:
            connection = ClientConnection(way.segment, tls=way.tls)
            connection.greet(uptime() + 10)
            connection.close()

        yield f"connect, {name}, ms", _median_s(connect, CONNECTS) * 1e3


def _call(way: Way, op: Op, size: int, count: int) -> Callable[[], object]:
    """A call that moves so many objects."""
    offsets = [MIB + index * extent_bytes(size) for index in range(count)]
    told, column = way.segment, b""
    if told.holder:
        mounts = {1: struct.pack("<16sQQ", way.token, told.generation, uptime_ms() + FOR_MS)}
        column = steps.seal(mounts, [1] * count, offsets, [size] * count, HOLDER, 0, op)
    return moving(way.transport, told, op, offsets, size, column)


def _median_s(call: Callable[[], object], calls: int) -> float:
    return statistics.median(timed(lambda _: call(), math.inf, calls))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        _serve(*sys.argv[2:4])
    else:
        main()
