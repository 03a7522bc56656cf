"""A whole store in virtual time: one master, nodes, clients and their programs, from one seed.

A run has three phases. *Faults*: everything goes wrong that may, and only safety is asked for.
*Healing*: faults stop, nobody begins anything new, and what was begun must come to its end.
*Liveness*: every client puts and gets, and all of it must succeed; then nothing may be left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

from kvstore.config import ClientConfig
from kvstore.errors import KVStoreError
from kvstore.limits import Key
from kvstore.master.state.eviction import LRU, EvictionPolicy
from kvstore.master.state.liveness import LivenessRules
from kvstore.master.state.master_state import MasterRules, MasterState
from tests.simulation import inside
from tests.simulation.client import Client
from tests.simulation.faults import KINDS, Faults
from tests.simulation.known import KNOWN_ISSUES
from tests.simulation.master import Master
from tests.simulation.memory import Memory
from tests.simulation.network import Network, Weather
from tests.simulation.node import Node
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import SECOND, Process, Scheduler
from tests.simulation.workload import NAMESPACES, Mix, Worker

RULES = MasterRules(
    lease_ms=2_000,
    put_deadline_ms=6_000,
    quarantine_ms=2_000,
    put_wait_max_ms=6_000,
    gather_ms=600,
    beat_ms=100,
    liveness=LivenessRules(suspect_ms=400, dead_ms=1_200),
)
"""The defaults, a fifth of each."""

LEASE_MARGIN_MS = 40
CLOCK_DRIFT = 0.005
"""Of every clock, either way; two of them differ by less than the margin covers (2 %)."""

HEALED_US = 16 * SECOND
"""After the last fault: a client's patience, its last put's deadline, and quarantine."""

QUIET_US = 3 * SECOND
"""After the last operation: a lease, and a removal's wiping."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decides a run, besides the code."""

    seed: int
    fault_seconds: float = 8.0
    faults: tuple[str, ...] = KINDS
    nodes: int = 3
    clients: int = 4
    workers: int = 2
    waived: frozenset[str] = frozenset(KNOWN_ISSUES)
    """Rules of the oracle whose violations are only counted: issues that are known."""
    new_state: Callable[..., MasterState] = MasterState
    policy: Callable[[], EvictionPolicy] = LRU
    new_node: Callable[..., Node] = Node
    new_client: Callable[..., Client] = Client


class Cluster:
    """Everything that there is; ``run`` is the whole story of a seed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.scheduler = Scheduler(options.seed)
        self.random = random = self.scheduler.random
        self.oracle = Oracle(self.scheduler, waived=options.waived)
        weather = Weather(slow=random.choice((0.0, 0.02)), very_slow=random.choice((0.0, 0.003)))
        self.network = Network(self.scheduler, weather)
        self.piece_bytes = random.choice((256, 1_000, 1_024, 4_096))
        self.segment_bytes = random.choice((24, 48, 96)) << 10
        self.mix = Mix.draw(random, self.segment_bytes // random.choice((4, 8, 16)))
        self.piece_us = (5, random.choice((200, 2_000, 40_000, 150_000)))
        self.rules = replace(RULES, put_deadline_ms=random.choice((6_000, 6_000, 1_200)))
        self.paused = False
        self.master: Master | None = None
        self.nodes: list[Node] = []
        self.clients: dict[str, Client] = {}
        self.workers: list[Worker] = []
        self._memories: dict[bytes, Memory] = {}
        self._epoch = 0
        self._client_numbers = count(1)
        self._call_ids = count(1)
        self._start_master()
        for number in range(options.nodes):
            self.nodes.append(self._new_node(f"node{number}"))
        for _ in range(options.clients):
            self._new_client()

    # --- the run ------------------------------------------------------------------------------

    def run(self) -> None:
        """Raises SimulationError."""
        faults = Faults(self, self.options.faults)
        self._run_until(int(self.options.fault_seconds * SECOND))
        self.oracle.note("--- faults end")
        faults.stop()
        self.paused = True
        self._run_until(self.scheduler.now_us + HEALED_US)
        self._nothing_is_left("healed")
        self._everything_works()
        self._run_until(self.scheduler.now_us + QUIET_US)
        self._nothing_is_left("quiet")

    def run_steps(self, steps: int) -> None:
        """The first so many steps of ``run``'s phase with faults."""
        Faults(self, self.options.faults)
        while self.scheduler.steps < steps and self.scheduler.step():
            pass

    def _run_until(self, until_us: int) -> None:
        reached = [False]
        self.scheduler.after(
            until_us - self.scheduler.now_us, "phase", lambda: reached.__setitem__(0, True)
        )
        while not reached[0]:
            self.scheduler.step()

    def _nothing_is_left(self, when: str) -> None:
        for worker in self.workers:
            if worker.busy and worker.client.process.alive:
                who = worker.client.process.name
                self.oracle.broken("liveness", f"{who} is still at its {worker.busy} when {when}")
        assert self.master is not None
        left = {what: n for what, n in inside.leftovers(self.master.state).items() if n}
        if left:
            self.oracle.broken("liveness", f"left over when {when}: {left}")
        for client in self.clients.values():
            for what in ("checksum_mismatches", "corrupt_objects"):
                if client.context.counters.get(what):
                    self.oracle.broken("corrupt", f"{client.process.name} has seen {what}")

    def _everything_works(self) -> None:
        tasks = []
        for number, worker in enumerate(self.workers):
            if worker.client.process.alive:
                key = Key(b"last-%d" % number)
                namespace = NAMESPACES[number % len(NAMESPACES)]
                checking = worker.must_store(namespace, key)
                tasks.append(worker.client.process.spawn("last", checking))
        self._run_until(self.scheduler.now_us + 8 * SECOND)
        for task in tasks:
            if not task.ended:
                self.oracle.broken("liveness", "a put or get has not ended")
                continue
            try:
                task.result.result()
            except KVStoreError as error:
                self.oracle.broken("liveness", f"a put or get failed: {error!r}")

    # --- who there is -------------------------------------------------------------------------

    def processes(self) -> Iterator[Process]:
        if self.master is not None:
            yield self.master.process
        yield from (node.process for node in self.nodes)
        yield from (client.process for client in self.clients.values())

    def later(self, delay_us: int, action: Callable[[], None]) -> None:
        self.scheduler.after(delay_us, "later", action)

    def kill_master(self) -> None:
        if self.master is not None:
            self.master.process.kill()
            self.master = None
            self.oracle.master_died()

    def revive(self) -> None:
        """Start again what is dead: it is another process then. A node that was killed may find its
        memory again."""
        if self.master is None:
            self._start_master()
        for index, node in enumerate(self.nodes):
            if not node.process.alive:
                kept = node.memory.linked and self.random.random() < 0.7
                node.memory.linked = kept
                self.nodes[index] = self._new_node(node.name, node.memory if kept else None)
        for name, client in list(self.clients.items()):
            if not client.process.alive:
                del self.clients[name]
                self._new_client()

    def _start_master(self) -> None:
        self._epoch += 1
        process = Process(self.scheduler, "master", "host-m")
        self.oracle.note(f"master starts epoch={self._epoch}")

        def new_state(started_ms: int) -> MasterState:
            return self.options.new_state(
                epoch=self._epoch,
                rules=self.rules,
                policy=self.options.policy,
                started_ms=started_ms,
            )

        clock = (self.random.randint(0, 10**9), self._rate())
        master = Master(process, self.oracle, new_state, clock, self.random.randbytes(16))
        self.network.listen("master", process, master.accept)
        self.master = master

    def _new_node(self, name: str, left: Memory | None = None) -> Node:
        """``left``: memory of the process of before."""
        process = Process(self.scheduler, name, self._host_of(name))
        memory = left or Memory(name, process.host, self.segment_bytes, self.random)
        self._memories[memory.uuid] = memory
        self.oracle.note(f"{name} starts attached={left is not None}")
        node = self.options.new_node(
            process, self.network, self.oracle, memory, self.piece_bytes, attached=left is not None
        )
        self.network.listen(name, process, node.accept)
        return node

    def _new_client(self) -> None:
        name = f"client{next(self._client_numbers)}"
        process = Process(self.scheduler, name, self.random.choice(("host-a", "host-b")))
        config: dict[str, Any] = {
            "timeout_ms": self.random.choice((2_000, 2_000, 6_000)),
            "lease_margin_ms": LEASE_MARGIN_MS,
            "put_wait_ms": 1_000,
            "placements_max": self.random.choice((0, 4, 1000)),
            "transports": self.random.choice((("shm", "tcp"), ("shm", "tcp"), ("tcp",))),
        }
        client = self.options.new_client(
            process, self.network, self.oracle,
            memories=self._memories.get, piece_bytes=self.piece_bytes, piece_us=self.piece_us,
            rate=self._rate(),
            config=ClientConfig(**config), call_ids=self._call_ids,
        )  # fmt: skip
        self.clients[name] = client
        for _ in range(self.options.workers):
            random = Random(self.random.getrandbits(32))
            worker = Worker(client, self.mix, random, lambda: self.paused)
            self.workers.append(worker)
            process.spawn("work", worker.work())

    @staticmethod
    def _host_of(name: str) -> str:
        return "host-a" if name in ("node0", "node1") else "host-b"

    def _rate(self) -> float:
        return 1 + self.random.uniform(-CLOCK_DRIFT, CLOCK_DRIFT)
