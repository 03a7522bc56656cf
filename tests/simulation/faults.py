"""What goes wrong, and when. Each seed draws its own mixture of faults, so that some runs have
faults of one kind only and others a few of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation import disk as disk_module
from tests.simulation.node import LEAVE_US
from tests.simulation.scheduler import MS, SECOND

if TYPE_CHECKING:
    from tests.simulation.cluster import SimulatedCluster

KINDS = (
    "break_stream", "cut_one_way", "cut_both_ways", "stall_node", "stall_node_long",
    "stall_client", "stall_master", "kill_node", "leave_node", "kill_client",
    "kill_client_mid_put", "restart_master", "isolate_node", "die_at_step", "stall_leader",
    "cut_etcd", "restart_etcd", "put_clock_back", "hold_back",
)  # fmt: skip

DISK_KINDS = ("power_cut", "slow_disk", "fail_disk")
"""Further ones, where nodes have disks."""

QUICK_US = (5, 200)
"""Between two pieces of a transfer, where nothing is slow."""


class Faults:
    """Injects them until ``stop``, which undoes what can be undone."""

    def __init__(self, cluster: SimulatedCluster, allowed: tuple[str, ...] = KINDS) -> None:
        self._cluster = cluster
        self._random = random = cluster.scheduler.random
        chosen = list(allowed)
        if allowed == KINDS:
            chosen = [kind for kind in KINDS if random.random() < 0.6]
        if cluster.options.disks and allowed == KINDS:
            chosen += DISK_KINDS
        self._weights = {kind: random.choice((0.3, 1, 3)) for kind in chosen}
        if "break_stream" in self._weights:
            self._weights["break_stream"] *= 4
        self._pause_us = random.choice((150 * MS, 400 * MS, 1_000 * MS))
        self._stopped = False
        if self._weights and allowed:
            self._again()

    def stop(self) -> None:
        self._stopped = True
        cluster = self._cluster
        cluster.network.heal()
        cluster.network.weather.very_slow = cluster.network.weather.twice = 0.0
        cluster.doomed_step = ""
        for process in cluster.processes():
            if process.stalled:
                process.resume()
        cluster.piece_us = QUICK_US
        for client in cluster.clients.values():
            client.piece_us = QUICK_US
            client.die_after_pieces = 0
        for node in cluster.nodes:
            if node.copier is not None:
                node.copier.piece_us = QUICK_US
        for disk in cluster.disks:
            disk.fails, disk.delay_us = False, disk_module.QUICK_US
        cluster.revive()

    def _again(self) -> None:
        delay_us = int(self._random.expovariate(1 / self._pause_us))
        self._cluster.scheduler.after(delay_us, "fault", self._inject)

    def _inject(self) -> None:
        if self._stopped:
            return
        kinds, weights = list(self._weights), list(self._weights.values())
        getattr(self, f"_{self._random.choices(kinds, weights)[0]}")()
        self._again()

    # --- kinds --------------------------------------------------------------------------------

    def _break_stream(self) -> None:
        cluster = self._cluster
        open_ones = [end for end in cluster.network.streams if not (end.broken or end.closed)]
        if open_ones:
            end = self._random.choice(open_ones)
            self._note(f"break {end.name}")
            cluster.network.break_stream(end)

    def _cut_one_way(self) -> None:
        source, target = self._pair()
        self._cut(source, target, self._duration_us())

    def _cut_both_ways(self) -> None:
        source, target = self._pair()
        duration_us = self._duration_us()
        self._cut(source, target, duration_us)
        self._cut(target, source, duration_us)

    def _isolate_node(self) -> None:
        """From the master only, or the master from it: clients still read there."""
        node = self._random.choice(self._cluster.nodes).name
        duration_us = self._random.randint(SECOND // 2, 4 * SECOND)
        directions = self._random.choice((1, 2, 3))
        for master in self._cluster.masters:
            if directions & 1:
                self._cut(master, node, duration_us)
            if directions & 2:
                self._cut(node, master, duration_us)

    def _stall_node(self) -> None:
        self._stall(self._random.choice(self._cluster.nodes).process.name, self._duration_us())

    def _stall_node_long(self) -> None:
        """About as long as it takes to count as dead, or longer."""
        duration_us = self._random.randint(900 * MS, 4 * SECOND)
        self._stall(self._random.choice(self._cluster.nodes).process.name, duration_us)

    def _stall_client(self) -> None:
        self._stall(self._random.choice(list(self._cluster.clients)), self._duration_us())

    def _stall_master(self) -> None:
        name = self._random.choice(self._cluster.masters)
        self._stall(name, self._random.randint(10 * MS, 800 * MS))

    def _stall_leader(self) -> None:
        """Until another one may lead, if there is one."""
        master = self._cluster.master
        if master is not None:
            self._stall(master.process.name, self._random.randint(300 * MS, 2 * SECOND))

    def _kill_node(self) -> None:
        node = self._random.choice(self._cluster.nodes)
        self._note(f"kill {node.name}")
        node.process.kill()
        self._cluster.later(self._duration_us(), self._cluster.revive)

    def _leave_node(self) -> None:
        node = self._random.choice(self._cluster.nodes)
        if node.process.alive and not node.process.stalled:
            self._note(f"{node.name} leaves")
            node.leave()
            self._cluster.later(LEAVE_US, node.end)
            self._cluster.later(LEAVE_US + self._duration_us(), self._cluster.revive)

    def _power_cut(self) -> None:
        node = self._random.choice(self._cluster.nodes)
        self._note(f"{node.name} loses its power")
        node.memory.linked = False
        node.process.kill()
        self._cluster.later(self._duration_us(), self._cluster.revive)

    def _slow_disk(self) -> None:
        disk = self._random.choice(self._cluster.disks)
        disk.delay_us = self._random.choice(((10 * MS, 300 * MS), (SECOND, 9 * SECOND)))
        self._note(f"the disk of {disk.node} is slow")
        self._cluster.later(
            self._duration_us(), lambda: setattr(disk, "delay_us", disk_module.QUICK_US)
        )

    def _fail_disk(self) -> None:
        disk = self._random.choice(self._cluster.disks)
        disk.fails = True
        self._note(f"the disk of {disk.node} fails")
        self._cluster.later(self._duration_us(), lambda: setattr(disk, "fails", False))

    def _kill_client(self) -> None:
        name = self._random.choice(list(self._cluster.clients))
        self._note(f"kill {name}")
        self._cluster.clients[name].process.kill()
        self._cluster.later(self._duration_us(), self._cluster.revive)

    def _kill_client_mid_put(self) -> None:
        name = self._random.choice(list(self._cluster.clients))
        self._cluster.clients[name].die_after_pieces = self._random.randint(1, 20)
        self._cluster.later(2 * SECOND, self._cluster.revive)

    def _restart_master(self) -> None:
        """The leader, if there is one."""
        if self._stopped:
            return
        master = self._cluster.master
        if master is not None:
            self._note(f"kill {master.process.name}")
            master.process.kill()
        self._cluster.later(self._duration_us(), self._cluster.revive)

    def _put_clock_back(self) -> None:
        """That from which a single master takes its epoch, at its next start. Once: how far it may
        go is not bounded, how often is of no interest."""
        cluster = self._cluster
        if len(cluster.masters) == 1 and not cluster.oracle.clock_was_put_back:
            self._note("the clock is put back")
            cluster.oracle.clock_was_put_back = True
            # To before all epochs so far; and not onto one of them.
            cluster.wall_clock_us = -cluster.scheduler.now_us + self._random.randint(1, 1_000)
            self._restart_master()

    def _die_at_step(self) -> None:
        """Whoever comes to it next; each step that has a name is as likely as any other."""
        seen = sorted(self._cluster.steps_seen)
        if seen:
            self._cluster.doomed_step = self._random.choice(seen)

    def _cut_etcd(self) -> None:
        """From one master, which clients may reach still."""
        if self._cluster.etcd is not None:
            master = self._random.choice(self._cluster.masters)
            duration_us = self._random.randint(100 * MS, 3 * SECOND)
            directions = self._random.choice((1, 2, 3))
            if directions & 1:
                self._cut(master, "etcd", duration_us)
            if directions & 2:
                self._cut("etcd", master, duration_us)

    def _restart_etcd(self) -> None:
        if self._cluster.etcd is not None:
            self._note("kill etcd")
            self._cluster.etcd.process.kill()
            self._cluster.later(self._duration_us(), self._cluster.revive)

    def _hold_back(self) -> None:
        """A write that was given up is on its way still, for as long as a lease or a deadline."""
        cluster = self._cluster
        client = self._random.choice(list(cluster.clients))
        node = self._random.choice(cluster.nodes).name
        puts = self._puts()
        if puts:
            client, node = self._random.choice(puts)
        duration_us = self._random.randint(SECOND, 8 * SECOND)
        self._note(f"hold back {client}->{node} for {duration_us // MS} ms")
        cluster.network.hold_back(client, node, cluster.scheduler.now_us + duration_us)

    # --- helpers ------------------------------------------------------------------------------

    def _duration_us(self) -> int:
        """Mostly short, now and then long enough for everything to time out."""
        longest_us = self._random.choice((20 * MS, 300 * MS, 1_500 * MS, 4_000 * MS))
        return self._random.randint(1 * MS, longest_us)

    def _puts(self) -> list[tuple[str, str]]:
        """Who writes over tcp at this moment, and to which node."""
        ends = self._cluster.network.streams
        return [
            (end.process.name, end.peer.process.name)
            for end in ends
            if end.peer.is_written and not end.closed
        ]

    def _pair(self) -> tuple[str, str]:
        """Client and master, node and master, or client and node, in some order."""
        client = self._random.choice(list(self._cluster.clients))
        node = self._random.choice(self._cluster.nodes).name
        master = self._random.choice(self._cluster.masters)
        pair = self._random.choice(((client, master), (node, master), (client, node)))
        return pair if self._random.random() < 0.5 else (pair[1], pair[0])

    def _cut(self, source: str, target: str, duration_us: int) -> None:
        self._note(f"cut {source}->{target} for {duration_us // MS} ms")
        cluster = self._cluster
        cluster.network.cut(source, target, cluster.scheduler.now_us + duration_us)

    def _stall(self, name: str, duration_us: int) -> None:
        process = next((p for p in self._cluster.processes() if p.name == name), None)
        if process is None or process.stalled or not process.alive:
            return
        self._note(f"stall {name} for {duration_us // MS} ms")
        process.stall()

        def go_on() -> None:
            if process.stalled:
                self._note(f"{name} goes on")
                process.resume()

        self._cluster.later(duration_us, go_on)

    def _note(self, text: str) -> None:
        self._cluster.oracle.note(f"FAULT {text}")
