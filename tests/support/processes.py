"""Processes of tests: started, read line by line, told to end; and ports for them."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from types import MappingProxyType
from typing import Any, Final

import pytest

from tests.support.wait import SOON_S
from tests.support.with_constants import arguments_of

ROOT: Final = Path(__file__).parents[2]
START_S: Final = 30.0
STOP_S: Final = 15.0
PORTS: Final = range(10_000, 32_000, 2)
"""Linux gives none of them to outgoing connections."""
KVSTORE: Final = ("-m", "kvstore.cli.main")
"""The command, for ``run_python``."""


def flags_of(settings: dict[str, Any]) -> list[str]:
    """``{"lease_ms": 5}`` as ``["--lease-ms", "5"]``."""
    return [
        word
        for key, value in settings.items()
        for word in ("--" + key.replace("_", "-"), str(value))
    ]


def run_python(
    *arguments: str,
    prefix: Sequence[str] = (),
    within_s: float = 60.0,
    check: bool = False,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python ARGUMENTS`` to its end, with nothing to read, and returns what it said.

    Args:
        prefix: what the command begins with, to run it elsewhere.
        check: raises CalledProcessError: its status is not 0.
        variables: of the environment, beside those of this process.
    """
    return subprocess.run(
        [*prefix, sys.executable, *arguments], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, cwd=ROOT, env=os.environ | dict(variables or {}), timeout=within_s, check=check,
    )  # fmt: skip


def free_port() -> int:
    """A port that is free, and so is the next one, which a master takes for its lane. It stays free
    while a server is started again, and no other call is given it: a server may take seconds to
    listen on its port, and some would share it."""
    for port in itertools.islice(_untried, 100):
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port
    pytest.fail("there is no free port")


def _of_this_worker() -> Iterator[int]:
    """``PORTS`` in any order, without those of the workers that run beside this one."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    mine = list(PORTS[worker :: int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))])
    SystemRandom().shuffle(mine)
    return itertools.cycle(mine)


_untried: Final = _of_this_worker()


def let_others_leave(*ports: int) -> None:
    """Waits a while for ports that a master had: another test's process may have got one of them
    from the system meanwhile."""
    deadline = time.monotonic() + SOON_S
    for port in filter(None, ports):
        while time.monotonic() < deadline:
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(("127.0.0.1", port))
                break
            time.sleep(0.1)


def is_running(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    """Of a single-threaded parent or any other."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (task / "children").read_text().split())
    return found


class Server:
    """One process: what it says, and its signals."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        log: Path,
        prefix: Sequence[str] = (),
        constants: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        """``constants``: see ``with_constants``."""
        self.log = log
        self._name = " ".join((module, *arguments))
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-m", *arguments_of(constants, module), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                cwd=ROOT,
            )
        self._said = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def errors(self) -> str:
        return self.log.read_text(errors="replace")

    def line(self, pattern: str, *, within_s: float = START_S) -> re.Match[str]:
        """What it prints next that matches; what comes before is passed over."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + within_s
        while True:
            while b"\n" in self._said:
                line, _, self._said = self._said.partition(b"\n")
                if found := re.search(pattern, line.decode(errors="replace")):
                    return found
            ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(fd, 1 << 16) if ready else b""
            if not data:
                how = "it ended" if ready else f"not within {within_s} s"
                pytest.fail(f"{self._name}: no line {pattern!r}, {how}\n{self.errors}")
            self._said += data

    def wait(self, *, within_s: float = STOP_S) -> int:
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"{self._name} did not end within {within_s} s\n{self.errors}")

    def terminate(self, *, within_s: float = STOP_S) -> int:
        """SIGTERM; its exit status."""
        self.process.terminate()
        return self.wait(within_s=within_s)

    def kill(self) -> None:
        """``kill -9``; returns when it is dead."""
        self.process.kill()
        self.process.wait()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End it by force, if it is still there."""
        if self.process.poll() is None:
            self.resume()
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()
