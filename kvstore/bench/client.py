"""A client process of a benchmark: makes one measurement after another.

The parent (``ClientProcess``) and the process (``main``) share a Unix socket, on which the process
listens once it is connected to its system and has written the pool. It ends when the parent closes
the socket.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from multiprocessing import connection
from typing import Any, Final, NamedTuple

from kvstore.bench.processes import ChildError, Children
from kvstore.bench.session import Session, StoreDriver

READY_SECONDS: Final = 240.0
"""Time to connect and to write the pool, which is cold at first."""
MORE_SECONDS: Final = 120.0
"""Time of a measurement besides its own, to prepare and to clean up."""
CLOSE_SECONDS: Final = 20.0


class Settings(NamedTuple):
    driver: str
    """``module:Class``."""
    options: dict[str, Any]
    mode: str
    address: str
    pool_bytes: int
    """Bytes of the store's memory that the process may fill."""
    memory_bytes: int
    """The system's processes by name: their processor time is measured with this process's."""
    processes: dict[str, int] = {}  # noqa: RUF012 - nothing changes it
    """The system's processes by name: their processor time is measured with this process's."""


class ClientProcess:
    """The parent's side. Use it in one thread."""

    def __init__(self, children: Children, name: str, settings: Settings) -> None:
        """Start the process, and wait until it is connected and its pool is warm.

        Raises:
            ChildError: the process failed, or took too long.
        """
        path = str(children.directory / f"{name}.socket")
        self._children = children
        self._patience = READY_SECONDS
        text = json.dumps(settings._asdict())
        self._child = children.start(name, "kvstore.bench.client", path, text)
        self.processor: dict[str, float] = {}
        self.found = 1.0
        """Both as in ``Session``."""

        def connect() -> connection.Connection | None:
            with contextlib.suppress(OSError):
                return connection.Client(path, "AF_UNIX")
            return None

        self._link = children.until(self._child, connect, READY_SECONDS, is_client=True)

    def prepare(self, op: str, size: int, batch: int, seconds: float) -> None:
        """Prepare a measurement (see ``Session.measure``), up to its first call."""
        self._patience = seconds + MORE_SECONDS
        self._send((op, size, batch, seconds))
        self._receive()

    def go(self) -> None:
        """Begin the calls; ``samples`` waits for the last one."""
        self._send(None)

    def samples(self) -> list[float]:
        """Return the seconds of each call.

        Raises:
            ChildError: the process failed, or took too long.
        """
        samples: list[float]
        samples, self.processor, self.found = self._receive()
        return samples

    def measure(self, op: str, size: int, batch: int, seconds: float) -> list[float]:
        self.prepare(op, size, batch, seconds)
        self.go()
        return self.samples()

    def close(self) -> None:
        """Make the process remove its objects and end; if it does not, the ``Children`` end it."""
        if not self._link.closed:
            self._link.close()
            with contextlib.suppress(ChildError):
                self._children.result(self._child, CLOSE_SECONDS)

    def _send(self, message: object) -> None:
        try:
            self._link.send(message)
        except OSError:
            raise self._child.error("ended") from None

    def _receive(self) -> Any:
        try:
            if not self._link.poll(self._patience):
                raise self._child.error(f"did not answer within {self._patience:.0f} s")
            reply = self._link.recv()
        except (EOFError, OSError):
            self._child.process.wait(CLOSE_SECONDS)
            raise self._child.error("ended") from None
        if isinstance(reply, str):
            raise ChildError(f"{self._child.name}: {reply}")
        return reply


def main(path: str, text: str) -> None:
    settings = Settings(**json.loads(text))
    module, _, name = settings.driver.partition(":")
    make = getattr(importlib.import_module(module), name)
    driver: StoreDriver = make(
        settings.address, settings.mode, settings.memory_bytes, **settings.options
    )
    session = Session(
        driver, settings.pool_bytes, name=f"{os.getpid()}-",
        processes={"client": os.getpid(), **settings.processes},
    )  # fmt: skip
    with contextlib.closing(session):
        session.warm()
        with (
            connection.Listener(path, "AF_UNIX") as listener,
            listener.accept() as link,
            contextlib.suppress(EOFError),
        ):
            while True:
                link.send(_measure(session, link.recv(), link))


def _measure(session: Session, work: Any, link: connection.Connection) -> object:
    def prepared() -> None:
        link.send(())
        link.recv()

    try:
        return session.measure(*work, prepared=prepared), session.processor, session.found
    except Exception as error:  # noqa: BLE001 - the parent ends everything, and reports it
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(*sys.argv[1:])
