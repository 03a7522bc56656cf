"""Real master processes with real clients, whose nodes are simulated and have no memory.

A virtual node mounts a segment that has a size but no memory. This works because the master never
touches a payload byte; so ten million objects fit on a laptop.

Run as a program, this module is the load by another client while pauses are measured.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

from kvstore import calls
from kvstore.bench.timing import median_us, percentile, seconds_of
from kvstore.clocks import uptime
from kvstore.errors import StartupError
from kvstore.limits import PROTOCOL_VERSION, Key, Namespace
from kvstore.process import interpreter

if TYPE_CHECKING:
    from kvstore.client.calling.stub import MasterStub

NAMESPACE: Final = Namespace("kvstore-bench")
OBJECT_BYTES: Final = 4096
CHAIN_BLOCKS: Final = 1_024
"""Objects of one prefix: 16,384 tokens in blocks of 16."""
PUT_AT_ONCE: Final = 256
STEP_BLOCKS: Final = 64
"""Objects that an engine puts at once."""
STEP_PAUSE_S: Final = 0.002
"""Pause between two steps of the load: hundreds of steps a second, as from a fleet of engines."""
PROBE_PAUSE_S: Final = 0.0005
CALL_SECONDS: Final = 60.0
READY_SECONDS: Final = 60.0
HOST: Final = "bench"
LOAD: Final = "bench-load"
WAIT_MS: Final = 30_000
"""How long a put waits for space: leases end earlier."""
MIX: Final = "mix"
EVICT: Final = "evict"


def chain(number: int, blocks: int = CHAIN_BLOCKS) -> list[Key]:
    """The keys of chain ``number``, which shares none with other chains."""
    start = hashlib.sha256(number.to_bytes(8, "little")).digest()[:28]
    return [Key(start + index.to_bytes(4, "big")) for index in range(blocks)]


def ask(stub: MasterStub, request: calls.Request) -> calls.Reply:
    return stub.call(request, uptime() + CALL_SECONDS)


def putting(
    keys: Sequence[Key], parent: Key | None = None, size: int = OBJECT_BYTES
) -> calls.PutStart:
    """The request that starts a put of objects of one chain."""
    return calls.PutStart(
        namespace=NAMESPACE, keys=keys, sizes=[size] * len(keys), parent=parent, chain=True,
        replicas=1, overwrite=False, wait_ms=WAIT_MS, host=HOST,
    )  # fmt: skip


def put(
    stub: MasterStub, keys: Sequence[Key], parent: Key | None = None, size: int = OBJECT_BYTES
) -> None:
    """Puts objects of one chain without writing their bytes, which the master does not notice."""
    grants = ask(stub, putting(keys, parent, size))
    assert isinstance(grants, calls.Grants)
    assert len(grants.tokens) == len(keys), "some of these objects exist already"
    ended = ask(stub, calls.PutEnd(grants.epoch, grants.tokens))
    assert isinstance(ended, calls.PutEnded)
    assert all(outcome == calls.PutOutcome.STORED for outcome in ended.outcomes)


def put_chain(stub: MasterStub, keys: Sequence[Key]) -> None:
    """Puts a whole chain, in calls as large as a client's."""
    for start in range(0, len(keys), PUT_AT_ONCE):
        parent = keys[start - 1] if start else None
        put(stub, keys[start : start + PUT_AT_ONCE], parent)


def pauses(stub: MasterStub, key: Key, until: Callable[[float], bool]) -> dict[str, float]:
    """Calls ``exists`` for one key repeatedly, at least once; returns how long answers took.

    Args:
        until: called with the seconds since the start; True ends the measurement.
    """
    request = calls.Exists(NAMESPACE, [key])
    samples: list[float] = []
    begun = time.monotonic()
    while not samples or not until(time.monotonic() - begun):
        samples.append(seconds_of(lambda: ask(stub, request)))
        time.sleep(PROBE_PAUSE_S)
    return {
        "longest_ms": round(max(samples) * 1e3, 2),
        "p999_ms": round(percentile(samples, 0.999) * 1e3, 3),
        "p50_us": round(median_us(samples), 1),
        "probes": len(samples),
    }


def resident(pid: int) -> int:
    """Bytes of physical memory that a process holds."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- the load ----------------------------------------------------------------------------------


def mix_forever(address: str, first: int) -> None:
    """Puts batches of 64 new objects, as one step of an engine does, matches all of chain 0, which
    must exist, and removes the new objects. ``first``: the number of the first new chain."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())  # so that the node leaves
    with virtual_node(address, 1 << 20, name=LOAD), stub_of(address) as stub:
        number = first
        while True:
            keys = chain(number, STEP_BLOCKS)
            put(stub, keys)
            for _ in range(10):
                ask(stub, calls.MatchPrefix([NAMESPACE], chain(0), False))
            ask(stub, calls.Remove(NAMESPACE, keys))
            number += 1
            time.sleep(STEP_PAUSE_S)


def evict(address: str, first: int, blocks: int) -> None:
    """Puts ``blocks`` new objects, 64 at a time, into a full store, and matches chain 0 in between.
    Prints in one line of JSON how long the puts took."""
    samples = []
    with stub_of(address) as stub:
        begun = time.perf_counter()
        for number in range(first, first + -(-blocks // STEP_BLOCKS)):
            keys = chain(number, STEP_BLOCKS)
            samples.append(seconds_of(lambda keys=keys: put(stub, keys)))  # type: ignore[misc]
            ask(stub, calls.MatchPrefix([NAMESPACE], chain(0), False))
        seconds = time.perf_counter() - begun
    said = {"seconds": seconds, "put_us": median_us(samples)}
    sys.stdout.write(json.dumps(said) + "\n")


@contextlib.contextmanager
def load(address: str, kind: str, *numbers: int) -> Iterator[subprocess.Popen[str]]:
    """Runs a load (``MIX`` or ``EVICT``) in a separate process, which ends with the block."""
    command = interpreter.command("-m", "kvstore.bench.virtual", kind, address, *map(str, numbers))
    environ = interpreter.environment()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            yield process
            if process.poll():
                raise StartupError(f"the load ended with status {process.returncode}")
        finally:
            process.terminate()
            process.wait()


# --- the processes -----------------------------------------------------------------------------


@contextlib.contextmanager
def stub_of(address: str) -> Iterator[MasterStub]:
    from kvstore.client.calling.stub import MasterStub

    stub = MasterStub(address, host=HOST, name="bench")
    try:
        yield stub
    finally:
        stub.close()


@contextlib.contextmanager
def virtual_node(address: str, objects: int, *, name: str = "bench") -> Iterator[None]:
    """A node with room for ``objects``, but no memory; sends heartbeats until the block ends."""
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
        size=SUPERBLOCK_BYTES + objects * extent_bytes(OBJECT_BYTES),
        uuid=os.urandom(16),
        shm_name="",
        address="127.0.0.1:9",
        token=os.urandom(16),
        seed=1,
        generation=1,
        fresh=True,
    )
    outbox.put(calls.NodeJoin(name, HOST, PROTOCOL_VERSION, 0, [offer]))
    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
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


if __name__ == "__main__":
    os.nice(10)  # a core that the load takes from the probe would count as the master's pause
    what, where, *numbers = sys.argv[1:]
    if what == MIX:
        mix_forever(where, *map(int, numbers))
    else:
        evict(where, *map(int, numbers))
