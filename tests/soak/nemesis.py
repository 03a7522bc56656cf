"""What is broken, when and for how long: drawn from the seed before anything starts.

A fault names its target by a number; which process that is ("the leader", "the third node") is
looked up when the fault is due. Each fault undoes itself, and the last seconds have no faults.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from tests.soak.checker import Checker
from tests.soak.processes import Node, Process, SoakedCluster

FIRST_S: Final = 4.0
PEACE_S: Final = 15.0
"""At the end: what was broken must be whole again within that."""

BETWEEN_S: Final = 3.5
"""Faults begin so far apart on average; many overlap."""

SHM: Final = Path("/dev/shm")
LOSS: Final = "kill node and lose its memory"


class Fault(NamedTuple):
    at_s: float
    kind: str
    target: int
    """A random number; its remainder chooses."""
    length_s: float
    after_s: float
    """A second delay, for faults of two parts."""


KINDS: Final[dict[str, tuple[float, float, float]]] = {
    # kind: weight, shortest, longest; lengths are spread evenly over orders of magnitude
    "kill node": (3, 0.1, 6),
    "restart node politely": (3, 0.1, 4),
    "restart node with discard": (1, 0.1, 3),
    LOSS: (3, 0.1, 3),
    "break a disk": (2, 1, 8),
    "stop node": (3, 0.1, 30),
    "kill leader": (3, 0.1, 6),
    "kill a standby": (1, 0.1, 6),
    "stop leader": (2, 0.1, 10),
    "restart leader politely": (1, 0.1, 3),
    "kill all and start in another order": (0.7, 0.1, 3),
    "stop worker": (3, 0.1, 30),
    "kill worker": (2, 0.1, 1),
    "kill etcd": (0.7, 0.1, 4),
    "stop etcd": (0.7, 0.1, 4),
    "drop packets to a data port": (2, 0.3, 8),
    "refuse connections to a data port": (1, 0.3, 8),
    "hold bytes back and kill leader": (5, 1.5, 4.5),
    "flip bytes": (2, 0.1, 0.2),
    "fill /dev/shm": (1, 1, 6),
}

DISK_FAULTS: Final[tuple[dict[str, int], ...]] = (
    {"reads_fail": 1},
    {"writes_fail": 1},
    {"syncs_fail": 1},
    {"halves": 1},
    {"bytes_per_s": 4_000_000},
    {"bytes_per_s": 50_000},
)


def schedule(seed: int, seconds: float, left_out: frozenset[str]) -> list[Fault]:
    """The faults of a run, in order."""
    rng = random.Random(f"nemesis {seed}")
    kinds = [kind for kind in KINDS if kind not in left_out]
    weights = [KINDS[kind][0] for kind in kinds]
    if not kinds:
        return []
    faults: list[Fault] = []
    at_s = FIRST_S
    while at_s < seconds - PEACE_S:
        kind = rng.choices(kinds, weights)[0]
        _, shortest, longest = KINDS[kind]
        length_s = shortest * (longest / shortest) ** rng.random()
        length_s = min(length_s, seconds - PEACE_S - at_s)
        fault = Fault(at_s, kind, rng.randrange(1 << 30), length_s, rng.uniform(0.2, 3.0))
        faults.append(fault)
        at_s += rng.expovariate(1 / BETWEEN_S)
    if LOSS in kinds:  # of the second node, when it has a full disk, and early enough to be seen
        faults.append(Fault(max(FIRST_S, seconds - PEACE_S - 1), LOSS, 1, 0.5, 0))
    return sorted(faults)


class Nemesis:
    """Carries a schedule out. ``act`` does what is due."""

    def __init__(
        self, faults: list[Fault], cluster: SoakedCluster, workers: list[Process],
        stoppable: Callable[[Process], bool], checker: Checker,
    ) -> None:  # fmt: skip
        self.done: Counter[str] = Counter()
        self.filled = 0
        """How many times /dev/shm is full now."""
        self.story: list[str] = []
        self._todo = list(faults)
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._cluster = cluster
        self._workers = workers
        self._stoppable = stoppable
        self._checker = checker
        self._began = time.monotonic()

    def act(self) -> None:
        now = time.monotonic()
        while self._todo and self._began + self._todo[0].at_s <= now:
            fault = self._todo.pop(0)
            self.done[fault.kind] += 1
            self._do(fault)
        due = [entry for entry in self._later if entry[0] <= now]
        self._later = [entry for entry in self._later if entry[0] > now]
        for _, undo in due:
            undo()

    def end(self) -> None:
        """Undo everything at once."""
        self._todo.clear()
        later, self._later = self._later, []
        for _, undo in later:
            undo()
        for process in [*self._cluster.servers, *self._workers]:
            if process.stopped_until:
                process.resume()

    def tell(self, what: str) -> None:
        self.story.append(f"{time.monotonic() - self._began:7.1f} {time.monotonic():.3f} {what}")

    # --- faults -------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> None:
        now = time.monotonic()
        nodes, masters = self._cluster.nodes, self._cluster.masters
        node = nodes[fault.target % len(nodes)]
        length_s = fault.length_s
        self.tell(f"{fault.kind} ({fault.target % 60}) for {length_s:.1f} s")
        match fault.kind:
            case "kill node":
                self._away(node, now, length_s)
                node.end(down_s=length_s)
            case "restart node politely":
                self._away(node, now, length_s)
                node.end(signal.SIGTERM, down_s=length_s)
            case "restart node with discard":
                self._away(node, now, length_s)
                node.end(down_s=1e9)
                self._in(length_s, lambda: self._start(node, "--discard"))
            case _ if fault.kind == LOSS:
                self._away(node, now, length_s)
                node.end(down_s=1e9)
                self._in(length_s, lambda: self._start_without_memory(node, fault.target))
            case "break a disk":
                self._break_disk(fault.target, length_s)
            case "stop node":
                self._away(node, now, length_s)
                node.stop_for(length_s)
            case "kill leader":
                if leader := self._leader():
                    leader.end(down_s=length_s)
            case "kill a standby":
                others = [each for each in masters if each is not self._leader(tell=False)]
                if others:
                    others[fault.target % len(others)].end(down_s=length_s)
            case "stop leader":
                if leader := self._leader():
                    leader.stop_for(length_s)
            case "restart leader politely":
                if leader := self._leader():
                    leader.end(signal.SIGTERM, down_s=length_s)
            case "kill all and start in another order":
                self._checker.led(now)
                servers = [*masters, *nodes]
                random.Random(fault.target).shuffle(servers)
                for number, server in enumerate(servers):
                    down_s = length_s + number * 0.4
                    if server in nodes:
                        self._away(server, now, down_s)
                    server.end(down_s=down_s)
                self._in(length_s + 4, lambda: self._checker.led(time.monotonic()))
            case "stop worker":
                stoppable = [each for each in self._workers if self._stoppable(each)]
                stoppable[fault.target % len(stoppable)].stop_for(length_s)
            case "kill worker":
                self._workers[fault.target % len(self._workers)].end()
            case "kill etcd" | "stop etcd":
                self._checker.led(now)
                self._in(length_s + 3, lambda: self._checker.led(time.monotonic()))
                if (etcd := self._cluster.etcd) is None:
                    return
                if fault.kind == "kill etcd":
                    etcd.end(down_s=length_s)
                else:
                    etcd.stop_for(length_s)
            case "drop packets to a data port":
                self._filter([node], "DROP", length_s)
            case "refuse connections to a data port":
                self._filter([node], "REJECT", length_s)
            case "hold bytes back and kill leader":
                self._filter([each for each in nodes if each is not node], "DROP", length_s)
                # What is held back lands with the kernel's next attempt, and the next master
                # must not believe it.
                self._in(length_s + fault.after_s, self._kill_leader)
            case "flip bytes":
                self._flip(node.entry, random.Random(fault.target))
            case "fill /dev/shm":
                self._fill(length_s)
                self._away(node, now, length_s)
                node.end(signal.SIGTERM, down_s=length_s / 2)

    def _kill_leader(self) -> None:
        if leader := self._leader():
            self.tell(f"{leader.name} is killed")
            leader.end(down_s=0.5)

    def _start(self, node: Node, *flags: str) -> None:
        node.wait(5)
        node.down_until = 0
        node.start(*flags)

    def _start_without_memory(self, node: Node, target: int) -> None:
        """As after a power failure, which also damaged some of what is on its disk."""
        node.wait(5)
        node.lose_memory()
        if node.disk is not None:
            self._flip(node.disk, random.Random(target))
        self._start(node)

    def _break_disk(self, target: int, length_s: float) -> None:
        """Of the first node, which may have to join without it."""
        if (disk := self._cluster.faulty_disk) is None:
            return
        faults = random.Random(target).choice(DISK_FAULTS)
        self.tell(f"its disk: {faults}")
        self._checker.away(time.monotonic(), time.monotonic() + length_s + 2)
        disk.set(**faults)
        self._in(length_s, lambda: disk.set(**dict.fromkeys(faults, 0)))

    def _away(self, node: Process, now: float, length_s: float) -> None:
        self._checker.away(now, now + length_s + 2)

    def _leader(self, *, tell: bool = True) -> Process | None:
        leader = self._cluster.leader()
        if tell:
            self._checker.led(time.monotonic())
            self._in(3, lambda: self._checker.led(time.monotonic()))  # somebody else leads by now
        return leader

    def _filter(self, nodes: list[Node], action: str, length_s: float) -> None:
        rules = [
            ["INPUT", "-p", "tcp", "--dport", str(node.port), "-j", action]
            + (["--reject-with", "tcp-reset"] if action == "REJECT" else [])
            for node in nodes
        ]
        for rule in rules:
            iptables("-A", *rule)

        def undo() -> None:
            for rule in rules:
                iptables("-D", *rule)

        self._in(length_s, undo)

    def _flip(self, path: Path, rng: random.Random) -> None:
        with contextlib.suppress(OSError), path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for _ in range(20):
                at = rng.randrange(1 << 16, size)
                file.seek(at)
                byte = file.read(1)
                file.seek(at)
                file.write(bytes([byte[0] ^ 0xFF]))

    def _fill(self, length_s: float) -> None:
        path = SHM / "soak-filler"
        fill(path)
        self.filled += 1

        def undo() -> None:
            path.unlink(missing_ok=True)
            self._in(2, self._no_longer_filled)  # a node may say so a moment later

        self._in(length_s, undo)

    def _no_longer_filled(self) -> None:
        self.filled -= 1

    def _in(self, seconds: float, undo: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, undo))


def fill(path: Path) -> None:
    """Until its file system is full, to the last byte."""
    for step in (1 << 20, 1):
        with contextlib.suppress(OSError), path.open("ab", buffering=0) as file:
            while file.write(bytes(step)):
                pass


def iptables(*words: str) -> bool:
    done = subprocess.run(["iptables", "-w", *words], capture_output=True, check=False)
    return done.returncode == 0


def filter_reason() -> str:
    """Why ports cannot be filtered here; empty: they can."""
    rule = ("INPUT", "-p", "tcp", "--dport", "1", "-j", "DROP")
    try:
        if not iptables("-A", *rule):
            return "iptables is not allowed here"
    except OSError:
        return "there is no iptables (Debian's iptables)"
    iptables("-D", *rule)
    return ""
