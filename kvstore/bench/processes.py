"""Child processes of benchmarks and examples: stores, other programs, jobs.

Enter a ``Children``, ``start`` services and wait until they are ``ready``, start jobs and take
their ``result``. Leaving it ends all running children, the last one first, by SIGTERM, then by
SIGKILL, also after an exception or a signal. Every wait is bounded, and ends when any child fails.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from types import FrameType
from typing import NamedTuple, Self, TypeVar

import click

from kvstore.errors import KVStoreError
from kvstore.runtime import interpreter

POLL_SECONDS = 0.02
STOP_SECONDS = 20.0
"""Time for a clean exit of a child before it is killed."""
GROUP_SECONDS = 2.0
"""Time for a child's own children after it has ended: Python's resource tracker ends last, and
unlinks the leftover shared memory."""
TAIL_LINES = 20

PORTS = range(10_000, 32_000, 2)
"""Below the ports that Linux gives to outgoing connections (net.ipv4.ip_local_port_range)."""
_given: set[int] = set()
PORT_TRIES = 100

READY_SECONDS = 60.0
"""Time for a master or a node to start, without the time to touch the memory."""
TOUCH_BYTES_PER_SECOND = 256 << 20
"""Minimum rate at which a node touches its memory."""

SHARED_MEMORY = "/dev/shm/"  # noqa: S108  where POSIX shared memory has its names
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Result = TypeVar("Result")


class ChildError(Exception):
    """A child failed or took too long. The child's last output follows the first line."""


@dataclass(frozen=True)
class Program:
    """A child process. Its output goes to two files, so that it never blocks on a full pipe."""

    name: str
    process: subprocess.Popen[bytes]
    stdout: Path
    stderr: Path

    def output(self) -> str:
        """Return the child's output so far, standard error last."""
        return "".join(path.read_text(errors="replace") for path in (self.stdout, self.stderr))

    def error(self, what: str) -> ChildError:
        lines = [f"  {self.name}: {line}" for line in self.output().splitlines()[-TAIL_LINES:]]
        return ChildError("\n".join([f"{self.name} (pid {self.process.pid}) {what}", *lines]))


class Children:
    """Context manager around all processes of one run."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environment = environment() if environ is None else environ
        self._directory = tempfile.TemporaryDirectory(prefix="kvstore-children-")
        self._running: list[Program] = []
        self._shared_memory: set[Path] = set()

    @property
    def directory(self) -> Path:
        """The directory of the children's files, temporary ones included; removed at the end."""
        return Path(self._directory.name)

    def start(
        self,
        name: str,
        module: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
    ) -> Program:
        """Run ``python -m module arguments``; ``environment`` is added to that of all children."""
        return self.start_command(
            name,
            *interpreter.command("-m", module, *arguments),
            environment={**(environment or {}), "PYTHONPATH": interpreter.path()},
        )

    def start_command(
        self, name: str, *command: str, environment: Mapping[str, str] | None = None
    ) -> Program:
        """Run a program; see ``start``."""
        stdout, stderr = (Path(self._directory.name, f"{name}.{end}") for end in ("out", "err"))
        with _signals_deferred(), stdout.open("wb") as out, stderr.open("wb") as err:
            # A process group of its own: Ctrl-C reaches only the parent, which ends the children.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**self._environment, "TMPDIR": self._directory.name, **(environment or {})},
                process_group=0,
            )
            child = Program(name, process, stdout, stderr)
            self._running.append(child)
        return child

    def ready(self, child: Program, pattern: str, seconds: float) -> re.Match[str]:
        """Wait until a service writes a line that matches, and remember its shared memory."""

        def said() -> re.Match[str] | None:
            # Complete lines only: the text after the last line end may be half a line.
            lines = child.output().rpartition("\n")[0]
            return re.search(pattern, lines, re.MULTILINE)

        return self.until(child, said, seconds)

    def until(
        self,
        child: Program,
        ask: Callable[[], Result | None],
        seconds: float,
        *,
        is_client: bool = False,
    ) -> Result:
        """Wait until ``ask`` returns a value: as ``ready``, for a service that prints no line.

        Args:
            is_client: the shared memory that it has mapped is a service's, and stays.
        """
        for _ in self._polls(child, seconds, "was not ready"):
            if found := ask():
                if not is_client:
                    self._shared_memory |= _shared_memory_of(child.process.pid)
                return found
            if child.process.poll() is not None:
                raise child.error(f"ended with status {child.process.returncode} at its start")
        raise AssertionError("unreachable")

    def result(self, child: Program, seconds: float) -> str:
        for _ in self._polls(child, seconds, "was not done"):
            status = child.process.poll()
            if status == 0:
                self._running.remove(child)
                break
            if status is not None:
                raise child.error(f"ended with status {status}")
        return child.stdout.read_text()

    def kill(self, child: Program) -> None:
        """Kill a child (SIGKILL) and remove its shared memory, as a power failure does."""
        memory = _shared_memory_of(child.process.pid)
        child.process.kill()
        child.process.wait()
        self._running.remove(child)
        for path in memory:
            path.unlink(missing_ok=True)

    def _polls(self, child: Program, seconds: float, what: str) -> Iterator[None]:
        """Yield every few milliseconds, as long as time is left and all other children live."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for other in self._running:
                if other is not child and other.process.poll() is not None:
                    raise other.error(f"ended with status {other.process.returncode}")
            yield
            time.sleep(POLL_SECONDS)
        raise child.error(f"{what} within {seconds:.0f} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with _signals_deferred():  # a second Ctrl-C must not leave half of them running
            for child in reversed(self._running):
                _stop(child.process, STOP_SECONDS)
            for path in self._shared_memory:  # still exists only if its node had to be killed
                path.unlink(missing_ok=True)
            self._directory.cleanup()


@contextlib.contextmanager
def failures_reported(name: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Run the command ``name``. Every terminating signal acts like Ctrl-C, so that all is cleaned
    up. An error or an interruption ends the process, with a line for ``tell``."""
    for number in SIGNALS:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    except (ChildError, KVStoreError) as error:
        what, _, output = str(error).partition("\n")
        if output:
            click.echo(output, err=True)
        tell(f"{name}: FAILED: {what}")
        sys.exit(1)
    except KeyboardInterrupt:
        tell(f"{name}: interrupted")
        sys.exit(128 + signal.SIGINT)


def require_modules(advice: str, *modules: str) -> None:
    """Raises ChildError, with this advice, unless these modules are installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise ChildError(f"{module} is not installed; {advice}")


class Servers(NamedTuple):
    addresses: dict[str, str]
    """For clients, by mode; ``tcp`` is for every mode that is absent."""
    pids: dict[str, int]
    """By name: ``master``, ``storage``."""
    dashboard: str = ""

    def address(self, mode: str = "tcp") -> str:
        return self.addresses.get(mode, self.addresses["tcp"])


def start_store(
    children: Children,
    memory_bytes: int,
    *,
    http: bool = False,
    flags: Sequence[str] = (),
    node_flags: Sequence[str] = (),
) -> Servers:
    """Start a master and a node on this host, and wait until the node has touched its memory.

    Args:
        flags: more flags of the master.

    Raises:
        ChildError: a process did not start.
    """
    ports = ("--port=0", f"--http-port={free_port() if http else 0}")
    master = children.start("master", "kvstore.cli.master", *ports, *flags)
    line = r"listening on (\S+:\d+)" + (r"[^\0]*dashboard on (http://\S+)" if http else "()")
    address, dashboard = children.ready(master, line, READY_SECONDS).groups()
    joined = (f"--master={address}", f"--memory={memory_bytes}", *node_flags)
    node = children.start("node", "kvstore.cli.node", *joined)
    seconds = READY_SECONDS + memory_bytes / TOUCH_BYTES_PER_SECOND
    children.ready(node, r"^kvstore-node .+", seconds)
    pids = {"master": master.process.pid, "storage": node.process.pid}
    return Servers({"tcp": address}, pids, dashboard)


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without settings of kvstore and Mooncake, plus ``more``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVSTORE_", "MOONCAKE_", "MC_"))
    }
    return kept | {"KVSTORE_CONFIG": ""} | more


def free_port(host: str = "127.0.0.1") -> int:
    """Return a new free port; the next one, which a master takes for its lane, is free, too. Linux
    gives neither to outgoing connections, so they stay free during a restart of a server.

    Raises:
        OSError: no such port can be found.
    """
    untried = [port for port in PORTS if port not in _given]
    for port in SystemRandom().sample(untried, min(PORT_TRIES, len(untried))):
        with (
            contextlib.suppress(OSError),
            socket.create_server((host, port)),
            socket.create_server((host, port + 1)),
        ):
            _given.add(port)
            return port
    raise OSError(f"no port of {PORTS.start} to {PORTS.stop} is free on {host}")


def connects(host: str, port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((host, port)) == 0


def _stop(process: subprocess.Popen[bytes], seconds: float) -> None:
    """End a process, and all remaining processes of its group."""
    with contextlib.suppress(ProcessLookupError):  # the group has ended
        for number, patience in ((signal.SIGTERM, GROUP_SECONDS), (signal.SIGKILL, STOP_SECONDS)):
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(POLL_SECONDS)
    process.wait(STOP_SECONDS)


def _shared_memory_of(pid: int) -> set[Path]:
    """Return the POSIX shared memory that a process has mapped; empty without /proc."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        names = (line.split(maxsplit=5)[-1] for line in maps.splitlines())
        return {Path(name) for name in names if name.startswith(SHARED_MEMORY)}
    return set()


@contextlib.contextmanager
def _signals_deferred() -> Iterator[None]:
    """Defer signals that would end this process until the end of the block."""
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        arrived.append(number)

    handlers = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for which, handler in handlers.items():
            signal.signal(which, handler)
        for number in arrived:
            signal.raise_signal(number)
