"""What the workers do: one class per kind of program.

Each is started as one process with a seed of its own, and works until it is told to stop. Several
of them share the namespace ``hot``, whose few keys are put, overwritten, read and removed by all.
"""

from __future__ import annotations

import asyncio
import gc
import math
import os
import random
import signal
import sys
import threading
import time
from collections import deque
from typing import Any, Final

from kvstore import AsyncClient, Client, Hint, calls
from kvstore.errors import InvalidArgumentError, KVStoreError, ReservationLostError
from tests.soak import values
from tests.soak.journal import Journal
from tests.soak.recording_client import Clock, RecordingClient, Settings, closing_sockets

HOT: Final = [b"hot-%d" % number for number in range(48)]
BIG: Final = [b"big-%d" % number for number in range(4)]
BIG_BYTES: Final = 12 << 20
ROOM_BYTES: Final = 1 << 20


class Workload:
    """A worker's work. ``clients`` are made once, and closed at the end."""

    views = False
    """Whether it holds views, which may keep what is gone mapped."""
    stoppable = True
    """Whether the nemesis may stop it: not what writes to its allocations by hand."""

    def __init__(self, settings: Settings, journal: Journal, clock: Clock, stop: threading.Event
                 ) -> None:  # fmt: skip
        self.settings = settings
        self.journal = journal
        self.clock = clock
        self.stopping = stop
        self.rng = random.Random(f"{settings.seed} {settings.role} {settings.worker}")

    def run(self) -> None:
        """Until it is told to stop."""
        with self.client() as client:
            asyncio.run(self.work(self.hands(client, self.rng)))

    def client(self, **more: Any) -> Client:
        more.setdefault("timeout_ms", self.settings.timeout_ms)
        return Client(self.settings.master, **more)

    def hands(self, client: Client | AsyncClient, rng: random.Random) -> RecordingClient:
        return RecordingClient(client, self.settings, self.journal, self.clock, rng)

    async def work(self, hands: RecordingClient) -> None:
        while not self.stopping.is_set():
            await self.step(hands)

    async def step(self, hands: RecordingClient) -> None:
        raise NotImplementedError

    def threads(self, clients: list[Client], each: int = 1) -> None:
        """``work`` in threads, ``each`` of them per client, to their end."""

        def work(client: Client, number: int) -> None:
            try:
                rng = random.Random(f"{self.settings.seed} {self.settings.worker} {number}")
                asyncio.run(self.work(self.hands(client, rng)))
            except BaseException as error:
                self.journal.broke("worker_died", repr(error))
                raise

        rows = [client for client in clients for _ in range(each)]
        threads = [
            threading.Thread(target=work, args=(client, number), name=f"soak-{number}")
            for number, client in enumerate(rows)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def size_of(rng: random.Random, largest: int = ROOM_BYTES // 2) -> int:
    """Of a value: of every order of magnitude, and seldom of whole blocks."""
    return int(math.exp(rng.uniform(math.log(values.BLOCK_BYTES), math.log(largest))))


class MixedWorkload(Workload):
    """Every verb on the hot keys, from two threads of one client."""

    transports: tuple[str, ...] = ("shm", "tcp")
    lane = True
    at_once = 2

    def run(self) -> None:
        with self.client(transports=self.transports, lane=self.lane) as client:
            self.threads([client], self.at_once)

    async def step(self, hands: RecordingClient) -> None:
        await self.verb(hands)
        await hands.rest(hands.rng.uniform(0.0, 0.01))

    async def verb(self, hands: RecordingClient, cancel_s: float | None = None) -> None:
        rng = hands.rng
        key, some = rng.choice(HOT), rng.sample(HOT, rng.randint(2, 6))
        choice = rng.choices(range(len(WEIGHTS)), WEIGHTS)[0]
        if choice == 0:
            await hands.get("hot", [key])
        elif choice == 1:
            await hands.get("hot", some, many=True)
        elif choice == 2:
            await hands.get_into("hot", some[:3], ROOM_BYTES, cancel_s=cancel_s)
        elif choice == 3:
            await hands.put("hot", {key: size_of(rng)}, overwrite=True, cancel_s=cancel_s,
                            replicas=rng.choice([1, 1, 2]))  # fmt: skip
        elif choice == 4:
            await hands.put("hot", {key: size_of(rng)}, cancel_s=cancel_s)
        elif choice == 5:
            sizes = {each: size_of(rng) for each in some}
            await hands.put("hot", sizes, verb="put_many", cancel_s=cancel_s,
                            overwrite=rng.random() < 0.5)  # fmt: skip
        elif choice == 6:
            await hands.remove("hot", [key], cancel_s=cancel_s)
        elif choice == 7:
            await hands.remove("hot", some[:3], cancel_s=cancel_s)
        elif choice == 8:
            await hands.exists("hot", [key] if rng.random() < 0.5 else some)
        elif choice == 9:
            await hands.stat("hot", key)
        elif choice == 10:
            await hands.list_objects("hot", b"hot-1")
        elif choice == 11:
            await hands.call("status")
        elif choice == 12:
            sizes = {b"c%d" % rng.randrange(500): size_of(rng, 4096) for _ in range(8)}
            await hands.put("clears", sizes, verb="put_many")
        elif choice == 13:
            await hands.clear("clears")
        elif choice == 14:
            keys = [b"c%d" % rng.randrange(500) for _ in range(8)]
            await hands.get("clears", keys, many=True)
        else:  # most of them are lies
            action = rng.choice(["retain", "release", "demote", "prefetch"])
            hints = [Hint(action, each, 60.0) for each in some]
            await hands.call("hint", hints, namespace="hot")


WEIGHTS: Final = (30, 8, 8, 10, 8, 4, 5, 3, 4, 2, 0.5, 0.5, 4, 0.3, 4, 4)
"""Of the verbs above."""


class MixedTcp(MixedWorkload):
    """The same through sockets, as from another host."""

    transports = ("tcp",)


class MixedGrpc(MixedWorkload):
    """The same, asked by gRPC alone."""

    lane = False
    at_once = 1


class CancellingWorkload(MixedWorkload):
    """The same by ``AsyncClient``: several tasks, of which many calls are cancelled, some of them
    in the middle of a large ``get_into``."""

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        transports = [("shm", "tcp"), ("tcp",)]
        clients = [
            AsyncClient(self.settings.master, timeout_ms=self.settings.timeout_ms, transports=each)
            for each in transports
        ]
        tasks = [
            asyncio.ensure_future(self.work(self.hands(client, random.Random(f"{self.rng} {n}"))))
            for n, client in enumerate(clients * 2)
        ]
        await asyncio.gather(*tasks)
        for client in clients:
            await client.close()

    async def step(self, hands: RecordingClient) -> None:
        rng = hands.rng
        cancel_s = rng.choice([None, 0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.03)])
        if rng.random() < 0.12:
            key = rng.choice(BIG)
            if not await hands.get("big", [key]):
                await hands.put("big", {key: BIG_BYTES})
            for _ in range(4):
                await hands.get_into("big", [key], BIG_BYTES, cancel_s=rng.uniform(0, 0.03))
        else:
            await self.verb(hands, cancel_s)
        await hands.rest(rng.uniform(0.0, 0.02))


class _Alarm(BaseException):
    """What the handler of SIGALRM raises."""


class _Alarmed:
    """A client many of whose calls a handler of SIGALRM cuts short, between any two of their steps:
    for the workload they are cancelled calls."""

    def __init__(self, client: Client, rng: random.Random) -> None:
        self._client = client
        self._rng = rng
        self._armed = False
        signal.signal(signal.SIGALRM, self._ring)
        sys.unraisablehook = self._unraisable

    @staticmethod
    def _unraisable(ignored: sys.UnraisableHookArgs) -> None:
        """An alarm within a finalizer, gRPC's for one, ends there: CPython tells and goes on."""
        if ignored.exc_type is not _Alarm:
            sys.__unraisablehook__(ignored)

    def _ring(self, *_: object) -> None:
        if self._armed:
            raise _Alarm

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        if not callable(found):
            return found

        def call(*args: Any, **named: Any) -> Any:
            try:
                try:
                    self._armed = True
                    seconds = self._rng.choice([0.00003, 0.0002, 0.001, 0.01, 0.5])
                    signal.setitimer(signal.ITIMER_REAL, seconds)
                    return found(*args, **named)
                finally:
                    self._armed = False
            except _Alarm:
                raise asyncio.CancelledError from None

        return call


class SignalWorkload(MixedWorkload):
    """The same, with calls that a signal handler cuts short by an exception."""

    transports = ("shm",)

    def run(self) -> None:
        with self.client(transports=self.transports) as client:
            alarmed: Any = _Alarmed(client, self.rng)
            asyncio.run(self.work(self.hands(alarmed, self.rng)))


class AlarmsTcp(SignalWorkload):
    """The same through sockets."""

    transports = ("tcp",)


class TimeoutWorkload(Workload):
    """Puts through sockets and removes what was stored, then looks for it for as long as it lives:
    bytes of an attempt that was given up must not bring it back."""

    def run(self) -> None:
        clients = [self.client(transports=("tcp",), timeout_ms=12_000) for _ in range(4)]
        self._removed: deque[bytes] = deque(maxlen=200)
        self.threads(clients)
        for client in clients:
            client.close()

    async def work(self, hands: RecordingClient) -> None:
        number = 0
        while not self.stopping.is_set():
            number += 1
            key = b"late-%x-%d" % (id(hands), number)
            size = size_of(hands.rng, 60_000)
            if await hands.put("late", {key: size}, wait_ms=2_000) and await hands.remove(
                "late", [key]
            ):
                self._removed.append(key)
            removed = list(self._removed)
            if removed:
                keys = hands.rng.sample(removed, min(8, len(removed)))
                await hands.get("late", keys, many=True)
                await hands.exists("late", removed[-50:])
            await hands.rest(hands.rng.uniform(0.0, 0.08))


class ViewWorkload(Workload):
    """Holds views for long, also after their promise has ended, and asks of each again and again
    whether it holds; and whether the bytes are what they were."""

    views = True

    async def work(self, hands: RecordingClient) -> None:
        held: list[_View] = []
        while not self.stopping.is_set():
            if len(held) < 60:
                if view := await self._new(hands):
                    held.append(view)
                await hands.rest(0.005)
            else:
                await hands.rest(0.02)
            for view in hands.rng.sample(held, min(8, len(held))):
                self._check(hands, view)
            # The lost ones are kept longest: their memory is somebody else's by then.
            limit = time.monotonic() - 20
            held = [view for view in held if view.lost_at is None or view.lost_at > limit]
            if len(held) >= 60:
                lasting = [view for view in held if view.lost_at is None] or held
                held.remove(hands.rng.choice(lasting))
        held.clear()

    async def _new(self, hands: RecordingClient) -> _View | None:
        key = hands.rng.choice(HOT)
        done = await hands.call("get", key, namespace="hot", copy=False)
        if not done.ok or done.value is None:
            hands.journal.count("view", "miss")
            return None
        version = hands.judge("hot", key, done.value, done, "view", flips=True)
        hands.journal.count("view", "hit")
        return _View("hot", key, done.value, version) if version else None

    def _check(self, hands: RecordingClient, view: _View) -> None:
        lease = hands.client.lease(view.memory)
        if lease is None:
            if hands.client.config.transports == ("tcp",):
                return
            view.lost_at = view.lost_at or time.monotonic()
            return
        before = lease.is_held
        if view.reported:
            return
        if view.lost_at is not None and before:
            self.journal.broke(
                "lease_risen", f"the lease of a view of {view.key!r} was lost "
                f"{time.monotonic() - view.lost_at:.1f} s ago, and is held again: {lease!r}",
            )  # fmt: skip
            view.lost_at, view.reported = time.monotonic(), True
            return
        if not before:
            view.lost_at = view.lost_at or time.monotonic()
            return
        seen = values.look(view.namespace, view.key, view.memory)
        if not lease.is_held:
            view.lost_at = time.monotonic()
        elif (seen.problem and not seen.flipped) or seen.version != view.version:
            self.journal.broke(
                "view_changed", f"a view of {view.key!r} whose lease is held, of version "
                f"{view.version:x}: {seen} {lease!r}",
            )  # fmt: skip
            view.lost_at, view.reported = time.monotonic(), True
        self.journal.count("view check", "held")


class _View:
    """Memory of the pool that a worker holds."""

    def __init__(self, namespace: str, key: bytes, memory: Any, version: int) -> None:
        self.namespace = namespace
        self.key = key
        self.memory = memory
        self.version = version
        self.lost_at: float | None = None
        self.reported = False
        """A violation: once is enough."""


class AllocationWorkload(ViewWorkload):
    """Computes into memory of the pool, puts it, holds on to it; puts also what was lost."""

    stoppable = False

    async def work(self, hands: RecordingClient) -> None:
        held: list[_View] = []
        unput: list[_View] = []
        while not self.stopping.is_set():
            key = hands.rng.choice(HOT)
            size = size_of(hands.rng, 200_000)
            done = await hands.call("allocate", size, kind="numpy", wait_ms=500)
            if done.ok:
                view = _View("hot", key, done.value, self.journal.version())
                if self._fill(hands, view):
                    unput.append(view)
            await hands.rest(hands.rng.uniform(0, 0.05))
            for view in unput[:-6] if hands.rng.random() < 0.7 else unput[:-40]:
                unput.remove(view)
                if hands.rng.random() < 0.2:
                    continue  # dropped: it is given back
                if await self._put(hands, view):
                    held.append(view)
            for view in hands.rng.sample(held, min(8, len(held))):
                self._check(hands, view)
            if len(held) > 40:
                del held[hands.rng.randrange(len(held))]
        held.clear()
        unput.clear()

    def _fill(self, hands: RecordingClient, view: _View) -> bool:
        lease = hands.client.lease(view.memory)
        if lease is None or not lease.is_held or lease.remaining_s < 0.5:
            return False
        made = values.make(
            view.namespace, view.key, view.version, self.settings.seed, len(view.memory)
        )
        view.memory[:] = made
        return True

    async def _put(self, hands: RecordingClient, view: _View) -> bool:
        lease = hands.client.lease(view.memory)
        lost = lease is None or not lease.is_held
        self.journal.puts(view.namespace, [(view.key, view.version)], True)
        done = await hands.call(
            "put", view.key, view.memory, namespace=view.namespace, overwrite=True
        )
        outcome = str(done.value.name).lower() if done.ok else "error"
        self.journal.done([view.version], [outcome])
        self.journal.count("put of an allocation", outcome if not lost else f"{outcome}, lost")
        if lost and outcome == "stored":
            self.journal.broke(
                "lost_allocation_stored", f"an allocation for {view.key!r} was lost, and its put "
                f"says stored: {lease!r}",
            )  # fmt: skip
        assert not lost or done.ok or isinstance(done.error, KVStoreError)
        if lost and done.error is not None and isinstance(done.error, ReservationLostError):
            self.journal.count("put of an allocation", "refused as lost")
        return outcome == "stored"


class Tiny(Workload):
    """Threads of one client with deadlines of a few milliseconds, over the same segments. The
    interpreter switches between them as often as it can, so that it also does in bad moments."""

    def run(self) -> None:
        sys.setswitchinterval(1e-5)
        timeout_ms = 4
        while not self.stopping.is_set():
            self._good = self._bad = 0
            transports = self.rng.choice([("shm", "tcp"), ("tcp",), ("shm", "tcp")])
            with self.client(transports=("shm", "tcp")) as patient:
                asyncio.run(self._prepare(self.hands(patient, self.rng)))
            self._until = time.monotonic() + self.rng.uniform(2, 5)
            with self.client(timeout_ms=timeout_ms, transports=transports) as client:
                self.threads([client], 5)
            # About as many calls are to end in time as not, however fast this host is.
            timeout_ms = min(60, timeout_ms * 2) if self._bad > 2 * self._good else timeout_ms
            timeout_ms = max(1, timeout_ms // 2) if self._good > 2 * self._bad else timeout_ms
        gc.collect()

    async def _prepare(self, hands: RecordingClient) -> None:
        for key in TINY:
            if not await hands.get("tiny", [key]):
                await hands.put("tiny", {key: tiny_size(self.rng)})

    async def work(self, hands: RecordingClient) -> None:
        hands.limit_s = max(hands.limit_s, 0.5)
        while not self.stopping.is_set() and time.monotonic() < self._until:
            rng = hands.rng
            some = rng.sample(TINY, rng.randint(1, 6))
            choice = rng.random()
            if choice < 0.06:
                await hands.get_into("tiny", some[:3], TINY_BYTES)
            elif choice < 0.4:
                self._count(bool(await hands.get("tiny", some, many=True)))
            elif choice < 0.95:
                await self._views(hands, some)
            else:
                await hands.put("tiny", {some[0]: tiny_size(rng)}, overwrite=True)
            await hands.rest(0)

    def _count(self, good: bool) -> None:
        self._good, self._bad = self._good + good, self._bad + (not good)

    async def _views(self, hands: RecordingClient, keys: list[bytes]) -> None:
        done = await hands.call("get_many", keys, namespace="tiny", copy=False)
        for key, view in zip(keys, done.value or (), strict=False):
            if view is not None and len(values.as_bytes(view)) < 10_000:
                hands.judge("tiny", key, view, done, "view", flips=True)


TINY: Final = [b"tiny-%d" % number for number in range(10)]
TINY_BYTES: Final = 512 << 10


def tiny_size(rng: random.Random) -> int:
    """A copy takes about as long as the deadline."""
    return rng.choice([size_of(rng, TINY_BYTES), rng.randint(TINY_BYTES // 2, TINY_BYTES)])


class ChainWorkload(Workload):
    """Prefixes: put in pieces, matched, read, cleared."""

    async def step(self, hands: RecordingClient) -> None:
        rng = hands.rng
        chain = rng.randrange(12)
        keys = [b"chain-%d-%d" % (chain, number) for number in range(40)]
        namespace = f"chains-{chain % 3}"
        choice = rng.random()
        if choice < 0.35:
            start = rng.choice([0, 0, rng.randrange(30)])
            sizes = {key: size_of(rng, 40_000) for key in keys[start : start + rng.randint(1, 20)]}
            parent = keys[start - 1] if start else None
            await hands.put(namespace, sizes, verb="put_chain", parent=parent)
        elif choice < 0.8:
            matched = await hands.match(namespace, keys)
            if matched:
                await hands.get(namespace, keys[max(0, matched - 8) : matched], many=True)
                await hands.get_into(namespace, keys[max(0, matched - 3) : matched], 64 << 10)
        elif choice < 0.9:
            namespaces = [f"chains-{number}" for number in range(3)]
            done = await hands.call("matches", keys, namespaces=namespaces)
            for each, match in zip(namespaces, done.value or (), strict=False):
                found = keys[: match.matched]
                hands.journal.there(each, found, done.began, done.ended, "matches")
        elif choice < 0.97:
            at = rng.randrange(len(keys))
            await hands.remove(namespace, keys[at : at + rng.randint(1, 4)])
        else:
            await hands.clear(namespace)
        await hands.rest(rng.uniform(0.0, 0.02))


class DiskWorkload(Workload):
    """Chains that do not fit into memory: read from disks, put again where they end, and removed
    and replaced while they are brought."""

    def run(self) -> None:
        self._written: dict[tuple[int, int], int] = {}
        self._bytes = 0
        self._counting = threading.Lock()
        with self.client() as client:
            self.threads([client], 3)

    async def step(self, hands: RecordingClient) -> None:
        rng = hands.rng
        chain = rng.randrange(DISK_CHAINS)
        keys = [b"chain-%d-%d" % (chain, number) for number in range(8)]
        namespace = f"disks-{chain % 3}"
        choice = rng.random()
        if choice < 0.75:
            matched = await self._read(hands, namespace, keys)
            sizes = {key: rng.randint(values.BLOCK_BYTES, ROOM_BYTES) for key in keys[matched:]}
            if sizes:
                parent = keys[matched - 1] if matched else None
                await hands.put(namespace, sizes, verb="put_chain", parent=parent)
        elif choice < 0.95:
            at = rng.randrange(len(keys))
            await hands.call("hint", [Hint("prefetch", keys[-1])], namespace=namespace)
            await hands.rest(rng.choice([0, rng.uniform(0, 0.02)]))
            if rng.random() < 0.5:
                await hands.remove(namespace, keys[at : at + rng.randint(1, 4)])
            else:
                size = rng.randint(values.BLOCK_BYTES, ROOM_BYTES)
                await hands.put(namespace, {keys[at]: size}, overwrite=True)
            await hands.get(namespace, keys, many=True)
        elif choice < 0.955:
            await hands.clear(namespace)
        else:
            with self._counting:
                await self._count_written(hands)
        await hands.rest(rng.uniform(0, 0.05))

    async def _read(self, hands: RecordingClient, namespace: str, keys: list[bytes]) -> int:
        done = await hands.call("matches", keys, namespaces=[namespace])
        if not done.ok:
            return len(keys)
        [match] = done.value
        found = keys[: match.matched]
        self.journal.there(namespace, found, done.began, done.ended, "matches")
        if match.on_disk:  # this one is in no memory
            first = found[-match.on_disk]
            if await hands.get(namespace, [first]):
                self.journal.count(DISKS, BROUGHT)
        if found:
            await hands.get(namespace, found, many=True)
        return len(found)

    async def _count_written(self, hands: RecordingClient) -> None:
        done = await hands.call("status")
        if not done.ok:
            return
        # What other workers, or masters, began between two of these is not counted.
        disks = [disk for node in done.value.nodes for disk in node.disks]
        written = {(done.value.epoch, disk.segment_id): disk.written for disk in disks}
        before, self._written = self._written or written, written
        self._bytes += sum(written[disk] - before.get(disk, 0) for disk in written)
        self.journal.count(DISKS, WRITTEN, self._bytes >> 20)
        self._bytes %= 1 << 20


DISK_CHAINS: Final = 96
"""About 400 MiB: all nodes have 192 MiB of memory, and as much on disks."""
DISKS: Final = "disks"
WRITTEN: Final = "MiB written"
BROUGHT: Final = "objects that were on a disk only, and were read"
RECOVERED: Final = "objects recovered without the memory"


class ForkWorkload(MixedWorkload):
    """Forks with a client that was used, and uses it on both sides."""

    FORK_EVERY = 25
    CHILD_S = 60.0

    def run(self) -> None:
        with self.client(transports=("shm", "tcp")) as client:
            asyncio.run(self.work(self.hands(client, self.rng)))

    async def work(self, hands: RecordingClient) -> None:
        while not self.stopping.is_set():
            for _ in range(self.FORK_EVERY):
                await self.step(hands)
            child = self._fork(hands)
            for _ in range(self.FORK_EVERY):
                await self.step(hands)
            self._reap(child)

    def _fork(self, hands: RecordingClient) -> int:
        self.journal.flush()
        self.journal.forks += 1
        child = os.fork()
        if child:
            return child
        status = 1
        try:
            status = self._in_child(hands)
        finally:
            os._exit(status)

    def _in_child(self, hands: RecordingClient) -> int:
        """In a thread of its own: the loop of before belongs to the parent."""
        journal = self.journal.forked()
        clock = Clock(journal, views=True)
        same = RecordingClient(
            hands.client, self.settings, journal, clock, random.Random(journal.worker)
        )

        def work() -> None:
            async def steps() -> None:
                for _ in range(20):
                    await self.verb(same)

            try:
                asyncio.run(steps())
            except BaseException as error:
                journal.broke("worker_died", f"after a fork: {error!r}")

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join()
        journal.flush()
        return 0

    def _reap(self, child: int) -> None:
        deadline = time.monotonic() + self.CHILD_S
        while time.monotonic() < deadline:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                self.journal.count("fork", f"child ended with {status}")
                return
            time.sleep(0.02)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        self.journal.broke("hangs", f"a child that uses its parent's client, {self.CHILD_S:.0f} s")


class ShortLivedClients(MixedWorkload):
    """Makes clients, uses them a little, closes them, and looks for what they left behind."""

    def run(self) -> None:
        while not self.stopping.is_set():
            transports = self.rng.choice([("shm", "tcp"), ("tcp",)])
            call = self.clock.begin("a client's life", 60 + 3 * self.settings.timeout_ms / 1000)
            memory = "4MiB" if self.rng.random() < 0.08 else 0
            lane = self.rng.random() < 0.8
            try:
                client = self.client(transports=transports, lane=lane, memory=memory)
            except KVStoreError as error:  # with memory it must join at once
                self.clock.end(call)
                self.journal.count("client with memory", error.code)
                continue
            asyncio.run(self._steps(self.hands(client, self.rng)))
            closing = self.clock.begin("close", 15.0 if memory else 5.0)
            client.close()
            self.clock.end(closing)
            del client
            self.clock.end(call)
            self._look(transports)

    async def _steps(self, hands: RecordingClient) -> None:
        for _ in range(self.rng.randint(1, 20)):
            await self.step(hands)

    def _look(self, transports: tuple[str, ...]) -> None:
        gc.collect()
        deadline = time.monotonic() + 3
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.05)
        if left:
            self.journal.broke("left_behind", f"by a closed client {transports}: {sorted(left)}")

    def _left(self) -> set[str]:
        threads = {each.name for each in threading.enumerate() if each.name.startswith("kvstore")}
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            maps = {line.split(maxsplit=5)[5].strip() for line in lines if "/kvstore." in line}
        return threads | maps | closing_sockets()


class Operator(Workload):
    """Drains nodes, moves some of what they hold, and changes its mind."""

    async def step(self, hands: RecordingClient) -> None:
        unknown = (InvalidArgumentError,)  # the node, by now
        status = await hands.call("status")
        nodes = [node.name for node in status.value.nodes] if status.ok else []
        if len(nodes) > 2:
            node = hands.rng.choice(nodes)
            begun = await hands.call("drain", node, expected=unknown)
            up_to = begun.value.began if begun.ok else calls.NO_VERSION
            cursor = 0
            for _ in range(hands.rng.randint(1, 6)):
                moved = await hands.call(
                    "move_page", node, cursor, evict_up_to=up_to, expected=unknown
                )
                cursor = moved.value.next_cursor if moved.ok else 0
            await self._undo(hands, node)
        await hands.rest(hands.rng.uniform(2, 6))

    async def _undo(self, hands: RecordingClient, node: str) -> None:
        """It is drained until the master says that it is not, or that there is no such node."""
        for _ in range(20):
            done = await hands.call("drain", node, undo=True, expected=(InvalidArgumentError,))
            if done.ok or isinstance(done.error, InvalidArgumentError):
                return
            await hands.rest(0.5)


ROLES: Final[dict[str, type[Workload]]] = {
    "mixed": MixedWorkload,
    "mixed-tcp": MixedTcp,
    "mixed-grpc": MixedGrpc,
    "cancels": CancellingWorkload,
    "alarms": SignalWorkload,
    "alarms-tcp": AlarmsTcp,
    "given-up": TimeoutWorkload,
    "views": ViewWorkload,
    "allocations": AllocationWorkload,
    "tiny": Tiny,
    "chains": ChainWorkload,
    "disks": DiskWorkload,
    "forks": ForkWorkload,
    "comers": ShortLivedClients,
    "operator": Operator,
}
