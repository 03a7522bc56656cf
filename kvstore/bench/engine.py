"""``kvstore bench --transport mooncake``: the store against the bare engine that moves its bytes.

A master, a node and this client are three processes. In each round the same bytes move six times
between the same places of the node's memory and of this process's memory:

* ``put``, ``get``: by the store, with all its steps;
* ``write``, ``read``: by the client's transport alone, which copies where the memory is not
  registered, hashes, works in batches, and keeps a deadline;
* and both ways by the bare engine, whose memory is always registered, with its users' own call.

A ratio of 1 means that the store's own work is hidden behind the engine's time.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from xxhash import xxh3_64

from kvstore.bench.cases import Row, Sheet
from kvstore.bench.timing import Spread, seconds_of
from kvstore.calls import SegmentInfo
from kvstore.client.flows.reading import locate
from kvstore.client.flows.steps import Transfer
from kvstore.clocks import uptime
from kvstore.config import ClientConfig
from kvstore.errors import InternalError
from kvstore.limits import Key, Namespace
from kvstore.memory.header import HEADER_BYTES
from kvstore.process.children import start_master, start_node
from kvstore.texts import size_text
from kvstore.transport.base import Move
from kvstore.transport.mooncake.engine import EngineSettings, TransferEngine

if TYPE_CHECKING:
    from kvstore import Client
    from kvstore.client.flows.placements import Replica
    from kvstore.client.values import Bytes1D as Bytes

WORK: Final = ((1 << 20, 1), (1 << 20, 16), (1 << 20, 64), (4 << 20, 16), (64 << 10, 64))
"""What is measured: bytes of an object, and objects per call."""

NAMESPACE: Final = Namespace("kvstore-bench-engine")
OPS: Final = ("write", "read", "put", "get")
ROUNDS_MIN: Final = 5


SHEET: Final = Sheet(
    ("", "object", "batch", "memory"),
    ("ours GB/s", "bare GB/s", "ratio", "from", "to"),
    lambda row: (
        row["op"], size_text(row["size_bytes"]), str(row["batch"]),
        "registered" if row["registered"] else "any",
        f"{row['ours_gb_per_second']:.2f}", f"{row['bare_gb_per_second']:.2f}",
        f"{row['ratio']:.2f}", f"{row['ratio_least']:.2f}", f"{row['ratio_most']:.2f}",
    ),
    "the store and its transport, against the bare engine over",
)  # fmt: skip


def measure(seconds: float, settings: EngineSettings) -> Iterator[Row]:
    """Rows of ``seconds`` each.

    Times are medians over the rounds. ``ratio`` is the median of each round's ratio of the bare
    engine's time to the store's: at 0.95 the store is 5 % slower. ``registered``: whether the
    caller's memory is registered as well, or bytes pass through the client's buffer.
    """
    with (
        _client(settings) as client,
        contextlib.closing(TransferEngine(settings, "127.0.0.1")) as engine,
    ):
        for size, batch in WORK:
            for registered in (False, True):
                yield from _Measurement(client, engine, size, batch).run(seconds, registered)


class _Measurement:
    def __init__(self, client: Client, engine: TransferEngine, size: int, batch: int) -> None:
        import numpy as np

        self._client = client
        self._engine = engine
        self._size, self._batch = size, batch
        self._keys = [Key(f"{size}-{number}".encode()) for number in range(batch)]
        random = np.random.default_rng(0)
        self._source = random.integers(0, 255, size * batch, dtype=np.uint8)
        self._target = np.zeros_like(self._source)
        self._times: dict[str, list[tuple[float, float]]] = {op: [] for op in OPS}

    def run(self, seconds: float, registered: bool) -> Iterator[Row]:
        both = self._source, self._target
        for memory in both:
            self._engine.register(memory.ctypes.data, memory.nbytes)
            if registered:
                self._client.register(memory)
        end = time.perf_counter() + len(OPS) * seconds
        self._round()  # opens connections, touches memory
        while time.perf_counter() < end or len(self._times["get"]) < ROUNDS_MIN:
            for op, times in zip(OPS, self._round(), strict=True):
                self._times[op].append(times)
        for memory in both:
            self._engine.unregister(memory.ctypes.data)
            if registered:
                self._client.unregister(memory)
        for op, pairs in self._times.items():
            yield self._row(op, pairs, registered)

    def _round(self) -> list[tuple[float, float]]:
        """Seconds of the store and of the bare engine, for each of ``OPS``."""
        client, keys, size = self._client, self._keys, self._size
        parts = [self._source[at : at + size] for at in range(0, self._source.nbytes, size)]
        into = [self._target[at : at + size] for at in range(0, self._target.nbytes, size)]
        pairs = list(zip(keys, parts, strict=True))
        put = seconds_of(lambda: client.put_many(pairs, namespace=NAMESPACE))
        got = seconds_of(lambda: client.get_into(keys, into, namespace=NAMESPACE))
        self._check()
        places = self._places()
        written = seconds_of(lambda: self._transfer(places, parts, is_write=True))
        read = seconds_of(lambda: self._transfer(places, into, is_write=False))
        self._check()
        bare_written = seconds_of(lambda: self._move(places, is_write=True))
        bare_read = seconds_of(lambda: self._move(places, is_write=False))
        self._check()
        client.remove_many(keys, namespace=NAMESPACE)
        return [(written, bare_written), (read, bare_read), (put, bare_written), (got, bare_read)]

    def _transfer(self, places: list[Replica], parts: list[Bytes], *, is_write: bool) -> None:
        moves = [
            Move(place.offset + HEADER_BYTES, memoryview(part), xxh3_64())  # type: ignore[arg-type]
            for place, part in zip(places, parts, strict=True)
        ]
        transfer = Transfer(places[0].segment, moves, is_write)
        errors = self._client._state.movers.move([transfer], uptime() + 60)
        if errors[0] is not None:
            raise errors[0]

    def _move(self, places: list[Replica], *, is_write: bool) -> None:
        memory = self._source if is_write else self._target
        start = memory.ctypes.data
        ours = [start + number * self._size for number in range(self._batch)]
        segment: SegmentInfo = places[0].segment
        assert segment.engine is not None
        theirs = [segment.engine.base + place.offset + HEADER_BYTES for place in places]
        lengths = [self._size] * self._batch
        if not self._engine.transfer_sync(
            segment.engine.name, ours, theirs, lengths, is_write=is_write
        ):
            raise InternalError("the bare engine failed")

    def _places(self) -> list[Replica]:
        flow = locate(self._client._state.context, NAMESPACE, self._keys, fresh=True)
        placed = self._client._run(flow)
        return [each.replicas[0] for each in placed if each is not None]

    def _check(self) -> None:
        if not (self._target == self._source).all():
            raise InternalError("the bare engine returned wrong bytes")
        self._target[:] = 0

    def _row(self, op: str, pairs: list[tuple[float, float]], registered: bool) -> Row:
        ours, bare = zip(*pairs, strict=True)
        ratio = Spread.of_ratios(bare, ours)
        moved = self._size * self._batch / 1e9
        return {
            "op": op, "size_bytes": self._size, "batch": self._batch, "registered": registered,
            "rounds": len(pairs),
            "ours_gb_per_second": round(moved / statistics.median(ours), 3),
            "bare_gb_per_second": round(moved / statistics.median(bare), 3),
            "ratio": round(ratio.median, 3), "ratio_least": round(ratio.smallest, 3),
            "ratio_most": round(ratio.largest, 3),
        }  # fmt: skip


@contextlib.contextmanager
def _client(settings: EngineSettings) -> Iterator[Client]:
    from kvstore import Client

    with contextlib.ExitStack() as stack:
        master = start_master(memory=0)
        stack.callback(master.stop)
        address = f"127.0.0.1:{master.said['port']}"
        node = start_node(master=address, memory=1 << 30, **settings._asdict())
        stack.callback(node.stop)
        config = ClientConfig(
            master=address, transports=("mooncake",), timeout_ms=60_000,
            **settings._asdict(),
        )  # fmt: skip
        yield stack.enter_context(Client(config=config))
