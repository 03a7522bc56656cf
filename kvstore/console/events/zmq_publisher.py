"""Publishes events over ZeroMQ in vLLM's format of KV cache events; needs pyzmq and msgpack.

A batch is three frames: topic, batch number (64 bits, big endian), and ``[time, [event, ...],
rank]`` in msgpack. Each event is a map with the fields of vLLM's and of Mooncake's events. A second
socket replays the last batches by vLLM's protocol. At the start of a term, and after missed events,
``AllBlocksCleared`` and then a snapshot are published.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import marshal
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgpack
import zmq
import zmq.asyncio

from kvstore.console.events.journal import HEARTBEAT_S, EventPosition, EventStreams, Journal
from kvstore.errors import StartupError, UnavailableError
from kvstore.master.ipc_channel import REMOVED_SIZE, Event
from kvstore.runtime.tasks import start_task

log = logging.getLogger("kvstore.console")

HANDSHAKE_MS: Final = 5_000

SILENT_MS: Final = 30_000
"""Time after which the kernel disconnects a peer that reads nothing. It may connect again."""

SAID_BYTES_MAX: Final = 1_024
"""Maximum bytes of a message from a peer: an identity, a topic or a number."""

SEND_BYTES: Final = 256 << 10
"""The kernel's buffer for one peer."""

BATCHES_WAITING_MAX: Final = 500
"""Queued batches of one subscriber, at most some 400 KiB each, shared by all peers. Further ones
are dropped for it, and it sees a gap in their numbers."""

REPLAY_WAITING_MAX: Final = 8
"""Batches of a replay that may wait for its peer to read."""

FULL_S: Final = 0.005
STALLED_S: Final = 2.0
"""Seconds for which a replay waits for its peer to read, before it ends. As in vLLM, one replay
runs at a time."""

REPLAY_BYTES_MAX: Final = 64 << 20
REPLAY_BATCHES_MAX: Final = 10_000

JOINING_S: Final = 1.0
"""Pause after the start, so that earlier subscribers connect again: every 100 ms by default."""

FLEET_S: Final = 10.0
"""Interval for reading the fleet records for a namespace that they do not name."""

MEDIUM: Final = "STORAGE"
END: Final = (-1).to_bytes(8, "big", signed=True)

CLEARED: Final = {"type": "AllBlocksCleared", "event_type": "cleared"}

_HASH_BYTES: Final = 8
_GROUP: Final = re.compile(r"/g(\d+)/")


Model = tuple[str, int]
"""The model of a namespace: name, and tokens per block (0: not known)."""

Fleet = Mapping[str, Model]
"""The models by namespace."""


class Batch(NamedTuple):
    topic: bytes
    number: int
    payload: zmq.Frame


class ZmqPublisher:
    """Publishes the events of a journal. Use it in one event loop."""

    def __init__(
        self,
        addresses: str,
        pool: str,
        journal: Journal,
        streams: EventStreams,
        fleet: Callable[[], Awaitable[Fleet]],
    ) -> None:
        """
        Args:
            addresses: the address to publish at, and, after a comma, the one to replay at.
            pool: the name of this store in topics.
            fleet: reads the fleet records.

        Raises:
            StartupError: an address cannot be bound.
        """
        self._pool = pool
        self._journal = journal
        self._streams = streams
        self._read_fleet = fleet
        self._fleet: Fleet = {}
        self._fleet_read = -FLEET_S
        self._topics: set[bytes] = set()
        """Topics for which ``CLEARED`` was published in this term."""
        self._known: set[bytes] = set()
        # Higher than all numbers of the previous process, so that subscribers notice a gap.
        self._batch = itertools.count(time.time_ns() // 1_000)
        self._sent: deque[Batch] = deque()
        """The last batches; their numbers are consecutive."""
        self._sent_bytes = 0
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        at, _, replay_at = addresses.partition(",")
        self._socket = self._bound(zmq.PUB, at, BATCHES_WAITING_MAX)
        self._tasks.append(start_task("publisher", self._run()))
        if replay_at:
            self._router = self._bound(zmq.ROUTER, replay_at, REPLAY_WAITING_MAX)
            self._tasks.append(start_task("replays", self._replay_forever()))

    def _bound(self, kind: int, address: str, waiting_max: int) -> zmq.asyncio.Socket:
        made: zmq.asyncio.Socket = self._context.socket(kind)
        made.set_hwm(waiting_max)
        made.linger = 0
        if kind == zmq.ROUTER:
            made.set(zmq.ROUTER_MANDATORY, 1)  # sending fails if a peer does not read, or has left
        made.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        made.set(zmq.TCP_MAXRT, SILENT_MS)
        made.set(zmq.MAXMSGSIZE, SAID_BYTES_MAX)
        made.set(zmq.SNDBUF, SEND_BYTES)
        try:
            made.bind(address)
        except zmq.ZMQError as error:
            for task in self._tasks:
                task.cancel()
            self._context.destroy(0)
            raise StartupError(
                f"events cannot be published at {address}: {error}",
                advice="Give --events another address.",
            ) from None
        return made

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(0)

    async def _run(self) -> None:
        journal = self._journal
        await asyncio.sleep(JOINING_S)
        while True:
            epoch = journal.epoch
            number = await self._begin(epoch) if epoch else None
            if number is None:
                await journal.change(HEARTBEAT_S)
                continue
            while journal.has(EventPosition(epoch, number)):
                for frame in journal.after(number, journal.end):
                    events = marshal.loads(frame.payload)  # noqa: S302  # of our own parent
                    await self._publish(events[max(0, number - frame.before) :])
                    number = frame.before + frame.count
                if number == journal.end:
                    await journal.change(HEARTBEAT_S)

    async def _begin(self, epoch: int) -> int | None:
        """Publish a snapshot. Return the last event's number; None if it was interrupted."""
        self._topics.clear()
        for topic in sorted(self._known):
            await self._send(topic, [])
        number = -1
        try:
            async for after, events in self._streams.changes(epoch, ""):
                number = after
                await self._publish(events)
        except UnavailableError:
            return None
        return number if number >= 0 and self._journal.epoch == epoch else None

    async def _publish(self, events: Iterable[Event]) -> None:
        batches: dict[bytes, list[dict[str, Any]]] = {}
        for namespace, of_namespace in itertools.groupby(events, key=lambda event: event[0]):
            model = await self._model_of(namespace)
            topic = f"kv@pool:{self._pool}@{model[0]}".encode()
            batch = batches.setdefault(topic, [])
            batch += [described(event, model) for event in of_namespace]
        for topic, batch in batches.items():
            await self._send(topic, batch)

    async def _model_of(self, namespace: str) -> Model:
        model = self._fleet.get(namespace)
        if model is None and time.monotonic() - self._fleet_read >= FLEET_S:
            self._fleet = await self._read_fleet()
            self._fleet_read = time.monotonic()
            model = self._fleet.get(namespace)
        return model or (namespace, 0)

    async def _send(self, topic: bytes, events: list[dict[str, Any]]) -> None:
        if topic not in self._topics:
            self._topics.add(topic)
            self._known.add(topic)
            events = [CLEARED, *events]
        packed: Any = msgpack.packb([time.time(), events, 0])
        payload = zmq.Frame(packed, copy=False)
        number = next(self._batch)
        self._sent.append(Batch(topic, number, payload))
        self._sent_bytes += len(packed)
        while self._sent_bytes > REPLAY_BYTES_MAX or len(self._sent) > REPLAY_BATCHES_MAX:
            self._sent_bytes -= len(self._sent.popleft().payload)
        await self._socket.send_multipart((topic, number.to_bytes(8, "big"), payload))

    async def _replay_forever(self) -> None:
        while True:
            request = await self._router.recv_multipart()
            if len(request) == 3 and len(request[2]) == _HASH_BYTES:
                await self._replay(request[0], int.from_bytes(request[2], "big"))

    async def _replay(self, peer: bytes, first: int) -> None:
        """Send the stored batches from ``first`` on, including those published meanwhile."""
        while self._sent and first <= self._sent[-1].number:
            first = max(first, self._sent[0].number)
            topic, number, payload = self._sent[first - self._sent[0].number]
            if not await self._send_to_peer(peer, (topic, number.to_bytes(8, "big"), payload)):
                return
            first += 1
        await self._send_to_peer(peer, (b"", END, b""))

    async def _send_to_peer(
        self, peer: bytes, frames: tuple[bytes, bytes, zmq.Frame | bytes]
    ) -> bool:
        """Send to a peer. Return False if the peer has left, or does not read."""
        until = time.monotonic() + STALLED_S
        while time.monotonic() < until:
            try:
                await self._router.send_multipart((peer, b"", *frames), flags=zmq.DONTWAIT)
            except zmq.Again:
                await asyncio.sleep(FULL_S)
            except zmq.ZMQError:
                return False
            else:
                return True
        return False


def described(event: Event, model: Model) -> dict[str, Any]:
    """Return an event as a map for both vLLM (``type`` ...) and Mooncake (``event_type`` ...)."""
    namespace, key, parent, size, depth, on_disk = event
    group = _GROUP.search(namespace)
    both: dict[str, Any] = {
        "block_hashes": [_hash(key)],
        "medium": MEDIUM,
        "group_idx": int(group[1]) if group else None,
        "object_key": _text(key),
        "tenant_id": namespace,
        "seq_hashes": [_hash(key)],
    }
    if size == REMOVED_SIZE:
        return {"type": "BlockRemoved", "event_type": "removed", **both}
    return {
        "type": "BlockStored",
        "event_type": "stored",
        **both,
        "parent_block_hash": _hash(parent) if parent else None,
        "parent_hash": _hash(parent) if parent else None,
        "base_block_idx": depth,
        "token_ids": [],
        "block_size": model[1],
        "lora_id": None,
        "lora_name": None,
        "size": size,
        "store_medium": "disk" if on_disk else "memory",
    }


def _hash(key: bytes) -> int:
    """Return a key in the hash format of vLLM and SGLang: its last 8 bytes as an integer."""
    return int.from_bytes(key[-_HASH_BYTES:], "big")


def _text(key: bytes) -> str:
    """Return a key as text if it is printable; else in hexadecimal."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return key.hex()
    return text if text.isprintable() else key.hex()
