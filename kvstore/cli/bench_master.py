"""``kvstore bench --master-scale N``: what N objects cost the master.

A real master process is asked by real clients; only the node is make-believe. It mounts a segment
that has a size and no memory, because the master never touches a payload byte: so a million objects
fit on a laptop. Two things are measured:

* ``master_memory``: by how much the master's resident memory grew, per object.
* ``master_pause``: how long it kept a one-key ``exists`` waiting at worst, seen from a client on
  the lane: idle (timers, the collector), and while other clients put, match and remove batches.
  With no objects at all it is measured first, which shows what the machine itself adds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import Progress

from kvstore import calls
from kvstore.bench.ours import own_master
from kvstore.cli.show import size_text
from kvstore.errors import StartupError
from kvstore.limits import PROTOCOL_VERSION, Key, Namespace

if TYPE_CHECKING:
    from kvstore.client.stub import MasterStub

NAMESPACE = Namespace("kvstore-bench")
OBJECT_BYTES = 4096
CHAIN_BLOCKS = 64
"""Objects of one prefix: 1,024 tokens in blocks of 16."""
BATCH = 1_024
PROBE_SECONDS = 10.0
PROBE_PAUSE_S = 0.0005
STEP_PAUSE_S = 0.002
"""Between two steps of the load: hundreds of steps a second are a fleet of engines."""
CALL_SECONDS = 60.0
READY_SECONDS = 60.0
HOST = "bench"


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    system: str = "kvstore"
    op: str = "master_memory"
    objects: int
    bytes_per_object: float
    resident_bytes: int
    put_per_second: float


@dataclass(frozen=True, kw_only=True)
class PauseRow:
    system: str = "kvstore"
    op: str = "master_pause"
    objects: int
    during: str
    """idle, or what other clients do meanwhile."""
    longest_ms: float
    p999_ms: float
    p50_us: float
    probes: int


def measure_master(objects: int, *, as_json: bool) -> None:
    """Runs it, and prints a row as soon as it is measured."""

    def show(row: MemoryRow | PauseRow) -> None:
        if as_json:
            click.echo(json.dumps(asdict(row)))
        elif isinstance(row, MemoryRow):
            click.echo(
                f"{row.objects:,} objects: {row.bytes_per_object:.0f} bytes of master memory each "
                f"({size_text(row.resident_bytes)} resident), put at {row.put_per_second:,.0f}/s"
            )
        else:
            click.echo(
                f"{row.objects:,} objects, {row.during}: longest pause {row.longest_ms:.1f} ms, "
                f"99.9 % within {row.p999_ms:.2f} ms, half within {row.p50_us:.0f} µs"
            )

    with own_master() as (address, pid), _virtual_node(address, objects), _stub(address) as stub:
        show(_pauses(stub, 0, "idle"))
        before = _resident(pid)
        start = time.perf_counter()
        _fill(stub, objects, quiet=as_json)
        seconds = time.perf_counter() - start
        after = _resident(pid)
        show(
            MemoryRow(
                objects=objects,
                bytes_per_object=round((after - before) / objects, 1),
                resident_bytes=after,
                put_per_second=round(objects / seconds, 1),
            )
        )
        show(_pauses(stub, objects, "idle"))
        with _load(address, objects):
            show(_pauses(stub, objects, "put, match and remove in batches"))


def work_forever(address: str, objects: int) -> None:
    """What another client does while pauses are measured; a process of its own.

    Batches of 64 new objects, as one step of an engine puts them, matches of whole chains, and the
    removal of what was put.
    """
    os.nice(10)  # its own need for a core is not the master's pause
    with _virtual_node(address, 1 << 20, name="bench-load"), _stub(address) as stub:
        number = objects
        while True:
            keys = [_key(i) for i in range(number, number + CHAIN_BLOCKS)]
            _put(stub, keys)
            known = [_key(i) for i in range(CHAIN_BLOCKS)]
            match = calls.MatchPrefix([NAMESPACE], known, False)
            for _ in range(10):
                stub.call(match, time.monotonic() + CALL_SECONDS)
            stub.call(calls.Remove(NAMESPACE, keys), time.monotonic() + CALL_SECONDS)
            number += CHAIN_BLOCKS
            time.sleep(STEP_PAUSE_S)


# --- the work ----------------------------------------------------------------------------------


def _key(number: int) -> Key:
    return Key(hashlib.sha256(number.to_bytes(8, "little")).digest())


def _fill(stub: MasterStub, objects: int, *, quiet: bool) -> None:
    console = Console(stderr=True)
    off = quiet or not console.is_terminal
    with Progress(console=console, disable=off, transient=True) as progress:
        task = progress.add_task("putting", total=objects)
        for start in range(0, objects, CHAIN_BLOCKS):
            keys = [_key(i) for i in range(start, min(start + CHAIN_BLOCKS, objects))]
            _put(stub, keys)
            progress.advance(task, len(keys))


def _put(stub: MasterStub, keys: list[Key]) -> None:
    """One chain, without its bytes: the master does not know the difference."""
    request = calls.PutStart(
        namespace=NAMESPACE,
        keys=keys,
        sizes=[OBJECT_BYTES] * len(keys),
        parent=None,
        chain=True,
        replicas=1,
        overwrite=False,
        wait_ms=0,
        host=HOST,
    )
    grants = stub.call(request, time.monotonic() + CALL_SECONDS)
    assert isinstance(grants, calls.Grants)
    assert len(grants.tokens) == len(keys), "some of these objects were there already"
    ended = stub.call(calls.PutEnd(grants.epoch, grants.tokens), time.monotonic() + CALL_SECONDS)
    assert isinstance(ended, calls.PutEnded)
    assert all(outcome == calls.PutOutcome.STORED for outcome in ended.outcomes)


def _pauses(stub: MasterStub, objects: int, during: str) -> PauseRow:
    """Asks one key after the other and notes how long each answer took."""
    request = calls.Exists(NAMESPACE, [_key(0)])
    samples = []
    end = time.monotonic() + PROBE_SECONDS
    while time.monotonic() < end:
        start = time.perf_counter()
        stub.call(request, time.monotonic() + CALL_SECONDS)
        samples.append(time.perf_counter() - start)
        time.sleep(PROBE_PAUSE_S)
    samples.sort()
    return PauseRow(
        objects=objects,
        during=during,
        longest_ms=round(samples[-1] * 1e3, 2),
        p999_ms=round(samples[int(len(samples) * 0.999)] * 1e3, 3),
        p50_us=round(statistics.median(samples) * 1e6, 1),
        probes=len(samples),
    )


def _resident(pid: int) -> int:
    """Bytes of physical memory that a process holds."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- the processes -----------------------------------------------------------------------------


@contextlib.contextmanager
def _stub(address: str) -> Iterator[MasterStub]:
    from kvstore.client.stub import MasterStub

    stub = MasterStub(address, host=HOST, name="bench")
    try:
        yield stub
    finally:
        stub.close()


@contextlib.contextmanager
def _virtual_node(address: str, objects: int, *, name: str = "bench") -> Iterator[None]:
    """A node with room for ``objects``, and no memory; says that it is alive until the end."""
    import grpc

    from kvstore.memory.header import SUPERBLOCK_BYTES, extent_bytes
    from kvstore.wire.node_messages import (
        SESSION_PATH,
        decode_master_message,
        encode_node_message,
    )

    outbox: queue.SimpleQueue[calls.NodeMessage | None] = queue.SimpleQueue()
    accepted = threading.Event()
    over = threading.Event()

    def listen(stream: Iterator[calls.MasterMessage]) -> None:
        with contextlib.suppress(grpc.RpcError):
            for message in stream:
                if isinstance(message, calls.MasterAccepted):
                    accepted.set()
                elif isinstance(message, calls.MasterWipe):
                    outbox.put(calls.NodeWiped(message.order))

    def beat() -> None:
        number = 0
        while not over.wait(0.25):
            outbox.put(calls.NodeBeat(number := number + 1))

    offer = calls.SegmentOffer(
        size=SUPERBLOCK_BYTES + (objects + BATCH) * extent_bytes(OBJECT_BYTES),
        uuid=os.urandom(16),
        shm_name="",
        address="127.0.0.1:9",
        token=os.urandom(16),
        seed=1,
        generation=1,
        fresh=True,
    )
    outbox.put(calls.NodeJoin(name, HOST, PROTOCOL_VERSION, 0, [offer]))
    with grpc.insecure_channel(address) as channel:
        session = channel.stream_stream(
            SESSION_PATH,
            request_serializer=encode_node_message,
            response_deserializer=decode_master_message,
        )
        stream = session(iter(outbox.get, None))
        threads = [threading.Thread(target=listen, args=(stream,)), threading.Thread(target=beat)]
        for thread in threads:
            thread.start()
        try:
            if not accepted.wait(READY_SECONDS):
                raise StartupError("the master did not accept the bench's node")
            yield
        finally:
            over.set()
            outbox.put(calls.NodeLeave())
            outbox.put(None)
            threads[0].join(1.0)
            stream.cancel()
            for thread in threads:
                thread.join()


@contextlib.contextmanager
def _load(address: str, objects: int) -> Iterator[None]:
    module = "kvstore.cli.bench_master"
    process = subprocess.Popen([sys.executable, "-m", module, address, str(objects)])
    try:
        time.sleep(1.0)  # to start up, which is nothing to measure
        yield
        if process.poll() is not None:
            raise StartupError(f"the load ended with status {process.returncode}")
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    work_forever(sys.argv[1], int(sys.argv[2]))
