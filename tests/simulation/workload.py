"""What the simulated programs do with their clients: a bit of everything, on few keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from random import Random

from kvstore import calls
from kvstore.calls import DrainStep, HintAction, PutOutcome, Version
from kvstore.client.flows import allocate, control_calls, copy_objects, get, put, read_objects
from kvstore.client.flows.read_objects import GetOptions
from kvstore.client.flows.read_targets import NewMemory
from kvstore.client.flows.steps import ask
from kvstore.client.flows.write_objects import PutOptions
from kvstore.client.hints import HintRow
from kvstore.client.leases.lease_table import AllocationLease, Lease, ObjectLease
from kvstore.client.values import Storable, Value, View, described_as
from kvstore.errors import KVStoreError, NoSpaceError, ReservationLostError
from kvstore.limits import Key, Namespace
from tests.simulation.client import Client

NAMESPACES = (Namespace("a"), Namespace("b"))
FLAT_KEYS = 10
CHAINS = 4
CHAIN_KEYS = 8
SHARED_KEYS = 3
"""Of the keys of two chains: their common prefix."""


@dataclass(kw_only=True)
class WorkloadMix:
    """How often what is done, and with how much; drawn anew for each seed."""

    weights: dict[str, float]
    size_bytes_max: int
    think_s: float
    overwrite: float
    replicas: float
    hold_s: float
    size_bytes_min: int = 0

    @classmethod
    def draw(cls, random: Random, size_bytes_max: int) -> WorkloadMix:
        usual = {
            "put": 4.0, "put_chain": 3.0, "get": 5.0, "view": 1.5, "match": 3.0,
            "exists": 0.3, "remove": 1.0, "allocate": 1.0, "clear": 0.02, "look": 0.1,
            "drain": 0.2, "hint": 1.5, "put_series": 1.5,
        }  # fmt: skip
        weights = {
            name: weight * random.choice((0, 0.3, 1, 1, 3)) for name, weight in usual.items()
        }
        weights["put"] = max(weights["put"], 1.0)
        weights["get"] = max(weights["get"], 1.0)
        return cls(
            weights=weights,
            size_bytes_max=size_bytes_max,
            think_s=random.choice((0.01, 0.03, 0.1)),
            overwrite=random.choice((0.0, 0.2, 0.5)),
            replicas=random.choice((0.0, 0.3, 0.8)),
            hold_s=random.choice((0.1, 1.0, 5.0)),
        )


@dataclass
class Worker:
    """One thread of a program: one operation after the other."""

    client: Client
    mix: WorkloadMix
    random: Random
    paused: Callable[[], bool]
    busy: str = ""
    """The operation under way."""
    outcomes: dict[str, int] = field(default_factory=dict)

    async def work(self) -> None:
        names, weights = list(self.mix.weights), list(self.mix.weights.values())
        while True:
            await self.client.sleep(self.random.expovariate(1 / self.mix.think_s))
            if self.paused():
                continue
            self.busy = self.random.choices(names, weights)[0]
            do: Callable[[], Awaitable[None]] = getattr(self, f"_{self.busy}")
            try:
                await do()
            except KVStoreError as error:
                self._note(f"{self.busy}: {error.code}: {error.message}")
                self.client.oracle.count(f"{self.busy}:{error.code}")
            else:
                self.client.oracle.count(self.busy)
            self.busy = ""

    # --- operations ---------------------------------------------------------------------------

    async def _put(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        keys = self._flat_keys(3)
        parent = self._a_key() if self.random.random() < 0.2 else None
        if parent in keys:
            parent = None
        values = [self._payload(namespace, key) for key in keys]
        overwrite = self.random.random() < self.mix.overwrite
        replicas = 2 if self.random.random() < self.mix.replicas else 1
        self._note(f"put {_names(keys)} overwrite={overwrite} replicas={replicas}")
        options = PutOptions(
            namespace=namespace, parent=parent, replicas=replicas, overwrite=overwrite,
            wait_ms=self._wait_ms(),
        )  # fmt: skip
        outcomes = await self._put_many(keys, values, options)
        self._note(f"put {_names(keys)}: {_outcomes(outcomes)}")

    async def _put_series(self) -> None:
        """Equal sizes, one after the other: the memory of the next put comes with each reply."""
        namespace = self.random.choice(NAMESPACES)
        size: int | None = None
        for key in self._flat_keys(6):
            data = self._payload(namespace, key, size=size)
            size = len(data)
            self._note(f"put_series {key.decode()}")
            outcome = await self._put_one(
                key, data, PutOptions(namespace=namespace, wait_ms=self._wait_ms())
            )
            self._note(f"put_series {key.decode()}: {outcome.name}")
            if self.random.random() < 0.3:
                await self.client.sleep(self.random.random() * self.mix.hold_s)

    async def _put_chain(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        keys = self._chain()
        first = self.random.choice((0, 0, 0, self.random.randrange(len(keys))))
        parent = keys[first - 1] if first else None
        keys = keys[first : first + self.random.randint(1, len(keys))]
        values = [self._payload(namespace, key) for key in keys]
        self._note(f"put_chain {_names(keys)} parent={parent!r}")
        options = PutOptions(
            namespace=namespace, parent=parent, chain=True, wait_ms=self._wait_ms()
        )
        outcomes = await self._put_many(keys, values, options)
        self._note(f"put_chain {_names(keys)}: {_outcomes(outcomes)}")

    async def _get(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        keys = [self._a_key() for _ in range(self.random.randint(1, 4))]
        await self.read(namespace, keys)

    async def _match(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        keys = self._chain()
        matched = (
            await self.client.run(
                control_calls.match_prefix(self.client.context, [namespace], keys)
            )
        )[0].matched
        self._note(f"match {keys[0].decode()}..: {matched}")
        if matched:
            await self.read(namespace, keys[:matched])

    async def _view(self) -> None:
        namespace, key = self.random.choice(NAMESPACES), self._a_key()
        started_us = self.client.process.scheduler.now_us
        view = (await self._views([key], namespace))[0]
        if not isinstance(view, memoryview) or not view.nbytes:
            return  # a miss, or a copy from another host
        lease = self.client.views.of(view)
        if lease is None or not isinstance(lease.what, ObjectLease):
            return  # let go by another thread's last reference, or its own allocation
        version = Version(lease.what.epoch, lease.what.counter)
        name = (namespace, key)
        self.client.oracle.read(self._who, name, version, bytes(view), started_us)
        self._note(f"view {key.decode()} v{version.epoch}.{version.counter}")
        await self._hold(view, lease)

    async def _hold(self, view: memoryview, lease: Lease) -> None:
        until = self.client.clock() + self.random.expovariate(1 / self.mix.hold_s)
        while lease.is_held and self.client.clock() < until and not self.paused():
            await self.client.sleep(0.05)
        if not lease.is_held:
            await self._keep_lost(view)
        await self.client.views.let_go(view, lease)

    async def _keep_lost(self, value: memoryview) -> None:
        """As a program that has not asked yet, and takes newer views: some of the same memory."""
        newer: list[tuple[View, Lease]] = []
        failed: KVStoreError | None = None
        until = self.client.clock() + self.random.expovariate(1 / self.mix.hold_s)
        try:
            while True:
                newer += await self._some_views()
                lost = self.client.views.of(value)
                if lost is None or lost.is_held:
                    self.client.oracle.broken("lost_held", f"what was lost is held: {lost}")
                if self.client.clock() >= until or self.paused():
                    break
                await self.client.sleep(0.05)
        except KVStoreError as error:
            failed = error
        self.client.oracle.count("lost_kept")
        for view, lease in newer:
            await self.client.views.let_go(view, lease)
        if failed is not None:
            raise failed

    async def _some_views(self) -> list[tuple[View, Lease]]:
        keys = [self._a_key() for _ in range(4)]
        views = await self._views(keys, self.random.choice(NAMESPACES))
        leases = [(view, self.client.views.of(view)) for view in views if view is not None]
        return [(view, lease) for view, lease in leases if lease is not None]

    async def _views(self, keys: list[Key], namespace: Namespace) -> list[View | None]:
        options = GetOptions(namespace, "bytes", copy=False)
        return await self.client.run(get.get_many(self.client.context, keys, options))

    async def _exists(self) -> None:
        keys = [self._a_key() for _ in range(3)]
        namespace, leases = self.random.choice(NAMESPACES), self.random.random() < 0.3
        there = await self.client.run(
            control_calls.exists(self.client.context, namespace, keys, leases)
        )
        if leases and self.random.random() < 0.5:
            await self.read(
                namespace, [key for key, found in zip(keys, there, strict=True) if found]
            )

    async def _hint(self) -> None:
        """Without regard to what is used again: most hints are lies."""
        namespace, actions = self.random.choice(NAMESPACES), list(HintAction)
        rows = [
            HintRow(
                int(self.random.choice(actions)), self._a_key(),
                self.random.choice((1, 5_000, 3_600_000)),
            )
            for _ in range(self.random.randint(1, 3))
        ]  # fmt: skip
        self._note(f"hint {namespace} {rows}")
        await self.client.run(control_calls.hint(namespace, rows))

    async def _remove(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        keys = list(dict.fromkeys(self._a_key() for _ in range(self.random.randint(1, 2))))
        self._note(f"remove {namespace} {_names(keys)}")
        removed = await self.client.run(control_calls.remove(self.client.context, namespace, keys))
        self._note(f"remove {namespace} {_names(keys)}: {removed}")

    async def _clear(self) -> None:
        namespace = self.random.choice(NAMESPACES)
        await self.client.run(control_calls.clear_page(self.client.context, namespace))

    async def _look(self) -> None:
        await self.client.run(control_calls.status())
        await self.client.run(ask(calls.ListObjects("", b"", 0, 1_000), calls.ListObjectsReply))
        key, namespace = self._a_key(), self.random.choice(NAMESPACES)
        await self.client.run(control_calls.stat(self.client.context, namespace, key))

    async def _drain(self) -> None:
        """As an operator who moves what a node holds, and then changes their mind."""
        status = await self.client.run(control_calls.status())
        if not status.nodes:
            return
        node = self.random.choice(status.nodes).name
        self._note(f"drain {node}")
        begun = await self.client.run(ask(calls.Drain(node, DrainStep.BEGIN), calls.DrainReply))
        cursor, failed = 0, None
        for _ in range(self.random.choice((1, 3, 10))):
            try:
                moved = await self.client.run(
                    copy_objects.move_page(self.client.context, node, cursor, begun.began)
                )
            except KVStoreError as error:
                failed = error
                break
            self._note(f"drain {node}: {moved}")
            self.client.oracle.count("moved", moved.objects)
            cursor = moved.next_cursor
            await self.client.sleep(self.random.expovariate(1 / self.mix.think_s))
            if self.paused():
                break
        await self._undo_drain(node)
        if failed is not None:
            raise failed

    async def undo_drains(self) -> None:
        """Of everybody, whose drains may have died with them."""
        for node in (await self.client.run(control_calls.status())).nodes:
            await self._undo_drain(node.name)

    async def _undo_drain(self, node: str) -> None:
        await self.client.run(ask(calls.Drain(node, DrainStep.UNDO), calls.DrainReply))

    async def _allocate(self) -> None:
        namespace, key = self.random.choice(NAMESPACES), self._a_key()
        data = self._payload(namespace, key, least=1)
        descriptor, size = described_as(len(data), "uint8", "numpy")
        # Some are put in another namespace than they were allocated for.
        of = namespace if len(data) % 4 else NAMESPACES[0]
        array = await self.client.run(
            allocate.allocate(self.client.context, of, descriptor, size, self._wait_ms())
        )
        lease = self.client.views.of(memoryview(array))  # type: ignore[arg-type]
        assert lease is not None
        assert isinstance(lease.what, AllocationLease)
        self._note(f"allocated {lease.what.epoch}.{lease.what.token}")
        whole = await self.client.compute(lease, data)
        failed: KVStoreError | None = None
        if not lease.is_held:
            await self._keep_lost(memoryview(array))  # type: ignore[arg-type]
            await self._put_lost(namespace, key, array)
        if self.random.random() < 0.3:  # meanwhile others are granted the same key, and store it
            await self.client.sleep(self.random.random() * self.mix.hold_s)
        if whole and self.random.random() < 0.8:
            overwrite = self.random.random() < self.mix.overwrite
            for _ in range(self.random.choice((1, 1, 3))):
                try:
                    outcome = await self._put_one(
                        key, array, PutOptions(namespace=namespace, overwrite=overwrite)
                    )
                except KVStoreError as error:
                    failed = error
                    self._note(f"commit {key.decode()}: {error.code}")
                else:
                    failed = None
                    self._note(f"commit {key.decode()}: {outcome.name}")
                    break
        if self.random.random() < 0.3:
            await self.client.sleep(self.random.random() * self.mix.hold_s)
        await self.client.views.let_go(array, lease)
        if failed is not None:
            raise failed

    async def _put_lost(self, namespace: Namespace, key: Key, array: Value) -> None:
        """An allocation that is lost must be refused: its memory may be a newer one's."""
        try:
            outcome = await self._put_one(
                key, array, PutOptions(namespace=namespace, overwrite=True)
            )
        except ReservationLostError:
            return
        self.client.oracle.broken("lost_put", f"a lost allocation was put: {outcome.name}", key)

    # --- for the phase without faults ---------------------------------------------------------

    async def read(self, namespace: Namespace, keys: list[Key]) -> list[bytes | None]:
        """Get, and have the oracle look at what came."""
        started_us = self.client.process.scheduler.now_us
        targets = NewMemory(keys)
        await self.client.run(read_objects.read(self.client.context, namespace, targets))
        values: list[bytes | None] = []
        for key, placed, room in zip(keys, targets.placed, targets.rooms, strict=True):
            if placed is None or room is None:
                values.append(None)
                continue
            values.append(data := room.tobytes())
            version = Version(placed.epoch, placed.counter)
            self.client.oracle.read(self._who, (namespace, key), version, data, started_us)
        hits = [key for key, value in zip(keys, values, strict=True) if value is not None]
        self._note(f"get {namespace} {_names(keys)}: {_names(hits)}")
        return values

    async def must_store(self, namespace: Namespace, key: Key) -> None:
        """Put and get, with nothing in the way: both must succeed. A full pool of leased objects
        may say so, or evict this one for the puts of others, but not twice as long as a lease
        lives."""
        data = self._payload(namespace, key)
        options = PutOptions(namespace=namespace, wait_ms=1_500)
        for attempt in range(4):
            try:
                outcome = await self._put_one(key, data, options)
            except NoSpaceError:
                if attempt == 3:
                    raise
                continue
            if outcome is not PutOutcome.STORED:
                self.client.oracle.broken("liveness", f"a put of {key!r} was {outcome.name}", key)
            (found,) = await self.read(namespace, [key])
            if found == data:
                return
        self.client.oracle.broken("liveness", f"{key!r} was put and is not found", key)

    # --- helpers ------------------------------------------------------------------------------

    @property
    def _who(self) -> str:
        return self.client.process.name

    def _note(self, text: str) -> None:
        self.client.oracle.note(f"{self._who} {text}")

    def _payload(
        self, namespace: Namespace, key: Key, *, least: int = 0, size: int | None = None
    ) -> bytes:
        if size is None:
            size = self.random.choice((0, 1, 100, 1024, 3000, self.mix.size_bytes_max))
            size = max(least, self.mix.size_bytes_min, min(size, self.mix.size_bytes_max))
        data = self.random.randbytes(size)
        self.client.oracle.putting(namespace, key, data)
        return data

    async def _put_one(self, key: Key, value: Storable, options: PutOptions) -> PutOutcome:
        return await self.client.run(put.put(self.client.context, key, value, options))

    async def _put_many(
        self, keys: list[Key], values: list[bytes], options: PutOptions
    ) -> list[PutOutcome]:
        return await self.client.run(put.put_many(self.client.context, keys, values, options))

    def _wait_ms(self) -> int:
        return self.random.choice((0, 200, 1_500))

    def _flat_keys(self, most: int) -> list[Key]:
        count = self.random.randint(1, most)
        return [Key(b"f%d" % number) for number in self.random.sample(range(FLAT_KEYS), count)]

    def _chain(self) -> list[Key]:
        chain = self.random.randrange(CHAINS)
        shared = [Key(b"s%d-%d" % (chain // 2, index)) for index in range(SHARED_KEYS)]
        own = [Key(b"c%d-%d" % (chain, index)) for index in range(SHARED_KEYS, CHAIN_KEYS)]
        return shared + own

    def _a_key(self) -> Key:
        if self.random.random() < 0.6:
            return self._flat_keys(1)[0]
        return self.random.choice(self._chain())


def _names(keys: list[Key]) -> str:
    return ",".join(key.decode() for key in keys)


def _outcomes(outcomes: list[PutOutcome]) -> str:
    return ",".join(outcome.name for outcome in outcomes)
