"""A whole store in virtual time: masters, nodes, clients and their programs, from one seed.

A run has three phases. *Faults*: anything may go wrong, and only safety is checked. *Healing*:
faults stop, clients begin no new calls, and all calls under way must end. *Liveness*: every client
puts and gets, and all of these calls must succeed; then nothing may be left over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from random import Random
from typing import Any

from kvstore.config import ClientConfig
from kvstore.errors import KVStoreError
from kvstore.limits import Key, plausible_epoch_max
from kvstore.master.state.density import density
from kvstore.master.state.eviction import NewPolicy, lru
from kvstore.master.state.liveness import LivenessRules
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.repair_queue import RepairRules
from kvstore.master.state.rules import MasterRules
from kvstore.master.superseded_epochs import SupersededEpochs
from tests.simulation import state_access
from tests.simulation.candidate import Candidate
from tests.simulation.client import Client
from tests.simulation.disk import SimDisk
from tests.simulation.etcd import Etcd, EtcdStub, Store
from tests.simulation.faults import KINDS, Faults
from tests.simulation.master import Master
from tests.simulation.memory import Memory
from tests.simulation.network import Network, NetworkConditions
from tests.simulation.node import Node
from tests.simulation.oracle import Oracle
from tests.simulation.scheduler import SECOND, Process, Scheduler
from tests.simulation.workload import NAMESPACES, Worker, WorkloadMix

RULES = MasterRules(
    lease_ms=2_000,
    put_deadline_ms=6_000,
    quarantine_ms=2_000,
    put_wait_max_ms=6_000,
    inventory_wait_ms=600,
    heartbeat_ms=100,
    bring_ms_max=400,
    liveness=LivenessRules(suspect_ms=400, dead_ms=1_200),
    repair=RepairRules(
        after_ms=2_000, copies_max=3, bytes_max=8 << 10, bytes_per_s=1 << 20, pause_max_ms=2_000
    ),
)
"""The defaults, a fifth of each."""

POLICIES: tuple[Callable[[], NewPolicy], ...] = lru, density
"""Of even and odd seeds."""

SUPERSEDED_S = 3.0
"""A fifth of what the last phase lasts: a term that a report has ended is followed by one of at
least this length."""

CLOCK_DRIFT = 0.005
"""Of every clock, either way; two of them differ by less than the margin covers (2 %)."""

HEALED_US = 24 * SECOND
"""After the last fault: what a client may wait for an allocation, compute and hold it (6, 7 and
5 s), its last put's deadline, or quarantine."""

BACK_US = 30 * SECOND
"""From then on no object lacks a replica for which there is room."""

DISK_BYTES = 240 << 10
"""Of each node: three times its memory."""

ENDED_US = 7 * SECOND
"""After the last fault: nobody is at an operation of before."""

QUIET_US = 3 * SECOND
"""After the last operation: a lease, and a removal's wiping."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What decides a run, besides the code."""

    seed: int
    fault_seconds: float = 8.0
    faults: tuple[str, ...] = KINDS
    masters: int = 0
    """How many; several elect one by an etcd. 0: the seed decides."""
    nodes: int = 3
    clients: int = 4
    workers: int = 2
    disks: bool = False
    """Whether nodes have disks; then objects are large enough for them."""
    mix: WorkloadMix | None = None
    """Of the work; None: the seed decides."""
    new_state: Callable[..., MasterState] = MasterState
    new_node: Callable[..., Node] = Node
    new_disk: Callable[..., SimDisk] = SimDisk


class SimulatedCluster:
    """Everything that there is; ``run`` is the whole story of a seed."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.scheduler = Scheduler(options.seed)
        self.random = random = self.scheduler.random
        self._memories: dict[bytes, Memory] = {}
        self.oracle = Oracle(self.scheduler, self._memories.get)
        weather = NetworkConditions(
            slow=random.choice((0.0, 0.02)),
            very_slow=random.choice((0.0, 0.003)),
            twice=random.choice((0.0, 0.0, 0.02)),
        )
        self.network = Network(self.scheduler, weather)
        self.piece_bytes = random.choice((256, 1_000, 1_024, 4_096))
        self.segment_bytes = random.choice((24, 48, 96)) << 10
        self._disks: dict[str, SimDisk] = {}
        if options.disks:
            self.segment_bytes = 80 << 10
        mix = WorkloadMix.draw(random, self.segment_bytes // random.choice((4, 8, 16)))
        self.mix = options.mix or mix
        if options.disks:
            mix.size_bytes_min, mix.size_bytes_max = 4_200, 5_000
        self.piece_us = (5, random.choice((200, 2_000, 40_000, 150_000)))
        self.rules = replace(RULES, put_deadline_ms=random.choice((6_000, 6_000, 1_200)))
        self.paused = False
        self.doomed_step = ""
        """Whoever comes to the step of this name next dies there."""
        self.steps_seen: dict[str, int] = {}
        """How often, by name."""
        self.masters = [f"master{n}" for n in range(options.masters or random.choice((1, 1, 2, 3)))]
        self.etcd: Etcd | None = None
        self._etcd_store = Store()
        self._alone: Master | None = None
        self._candidates: dict[str, Candidate] = {}
        self.nodes: list[Node] = []
        self.clients: dict[str, Client] = {}
        self.workers: list[Worker] = []
        self.wall_clock_us = SECOND
        """How far the clock that a single master takes its epoch from is ahead of ours."""
        self._client_numbers = count(1)
        self._call_ids = count(1)
        self._start_masters()
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
        self._run_until(self.scheduler.now_us + ENDED_US)
        self._undo_drains()
        self._run_until(self.scheduler.now_us + HEALED_US - ENDED_US)
        self._replicas_are_back()
        self._nothing_is_left("healed")
        self._everything_works()
        self._run_until(self.scheduler.now_us + QUIET_US)
        self._replicas_are_back()
        self._nothing_is_left("quiet")
        self._all_is_found()

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
        if self.master is None:
            self.oracle.broken("liveness", f"nobody leads when {when}")
            return
        left = {what: n for what, n in state_access.leftovers(self.master.state).items() if n}
        if left:
            self.oracle.broken("liveness", f"left over when {when}: {left}")
        for client in self.clients.values():
            for what in ("checksum_mismatches", "corrupt_objects"):
                if client.context.counters.get(what):
                    self.oracle.broken("corrupt", f"{client.process.name} has seen {what}")

    def _undo_drains(self) -> None:
        """Those of programs that died within them."""
        worker = next(each for each in self.workers if each.client.process.alive)
        worker.client.process.spawn("undo", worker.undo_drains())

    def _replicas_are_back(self) -> None:
        """Where there is room for them; and no copy is under way."""
        until_us = self.scheduler.now_us + BACK_US
        while self.master is not None:  # else ``_nothing_is_left`` says so
            state, now_ms = self.master.state, self.master.now_ms
            short = state_access.could_be_repaired(state, now_ms)
            copies = [put.token for put in state_access.repairs(state)]
            if not short and not copies:
                return
            if self.scheduler.now_us >= until_us:
                self.oracle.broken("liveness", f"{short} lack replicas; under way: {copies}")
            self._run_until(self.scheduler.now_us + SECOND // 2)

    def _all_is_found(self) -> None:
        """What nobody removed, replaced or evicted, and memory still holds, is at the master; and
        all that is at the master can be read."""
        assert self.master is not None
        for node in self.nodes:
            self.oracle.nothing_is_forgotten(node.memory)
        names = sorted(state_access.complete_objects(self.master.state))
        worker = next(each for each in self.workers if each.client.process.alive)
        tasks = []
        for namespace in NAMESPACES:
            keys = [key for its_namespace, key in names if its_namespace == namespace]
            if keys:
                reading = worker.read(namespace, keys)
                tasks.append((keys, worker.client.process.spawn("last", reading)))
        self._run_until(self.scheduler.now_us + 8 * SECOND)
        for keys, task in tasks:
            values = task.result.result() if task.ended else [None] * len(keys)
            missed = [key for key, value in zip(keys, values, strict=True) if value is None]
            if missed:
                self.oracle.broken("liveness", f"{missed} are there and cannot be read")

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

    @property
    def disks(self) -> list[SimDisk]:
        return list(self._disks.values())

    @property
    def master(self) -> Master | None:
        """Who leads, if anybody does."""
        leaders = [each.master for each in self._candidates.values() if each.leads]
        if self._alone is not None and self._alone.process.alive:
            leaders.append(self._alone)
        return leaders[0] if leaders else None

    def processes(self) -> Iterator[Process]:
        if self._alone is not None:
            yield self._alone.process
        yield from (candidate.process for candidate in self._candidates.values())
        if self.etcd is not None:
            yield self.etcd.process
        yield from (node.process for node in self.nodes)
        yield from (client.process for client in self.clients.values())

    def later(self, delay_us: int, action: Callable[[], None]) -> None:
        self.scheduler.after(delay_us, "later", action)

    def dies_at(self, step: str) -> bool:
        """Whether it is time to die for the process that has come to this step."""
        self.steps_seen[step] = self.steps_seen.get(step, 0) + 1
        if step != self.doomed_step:
            return False
        self.doomed_step = ""
        self.oracle.note(f"FAULT dies at {step!r}")
        self.later(self.random.randint(1, SECOND), self.revive)
        return True

    def revive(self) -> None:
        """Start again what is dead: it is another process then. A node that was killed may find its
        memory again."""
        self._start_masters()
        for index, node in enumerate(self.nodes):
            if not node.process.alive:
                kept = node.memory.linked and self.random.random() < 0.7
                node.memory.linked = kept
                if not kept and node.name in self._disks:
                    self.oracle.note(f"FAULT {node.name} lost its power")
                    self._disks[node.name].power_cut()
                if kept and self.random.random() < 0.3:
                    self.oracle.rot(node.memory, self.random)
                self.nodes[index] = self._new_node(node.name, node.memory if kept else None)
        for name, client in list(self.clients.items()):
            if not client.process.alive:
                del self.clients[name]
                self._new_client()

    def _start_masters(self) -> None:
        """Those that do not live."""
        if len(self.masters) == 1:
            if self._alone is None or not self._alone.process.alive:
                process = self._process(self.masters[0], "host-m")
                self._begin_alone(process, 0, self._new_clock(), self._outruns())
            return
        if self.etcd is None or not self.etcd.process.alive:
            process = self._process("etcd", "host-e")
            self.etcd = Etcd(process, self._etcd_store, self._rate())
            self.network.listen("etcd", process, self.etcd.accept)
        for name in self.masters:
            candidate = self._candidates.get(name)
            if candidate is None or not candidate.process.alive:
                process = self._process(name, f"host-{name}")
                stub = EtcdStub(process, self.network)
                candidate = Candidate(
                    process, self.oracle, stub, self._rate(), self._new_master, self._outruns()
                )
                self._candidates[name] = candidate
                self.network.listen(name, process, candidate.accept)

    def _begin_alone(
        self, process: Process, least: int, clock: Callable[[], float], outruns: SupersededEpochs
    ) -> None:
        """A term of the single master: as ``kvstore.master.main``."""
        epoch = max(least, self.wall_clock_us + self.scheduler.now_us)
        self._alone = master = self._new_master(process, epoch, clock)

        def outrun(epoch: int) -> None:
            if master is self._alone and outruns.ends_term(master.state.epoch, epoch, clock()):
                master.cease()
                above = outruns.next_epoch(epoch, self.wall_clock_us + self.scheduler.now_us)
                self._begin_alone(process, above, clock, outruns)

        master.outrun = outrun
        self.network.listen(process.name, process, master.accept)

    def _new_master(self, process: Process, epoch: int, clock: Callable[[], float]) -> Master:
        self.oracle.note(f"master starts epoch={epoch}")
        epoch_max = plausible_epoch_max(self.wall_clock_us + self.scheduler.now_us)

        def new_state(started_ms: int) -> MasterState:
            return self.options.new_state(
                epoch=epoch, epoch_max=epoch_max, rules=self.rules,
                policy=POLICIES[self.options.seed % len(POLICIES)](),
                started_ms=started_ms, events=True,
            )  # fmt: skip

        return Master(process, self.oracle, new_state, clock, self.random.randbytes(16))

    def _outruns(self) -> SupersededEpochs:
        return SupersededEpochs(self.random, every_s=SUPERSEDED_S)

    def _new_clock(self) -> Callable[[], float]:
        offset_s, rate, scheduler = self.random.uniform(0, 10**6), self._rate(), self.scheduler
        return lambda: offset_s + scheduler.now_us * rate / 1e6

    def _process(self, name: str, host: str) -> Process:
        process = Process(self.scheduler, name, host)
        process.dies_at = self.dies_at
        return process

    def _new_node(self, name: str, left: Memory | None = None) -> Node:
        """``left``: memory of the process of before."""
        process = self._process(name, self._host_of(name))
        memory = left or Memory(name, process.host, self.segment_bytes, self.random)
        self._memories[memory.uuid] = memory
        self.oracle.note(f"{name} starts attached={left is not None}")
        disk = self._disks.get(name)
        if self.options.disks and disk is None:
            disk = self.options.new_disk(name, process.host, DISK_BYTES, self.random)
        node = self.options.new_node(
            process, self.network, self.oracle, memory, self.piece_bytes,
            attached=left is not None, masters=tuple(self.masters), disk=disk,
            disk_attached=name in self._disks,
        )  # fmt: skip
        if disk is not None:
            self._disks[name] = disk
        node.copier = self._client_in(process, ClientConfig())
        self.network.listen(name, process, node.accept)
        return node

    def _new_client(self) -> None:
        name = f"client{next(self._client_numbers)}"
        process = self._process(name, self.random.choice(("host-a", "host-b")))
        config: dict[str, Any] = {
            "timeout_ms": self.random.choice((2_000, 2_000, 6_000)),
            "placements_max": self.random.choice((0, 4, 1000)),
            "transports": self.random.choice((("shm", "tcp"), ("shm", "tcp"), ("tcp",))),
        }
        self.clients[name] = client = self._client_in(process, ClientConfig(**config))
        for _ in range(self.options.workers):
            random = Random(self.random.getrandbits(32))
            worker = Worker(client, self.mix, random, lambda: self.paused)
            self.workers.append(worker)
            process.spawn("work", worker.work())

    def _client_in(self, process: Process, config: ClientConfig) -> Client:
        return Client(
            process, self.network, self.oracle,
            memories=self._memories.get, piece_bytes=self.piece_bytes, piece_us=self.piece_us,
            rate=self._rate(), config=config, call_ids=self._call_ids,
            masters=",".join(f"{name}:1" for name in self.masters),
        )  # fmt: skip

    @staticmethod
    def _host_of(name: str) -> str:
        return "host-a" if name in ("node0", "node1") else "host-b"

    def _rate(self) -> float:
        return 1 + self.random.uniform(-CLOCK_DRIFT, CLOCK_DRIFT)
