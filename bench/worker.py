"""A client process of a benchmark: carries out one measurement after the other.

The parent (``Worker``) and the process (``main``) share a Unix socket; each line is a JSON object,
a request or its answer. The process ends when the socket closes.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from typing import Any, Final, TypedDict

from bench.results import Shares
from bench.rows import HICACHE, LMCACHE
from kvstore.bench.session import Session
from kvstore.demo.processes import ChildError, Children
from kvstore.errors import InvalidArgumentError

READY_SECONDS: Final = 120.0
"""Time-out to connect and to write the whole pool: Mooncake's is cold at first."""
MORE_SECONDS: Final = 120.0
"""Time that a measurement may take beyond its own, to prepare and to clean up."""
CLOSE_SECONDS: Final = 20.0
OURS: Final = "kvstore"
MOONCAKE: Final = "mooncake"
SYSTEMS: Final = (OURS, MOONCAKE)
CLIENT: Final = "client"


class Settings(TypedDict):
    """Settings of a client process."""

    system: str
    behind: str
    """As of a row."""
    mode: str
    address: str
    pool_bytes: int
    """How much of the store's memory the process may fill."""
    memory_bytes: int
    """Size of its memory to put from, and of that to get into."""
    warm: bool
    """Whether it writes the whole pool once before it is ready."""
    processes: dict[str, int]
    """The system's processes by name, whose processor time is measured with its own."""


class Worker:
    """The parent's side. For one thread."""

    def __init__(self, children: Children, name: str, settings: Settings) -> None:
        """Start the process; ``ready`` waits for it."""
        self.name = name
        self._children = children
        self._listener = socket.socket(socket.AF_UNIX)
        path = children.directory / f"{name}.socket"
        self._listener.bind(str(path))
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._socket: socket.socket | None = None
        self.processor: Shares = {}
        """As ``Session.processor``."""
        self._child = children.start(name, "bench.worker", str(path), json.dumps(settings))

    @property
    def pid(self) -> int:
        return self._child.process.pid

    def ready(self) -> None:
        """Wait until the process is connected and its pool is warm.

        Raises:
            ChildError: the process failed, or took too long.
        """
        self._socket = self._children.until(self._child, self._accepted, READY_SECONDS)
        self._listener.close()
        self._lines = self._socket.makefile("r")
        self._answer(READY_SECONDS)

    def prepare(self, op: str, size: int, batch: int, seconds: float) -> None:
        """Prepare a measurement (see ``Session.measure``), up to its first call."""
        assert self._socket is not None, "not ready"
        question = {"op": op, "size": size, "batch": batch, "seconds": seconds}
        self._patience = seconds + MORE_SECONDS
        self._say(question)
        self._answer(self._patience)

    def go(self) -> None:
        """Begin the calls; ``samples`` waits for the last one."""
        self._say({})

    def samples(self) -> list[float]:
        """Seconds of each call.

        Raises:
            ChildError: the process failed, or took too long.
        """
        answer = self._answer(self._patience)
        found: list[float] = answer["samples"]
        self.processor = answer["processor"]
        return found

    def measure(self, op: str, size: int, batch: int, seconds: float) -> list[float]:
        """``prepare``, ``go`` and ``samples`` in one."""
        self.prepare(op, size, batch, seconds)
        self.go()
        return self.samples()

    def close(self) -> None:
        """Make the process remove its objects and end. Idempotent; a process that has failed, or
        does not end, is left to the ``Children``."""
        self._listener.close()
        if self._socket is None:
            return
        self._lines.close()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._socket = None
        with contextlib.suppress(ChildError):
            self._children.result(self._child, CLOSE_SECONDS)

    def _accepted(self) -> socket.socket | None:
        try:
            return self._listener.accept()[0]
        except BlockingIOError:
            return None

    def _say(self, what: dict[str, Any]) -> None:
        assert self._socket is not None
        try:
            self._socket.sendall(json.dumps(what).encode() + b"\n")
        except OSError:
            raise self._child.error("ended") from None

    def _answer(self, seconds: float) -> dict[str, Any]:
        assert self._socket is not None
        self._socket.settimeout(seconds)
        try:
            line = self._lines.readline()
        except TimeoutError:
            raise self._child.error(f"did not answer within {seconds:.0f} s") from None
        if not line:
            self._child.process.wait(READY_SECONDS)
            raise self._child.error("ended")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ChildError(f"{self.name}: {answer['error']}")
        return answer


def session(settings: Settings) -> Session:
    """The session of this process.

    Raises:
        KVStoreError: the system cannot be reached.
    """
    from kvstore.bench.session import Driver

    driver: Driver
    if settings["behind"] == LMCACHE:
        from bench.lmcache import LMCacheDriver

        driver = LMCacheDriver(
            settings["system"], settings["mode"], settings["address"], settings["memory_bytes"]
        )
    elif settings["behind"] == HICACHE:
        from bench.hicache import HiCacheDriver

        driver = HiCacheDriver(
            settings["address"], settings["mode"], settings["memory_bytes"],
            on_mooncake=settings["system"] == MOONCAKE,
        )  # fmt: skip
    elif settings["system"] == OURS:
        from kvstore.bench.ours import OurDriver

        driver = OurDriver(settings["address"], settings["mode"], settings["memory_bytes"])
    elif settings["system"] == MOONCAKE:
        from bench.mooncake import MooncakeDriver

        driver = MooncakeDriver(settings["mode"], settings["address"], settings["memory_bytes"])
    else:
        raise InvalidArgumentError(f"there is no system {settings['system']}")
    processes = {CLIENT: os.getpid(), **settings["processes"]}
    return Session(driver, settings["pool_bytes"], name=f"{os.getpid()}-", processes=processes)


def environment() -> dict[str, str]:
    """The environment of all processes of a benchmark: both systems use their defaults."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVSTORE_", "MOONCAKE_", "MC_"))
    }
    return kept | {"KVSTORE_CONFIG": ""}


def main(path: str, text: str) -> None:
    settings: Settings = json.loads(text)
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(path)
        with link.makefile("rw") as lines:
            work = session(settings)
            try:
                if settings["warm"]:
                    work.warm()
                _say(lines, {"ready": True})
                while line := lines.readline():
                    _say(lines, _measure(work, json.loads(line), lines))
            finally:
                work.close()


def _measure(work: Session, question: dict[str, Any], lines: Any) -> dict[str, Any]:
    def prepared() -> None:
        _say(lines, {"prepared": True})
        lines.readline()

    try:
        return {
            "samples": work.measure(**question, prepared=prepared),
            "processor": work.processor,
        }
    except Exception as error:  # noqa: BLE001 - the parent ends everything, and says why
        return {"error": f"{type(error).__name__}: {error}"}


def _say(lines: Any, what: dict[str, Any]) -> None:
    lines.write(json.dumps(what) + "\n")
    lines.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
