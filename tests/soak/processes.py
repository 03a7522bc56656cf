"""The processes of a soak: an etcd, masters, nodes and workers; started, broken, started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from tests.support.faulty_disk import FaultyDisk
from tests.support.with_constants import arguments_of

ROOT: Final = Path.cwd()
"""Of the checkout whose store is soaked."""

MASTER_FLAGS: Final = ("--lease-ms", "1500", "--dead-ms", "2000")
MASTER_CONSTANTS: Final = {
    "kvstore.master.times:PUT_DEADLINE_MS": 2_000,
    "kvstore.master.times:LATE_WRITE_MS": 6_000,
    "kvstore.master.times:GATHER_MS": 2_000,
    "kvstore.master.times:ETCD_LEASE_S": 2,
}
"""Short promises: what takes half a minute by default happens every few seconds."""

DISK_FLAGS: Final = ("--disk-size", "64MiB", "--disk-writes-per-day", "0")

ETCD_PREFIX: Final = "kvstore"
"""Under which the masters meet, by default."""


class Process:
    """One process, which is the same over its restarts."""

    def __init__(self, name: str, command: Sequence[str], log: Path, *, environ: dict[str, str]
                 ) -> None:  # fmt: skip
        self.name = name
        self.command = list(command)
        self.log = log
        self.stopped_until = 0.0
        self.down_until = 0.0
        """Not started again before: the nemesis keeps it down."""
        self.expected_end = False
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *more: str) -> None:
        self.expected_end = False
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                [*self.command, *more], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                cwd=ROOT, env=os.environ | self._environ,
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def send(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def stop_for(self, seconds: float) -> None:
        """SIGSTOP; ``resume`` is due after so long."""
        self.send(signal.SIGSTOP)
        self.stopped_until = time.monotonic() + seconds

    def resume(self) -> None:
        self.send(signal.SIGCONT)
        self.stopped_until = 0.0

    def end(self, number: int = signal.SIGKILL, *, down_s: float = 0.0) -> None:
        self.expected_end = True
        self.down_until = time.monotonic() + down_s
        if self.stopped_until and number != signal.SIGKILL:
            self.resume()
        self.send(number)

    def wait(self, within_s: float) -> bool:
        """Whether it has ended by itself; it has ended then in any case."""
        if self._process is None:
            return True
        try:
            self._process.wait(within_s)
            return True
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False


class Forked(Process):
    """A process that runs a function of ours. Importing a client takes a second of a processor, so
    it is imported once, here, where no thread and no connection is ever made."""

    def __init__(self, name: str, work: Callable[[], int], log: Path) -> None:
        super().__init__(name, [], log, environ={})
        self._work = work
        self._pid = 0
        self._status: int | None = None

    def start(self, *more: str) -> None:
        """As ``Process.start``."""
        assert not more
        sys.stdout.flush()
        self._pid, self._status = os.fork(), None
        if self._pid:
            return
        status = 70
        try:
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = self._work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def running(self) -> bool:
        return self.status is None

    @property
    def status(self) -> int | None:
        if self._status is None and self._pid:
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def send(self, number: int) -> None:
        """As ``Process.send``."""
        if self.running:
            os.kill(self._pid, number)

    def wait(self, within_s: float) -> bool:
        """As ``Process.wait``."""
        deadline = time.monotonic() + within_s
        killed = False
        while self.running:
            if not killed and time.monotonic() >= deadline:
                killed = True
                self.send(signal.SIGKILL)
            time.sleep(0.01)
        return not killed


class Master(Process):
    """A ``kvstore-master``."""

    http_port = 0


class Node(Process):
    """A ``kvstore-node``."""

    port = 0
    disk: Path | None = None
    """Its file on a disk."""

    @property
    def entry(self) -> Path:
        return Path("/dev/shm", f"kvstore.{self.name}")

    def lose_memory(self) -> None:
        self.entry.unlink(missing_ok=True)
        self.entry.with_name(f"kvstore-key.{self.name}").unlink(missing_ok=True)


class SoakedCluster:
    """All servers. Nothing waits for them: who cannot reach what, tries again."""

    def __init__(self, directory: Path, *, masters: int, nodes: int, memory: str) -> None:
        self.directory = directory
        environ = {"KVSTORE_CONFIG": ""}
        self.etcd: Process | None = None
        flags: list[str] = []
        places: list[str] = []
        ports = free_ports(2 * masters + nodes + 3)
        if masters > 1:
            client, peer = (f"http://127.0.0.1:{ports.pop()}" for _ in range(2))
            command = [
                "etcd", "--name", "one", "--data-dir", str(directory / "etcd"),
                "--listen-client-urls", client, "--advertise-client-urls", client,
                "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
                "--initial-cluster", f"one={peer}", "--logger", "zap", "--log-level", "error",
                "--unsafe-no-fsync",
            ]  # fmt: skip
            self.etcd = Process("etcd", command, directory / "etcd.log", environ={})
            flags = ["--etcd", client.removeprefix("http://")]
        self.masters: list[Master] = []
        for number in range(masters):
            port, lane = ports.pop(), ports.pop()
            http_port = 0 if number else ports.pop()
            command = [
                sys.executable, "-m", *arguments_of(MASTER_CONSTANTS, "kvstore.cli.master"),
                "--port", str(port), "--lane-port", str(lane), "--http-port", str(http_port),
                *MASTER_FLAGS, *flags,
            ]  # fmt: skip
            log = directory / f"master-{number}.log"
            master = Master(f"master-{number}", command, log, environ=environ)
            master.http_port = http_port
            self.masters.append(master)
            places.append(f"127.0.0.1:{port}")
        self.master = "etcd://" + flags[1] if flags else places[0]
        self.places = places
        """The masters, as they announce themselves."""
        self.faulty_disk = FaultyDisk(directory) if need("cc") else None
        """Of the first node."""
        self.nodes: list[Node] = []
        for number in range(nodes):
            name = f"soak-{os.getpid()}-{number}"
            port = ports.pop()
            command = [
                sys.executable, "-m", "kvstore.cli.node", "--master", self.master, "--name", name,
                "--port", str(port), "--memory", memory, "--keep" if number % 2 else "--no-keep",
            ]  # fmt: skip
            log = directory / f"node-{number}.log"
            folder = directory / f"disk-{number}"
            if self.faulty_disk is not None and not number:
                folder = self.faulty_disk.files
                command = [*self.faulty_disk.prefix, *command]
            if has_disk := number < nodes - 1:  # one has memory alone
                folder.mkdir(exist_ok=True)
                command += ["--disk", str(folder), *DISK_FLAGS]
            node = Node(name, command, log, environ=environ)
            node.port = port
            node.disk = folder / f"kvstore.{name}" if has_disk else None
            self.nodes.append(node)

    @property
    def servers(self) -> list[Process]:
        return [*([self.etcd] if self.etcd else []), *self.masters, *self.nodes]

    def start(self) -> None:
        for server in self.servers:
            server.start()

    def leader(self) -> Process | None:
        """Which master leads now."""
        if self.etcd is None:
            return self.masters[0]
        command = ["etcdctl", "--endpoints", self.master.partition("//")[2], "--command-timeout=1s",
                   "get", "--print-value-only", "--prefix", ETCD_PREFIX]  # fmt: skip
        done = subprocess.run(
            command, capture_output=True, text=True, check=False,
            env=os.environ | {"ETCDCTL_API": "3"},
        )  # fmt: skip
        place = next((line for line in done.stdout.split() if line in self.places), "")
        return self.masters[self.places.index(place)] if place in self.places else None

    def ended(self) -> list[Process]:
        """Servers that have ended without having been told to, once each."""
        found = [each for each in self.servers if not each.running and not each.expected_end]
        for server in found:
            server.expected_end = True
        return found

    def supervise(self) -> None:
        """Resume, and start again, what is due."""
        now = time.monotonic()
        for server in self.servers:
            if server.stopped_until and now >= server.stopped_until:
                server.resume()
            if not server.running and now >= server.down_until:
                server.start()

    def close(self) -> list[str]:
        """End all politely; what did not end."""
        stuck: list[str] = []
        for server in reversed(self.servers):
            server.resume()
        for group in (self.nodes, self.masters, [self.etcd] if self.etcd else []):
            for server in group:
                server.end(signal.SIGTERM)
            stuck += [f"{server.name} does not end" for server in group if not server.wait(20)]
        return stuck

    def kill(self) -> None:
        for server in self.servers:
            server.end()
        for server in self.servers:
            server.wait(5)
        for node in self.nodes:
            node.lose_memory()


def free_ports(count: int) -> list[int]:
    """Of TCP on loopback, below those that the kernel gives to clients."""
    found: list[int] = []
    port = 20_000 + os.getpid() % 1_000 * 4
    while len(found) < count:
        port += 1
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
    return found


def need(program: str) -> bool:
    return shutil.which(program) is not None
