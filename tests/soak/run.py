"""A store of real processes under faults, watched by an independent checker.

    make soak SECONDS=120 SEED=7
    python -m tests.soak --seconds 1800 --seed 7

The store has masters that elect through a real etcd, nodes with small pools, and workers that do
everything a program can do with a client. The faults (``nemesis``) and the workers' calls follow
from the seed, but their order does not: a seed repeats the schedule, not the run.

The run has namespaces of its own (shared memory, network, processes), so that a full ``/dev/shm``
or a filtered port concerns only itself, and nothing is left behind. Where namespaces are not
allowed, it says which faults it leaves out.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import re
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvstore import Client
from kvstore.config.base import AUTH_VARIABLE
from kvstore.errors import KVStoreError
from tests.soak.checker import Checker, Violation
from tests.soak.journal import Reader
from tests.soak.nemesis import KINDS, LOSS, Nemesis, filter_reason, schedule
from tests.soak.processes import Forked, Process, SoakedCluster, need
from tests.soak.recording_client import Settings
from tests.soak.worker import work
from tests.soak.workloads import BROUGHT, DISKS, RECOVERED, ROLES, WRITTEN
from tests.support.certificates import Identities

INSIDE: Final = "SOAK_INSIDE"
SHM_SIZE: Final = "800m"
"""Four times what the nodes have: views may keep what is gone for a while."""
MEMORY: Final = "48MiB"
NODES: Final = 4
TIMEOUT_MS: Final = 6_000
LINE_EVERY_S: Final = 10.0

GAVE_UP: Final = re.compile(r"ExecuteBatchError raised.*\n(  .*\n)+")


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(sys.argv[1:] if arguments is None else arguments)
    if not os.environ.get(INSIDE):
        return outside(options)
    return Soak(options).run()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m tests.soak", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("--seconds", type=float, default=120, help="how long faults and work last")
    parser.add_argument("--seed", type=int, default=None, help="of the schedule; else it is drawn")
    parser.add_argument("--masters", type=int, default=3, help="1: without etcd")
    parser.add_argument("--roles", default=",".join(ROLES), help="workers, by their roles")
    parser.add_argument("--without", default="", help="kinds of faults that are left out; or: all")
    parser.add_argument("--only", default="", help="the only kinds of faults")
    parser.add_argument("--auth", action="store_true", help="all processes have an identity")
    parser.add_argument("--first", action="store_true", help="end at the first violation")
    parser.add_argument("--keep", action="store_true", help="keep logs and journals of a good run")
    parser.add_argument("--table", type=Path, help="write the table of the run to this file, too")
    options = parser.parse_args(arguments)
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1, 1 << 20)
    for name in options.roles.split(","):
        if name not in ROLES:
            parser.error(f"there is no role {name!r}; there are: {', '.join(ROLES)}")
    return options


def outside(options: argparse.Namespace) -> int:
    """The same once more, in namespaces of its own where that is allowed."""
    again = [sys.executable, "-m", "tests.soak", *sys.argv[1:]]
    if "--seed" not in sys.argv:
        again += ["--seed", str(options.seed)]
    for user in ([], ["--user", "--map-root-user"]):
        unshare = ["unshare", *user, "--mount", "--net", "--ipc", "--pid", "--fork",
                   "--mount-proc", "--kill-child=SIGKILL"]  # fmt: skip
        inner = (
            f"mount -t tmpfs -o size={SHM_SIZE} none /dev/shm && chmod 1777 /dev/shm && "
            'mount -t tmpfs none /run && ip link set lo up && exec "$@"'
        )
        command = [*unshare, "sh", "-c", inner, "soak"]
        try:
            allowed = subprocess.run([*command, "true"], capture_output=True, check=False)
        except OSError:
            break
        if allowed.returncode == 0:
            return subprocess.call([*command, *again], env=os.environ | {INSIDE: "namespaces"})
    return subprocess.call(again, env=os.environ | {INSIDE: "host"})


class Soak:
    """One run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.directory = Path(tempfile.mkdtemp(prefix="soak-"))
        if options.auth:
            identities = Identities(self.directory)
            os.environ[AUTH_VARIABLE] = identities.file("soak", "master", "node", "admin")
        self.checker = Checker()
        self.left_out = self._left_out()
        self.cluster = SoakedCluster(
            self.directory, masters=options.masters, nodes=NODES, memory=MEMORY
        )
        self.workers: list[Process] = []
        self.reader = Reader(self.directory)
        self.numbers = 0
        self.ended: Counter[str] = Counter()
        self._shown = 0
        self.began = time.monotonic()

    # --- running ------------------------------------------------------------------------------

    def run(self) -> int:
        options = self.options
        print(f"soak: {options.seconds:.0f} s, seed {options.seed}, {options.masters} masters, "
              f"{NODES} nodes, workers: {options.roles}")  # fmt: skip
        for kind, why in self.left_out.items():
            print(f"soak: left out: {kind}: {why}")
        signal.signal(signal.SIGTERM, _interrupt)
        before = set(os.listdir("/dev/shm"))
        try:
            self._work()
        except KeyboardInterrupt:
            print("soak: interrupted")
        finally:
            for worker in self.workers:
                worker.end()
                worker.wait(5)
            self.cluster.kill()
        left = sorted(set(os.listdir("/dev/shm")) - before)
        if left:
            self._broken("left_behind", f"in /dev/shm: {left}")
        self.checker.finish()
        return self._report()

    def _work(self) -> None:
        options = self.options
        self.cluster.start()
        self._wait_until_it_serves(40)
        names = options.roles.split(",")
        for name in names:
            self.workers.append(self._worker(name))
        faults = schedule(options.seed, options.seconds, frozenset(self.left_out))
        self.nemesis = Nemesis(faults, self.cluster, self.workers, self._may_stop, self.checker)
        self.began = began = time.monotonic()
        line = began
        while (now := time.monotonic()) < began + options.seconds:
            self.nemesis.act()
            for server in self.cluster.ended():
                self._ended(server, f"{server.name} ended with status {server.status}")
            self.cluster.supervise()
            self._tend()
            self.checker.take(self.reader.read())
            if now - line >= LINE_EVERY_S:
                line = now
                self._progress(now - began)
            if self.checker.violations and options.first:
                break
            time.sleep(0.1)
        self.nemesis.end()
        self._peace()

    def _peace(self) -> None:
        """Workers end, servers come back, everything works again, and ends when it is told to."""
        for worker in self.workers:
            worker.resume()
            worker.end(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while any(each.running for each in self.workers) and time.monotonic() < deadline:
            self.cluster.supervise()
            time.sleep(0.1)
        for worker in self.workers:
            if worker.running:
                worker.send(signal.SIGABRT)  # writes where its threads are
                worker.wait(5)
                self._broken("hangs", f"{worker.name} does not end within 60 s")
            elif worker.status not in (0, -signal.SIGTERM):  # it had not begun to listen
                self._broken("worker_died", f"{worker.name} ended with status {worker.status}")
        self.checker.take(self.reader.read())
        self._serves_again()
        for what in self.cluster.close():
            self._broken("hangs", what)
        self._check_disks()
        self._look_at_logs()

    def _serves_again(self) -> None:
        """All nodes are alive, and something can be put and got."""
        asking = Forked("peace", lambda: serves(self.cluster.master), self.directory / "peace.log")
        asking.start()
        deadline = time.monotonic() + 30
        while asking.running and time.monotonic() < deadline:
            self.cluster.supervise()
            time.sleep(0.1)
        if not asking.wait(0) or asking.status:
            why = tail(asking.log)
            self._broken("not_whole_again", f"30 s after the last fault: {why}")
        while not is_healthy(self.cluster.masters[0].http_port):
            if time.monotonic() >= deadline:
                self._broken("not_whole_again", "/healthz is silent 30 s after the last fault")
                break
            self.cluster.supervise()
            time.sleep(0.1)

    def _check_disks(self) -> None:
        """They were used, or the run shows nothing about them."""
        if "disks" not in self.options.roles.split(","):
            return
        for node in self.cluster.nodes:
            objects = recovered(node.log.read_text(errors="replace"))
            self.checker.counts[DISKS, RECOVERED] += objects
        for what in (WRITTEN, BROUGHT, *([RECOVERED] if LOSS in self.nemesis.done else [])):
            if not self.checker.counts[DISKS, what]:
                self._broken("disks_unused", f"no {what}")

    def _wait_until_it_serves(self, seconds: float) -> None:
        asking = Forked("start", lambda: serves(self.cluster.master), self.directory / "start.log")
        asking.start()
        if not asking.wait(seconds) or asking.status:
            raise SystemExit(f"soak: the cluster does not start: see {self.directory}")

    # --- workers ------------------------------------------------------------------------------

    def _worker(self, role: str) -> Process:
        self.numbers += 1
        number = self.numbers * 10_000
        master = self.cluster.master if number % 3 else ",".join(self.cluster.places)
        settings = Settings(role, master, number, self.options.seed, self.directory, TIMEOUT_MS)
        log = self.directory / f"worker-{role}.log"
        worker: Process = Forked(role, lambda: work(settings), log)
        if self.numbers % 7 == 0:  # without the compiled steps, which is decided at import
            words = [str(each) for each in settings]
            command = [sys.executable, "-m", "tests.soak.worker", *words]
            worker = Process(role, command, log, environ={"KVSTORE_NATIVE": "0"})
        worker.start()
        return worker

    def _may_stop(self, worker: Process) -> bool:
        return ROLES[worker.name].stoppable

    def _tend(self) -> None:
        """Start workers again that were killed; say of which that is a violation."""
        now = time.monotonic()
        for number, worker in enumerate(self.workers):
            if worker.stopped_until and now >= worker.stopped_until:
                worker.resume()
            if worker.running:
                continue
            if not worker.expected_end:
                self._broken("worker_died", f"{worker.name} ended with status {worker.status}")
            self.workers[number] = self._worker(worker.name)

    def _ended(self, server: Process, what: str) -> None:
        if self.nemesis.filled and "/dev/shm has" in tail(server.log):
            self.checker.notes["a node found /dev/shm full, and was started again"] += 1
            server.down_until = time.monotonic() + 0.5
        else:
            self._broken("server_died", f"{what}: {tail(server.log)[-500:]}")

    def _look_at_logs(self) -> None:
        for path in sorted(self.directory.glob("*.log")):
            text = path.read_text(errors="replace")
            # gRPC's own: the client that it answered had given up.
            text = GAVE_UP.sub("", text)
            for word in ("Traceback", "never retrieved", "Fatal Python error"):
                if word in text:
                    at = text.index(word)
                    self._broken("traceback", f"{path.name}: {text[max(0, at - 300) : at + 1500]}")
                    break

    # --- telling ------------------------------------------------------------------------------

    def _broken(self, rule: str, detail: str) -> None:
        self.checker.violations.append(Violation(rule, time.monotonic(), 0, detail))

    def _left_out(self) -> dict[str, str]:
        only = self.options.only.split(",")
        kinds = set(KINDS) - set(only) if only != [""] else self.options.without.split(",")
        if self.options.without == "all":
            kinds = set(KINDS)
        found = {kind: "asked for" for kind in sorted(kinds) if kind}
        inside = os.environ[INSIDE] == "namespaces"
        why = filter_reason() if inside else "no network namespace of its own (root may make one)"
        if why:
            for kind in ("drop packets to a data port", "refuse connections to a data port",
                         "hold bytes back and kill leader"):  # fmt: skip
                found[kind] = why
        if not inside:
            found["fill /dev/shm"] = "the host's own /dev/shm"
        if not need("cc"):
            found["break a disk"] = "there is no C compiler (Debian's gcc)"
        if self.options.masters > 1 and not need("etcd"):
            raise SystemExit(
                "soak: there is no etcd (Debian's etcd-server); --masters 1 needs none"
            )
        if self.options.masters == 1:
            found |= dict.fromkeys(("kill etcd", "stop etcd", "kill a standby"), "one master")
        return found

    def _progress(self, elapsed: float) -> None:
        operations = sum(self.checker.counts.values())
        faults = sum(self.nemesis.done.values())
        of = f"{elapsed:5.0f} of {self.options.seconds:.0f} s"
        print(f"soak: {of}, {operations:,} operations, {faults} faults, "
              f"{len(self.checker.violations)} violations", flush=True)  # fmt: skip
        for violation in self.checker.violations[self._shown :]:
            print(f"soak: {violation.rule}: {violation.detail[:200]}", flush=True)
        self._shown = len(self.checker.violations)

    def _report(self) -> int:
        from tests.soak.report import table

        text = table(self)
        print(text)
        if self.options.table:
            self.options.table.write_text(text)
        violations = self.checker.violations
        if violations or self.options.keep:
            (self.directory / "violations.txt").write_text(
                "\n\n".join(
                    f"{v.at:.3f} {v.rule} worker {v.worker}\n{v.detail}" for v in violations
                )
            )
            (self.directory / "story.txt").write_text("\n".join(self.nemesis.story) + "\n")
            print(f"soak: logs, journals, violations.txt and story.txt: {self.directory}")
            print(f"soak: again: make soak SECONDS={self.options.seconds:.0f} "
                  f"SEED={self.options.seed}")  # fmt: skip
        else:
            shutil.rmtree(self.directory)
        return 1 if violations else 0


def serves(master: str) -> int:
    """Ends with 0 once every node is alive and a value comes back; says what is not so."""
    with Client(master, timeout_ms=5_000) as client:
        while True:
            try:
                alive = sum(node.state == "alive" for node in client.status().nodes)
                if alive >= NODES:
                    client.put("peace", b"x" * 1000, overwrite=True)
                    if client.get("peace") == b"x" * 1000:
                        return 0
                print(f"{alive} nodes of {NODES} are alive", flush=True)
            except KVStoreError as error:
                print(repr(error), flush=True)
            time.sleep(0.2)


def recovered(log: str) -> int:
    """Objects that a node found on its disk when it started without its memory."""
    objects = 0
    is_kept = is_lost = False
    for line in log.splitlines():
        if "memory_attached" in line:
            is_kept = True
        elif "disk_ready" in line:
            is_lost, is_kept = not is_kept and "attached=True" in line, False
        elif is_lost and (found := re.search(r"medium=disk objects=(\d+)", line)):
            objects += int(found[1])
            is_lost = False
    return objects


def is_healthy(http_port: int) -> bool:
    """Whether the child of a master serves."""
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=2)
    if AUTH_VARIABLE in os.environ:
        anybody = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection("127.0.0.1", http_port, timeout=2, context=anybody)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status == http.client.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 3_000))
        return file.read().decode(errors="replace")


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt
