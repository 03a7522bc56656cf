"""What a member that floods the master costs the others: ``python -m bench.flooding``.

Starts a master with identities and no node. One identity, in a process of its own, asks in a loop
whether 8,192 keys exist, over as many connections to the lane as each row says; it sends without
waiting for replies. Another identity makes calls one by one and measures how long each takes. The
flood and the master share the machine's cores: a row tells what the other member sees, and not what
the master alone costs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import click
import grpc
import grpc.aio

from kvstore import Client, calls
from kvstore.auth.credentials import Credentials, channel_options
from kvstore.clocks import uptime
from kvstore.limits import Key, Namespace
from kvstore.wire.frames import CALL, frame, hello
from kvstore.wire.messages import CALLS, JOIN_METADATA, encode_request

FLOODED: Final = Namespace("flood/kv")
ASKED: Final = "asked/kv"
KEYS: Final = 8_192
WRITE_BYTES: Final = 1 << 20
"""About how many bytes of calls a connection of the flood sends at once."""


GRPC_CALLS: Final = 64
"""Calls of a connection by gRPC that are under way at once."""

Ask = Callable[[bytes], Coroutine[None, None, None]]


@click.command()
@click.option("--connections", default="0,1,8,64", show_default=True,
              help="Of the flood, in the order of the rows.")  # fmt: skip
@click.option("--keys", type=click.IntRange(1, 16_384), default=KEYS, show_default=True,
              help="In each call of the flood.")  # fmt: skip
@click.option("--by", type=click.Choice(["lane", "grpc"]), default="lane", show_default=True,
              help="How the flood's calls come.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0.1), default=5.0, show_default=True,
              help="For each row.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--flood-at", default="", hidden=True)
def main(
    connections: str, keys: int, by: str, seconds: float, as_json: bool, flood_at: str
) -> None:
    """Measure what calls of one identity take while another one floods the master."""
    if flood_at:
        asyncio.run(_flood(flood_at, int(connections), keys, by))
        return
    rows = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        _master(Path(folder)) as (address, files),
        Client(address, auth=files["asked"], namespace=ASKED) as client,
    ):
        for count in map(int, connections.split(",")):
            with _flooding(address, files["flood"], count, keys, by):
                rows[count] = _measured(client, seconds)
    if as_json:
        click.echo(json.dumps(rows))
        return
    click.echo(f"{'flood':>6}{'call':>14}{'calls':>8}{'p50 ms':>10}{'p99 ms':>10}{'longest':>10}")
    for count, found in rows.items():
        for name, (number, p50, p99, longest) in found.items():
            click.echo(f"{count:>6}{name:>14}{number:>8}{p50:>10.2f}{p99:>10.2f}{longest:>10.2f}")


@contextlib.contextmanager
def _master(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A master, its address, and the files of two engines."""
    authority = ["--authority", str(folder / "authority")]

    def auth(*given: str) -> None:
        command = [sys.executable, "-m", "kvstore.cli.main", "auth", *given, *authority]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)

    auth("init")
    auth("issue", "store", "--role", "master", "--role", "node")
    files = {}
    for name in ("flood", "asked"):
        auth("issue", name, "--role", "engine", "--namespace", f"{name}/*")
        files[name] = str(folder / f"{name}.auth")
    command = [sys.executable, "-m", "kvstore.cli.master", "--host", "127.0.0.1", "--port", "0",
               "--http-port", "0", "--auth", str(folder / "store.auth")]  # fmt: skip
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=log)
    try:
        assert process.stdout is not None
        said = next(iter(process.stdout)).decode()
        found = re.search(r"listening on (\S+:\d+) ", said)
        assert found is not None, said
        yield found[1], files
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@contextlib.contextmanager
def _flooding(address: str, file: str, count: int, keys: int, by: str) -> Iterator[None]:
    if not count:
        yield
        return
    command = [sys.executable, "-m", "bench.flooding", "--flood-at", address,
               "--connections", str(count), "--keys", str(keys), "--by", by]  # fmt: skip
    process = subprocess.Popen(
        command, env=os.environ | {"KVSTORE_AUTH": file}, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"floods\n", "no flood"
        yield
    finally:
        process.terminate()
        process.wait()


async def _flood(address: str, count: int, keys: int, by: str) -> None:
    """Asks on ``count`` connections until this process is ended."""
    asked = calls.Exists(FLOODED, [Key(b"%032d" % number) for number in range(keys)])
    with Client(address, namespace=str(FLOODED)) as client:
        client.exists("joined")
        joined = client._stub._link.joined
    assert joined is not None
    ask = _ask_by_grpc(address, joined) if by == "grpc" else _ask_on_lane(joined)
    asking = [asyncio.create_task(ask(encode_request(asked))) for _ in range(count)]
    await asyncio.sleep(1)
    print("floods", flush=True)
    await asyncio.gather(*asking)


def _ask_on_lane(joined: calls.Joined) -> Ask:
    async def ask(payload: bytes) -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(b"\0" + joined.lane_unix.encode())
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        writer.write(hello(joined.lane_token))
        await reader.read(1 << 16)

        async def drop() -> None:
            while await reader.read(1 << 16):
                pass

        one = frame(1, CALL, CALLS[calls.Exists].wire_name, payload)
        many = one * max(1, WRITE_BYTES // len(one))
        dropping = asyncio.create_task(drop())
        while not dropping.done():
            writer.write(many)
            await writer.drain()

    return ask


def _ask_by_grpc(address: str, joined: calls.Joined) -> Ask:
    shown = Credentials(os.environ["KVSTORE_AUTH"]).channel()
    options = [*channel_options(), ("grpc.use_local_subchannel_pool", 1)]
    shows = ((JOIN_METADATA, joined.lane_token),)

    async def ask(payload: bytes) -> None:
        async with grpc.aio.secure_channel(address, shown, options) as channel:
            call: Any = channel.unary_unary(CALLS[calls.Exists].path)

            async def again() -> None:
                while True:
                    with contextlib.suppress(grpc.RpcError):
                        await call(payload, metadata=shows)

            await asyncio.gather(*(again() for _ in range(GRPC_CALLS)))

    return ask


def _measured(client: Client, seconds: float) -> dict[str, tuple[int, float, float, float]]:
    """Number of calls and their times in ms: median, 99th percentile, longest."""
    many = [f"{number:032d}" for number in range(KEYS)]
    found = {}
    for name, asked in {"exists 1": many[:1], "exists 8,192": many}.items():
        times: list[float] = []
        until = uptime() + seconds
        while uptime() < until:
            started = time.perf_counter()
            client.exists_many(asked)
            times.append((time.perf_counter() - started) * 1000)
        found[name] = _row(times)
    return found


def _row(times: Sequence[float]) -> tuple[int, float, float, float]:
    ordered = sorted(times)
    p99 = ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]
    return len(ordered), statistics.median(ordered), p99, ordered[-1]


if __name__ == "__main__":
    main()
