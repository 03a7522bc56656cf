"""A client process of a benchmark: carries out one measurement after the other.

The parent (``ClientProcess``) and the process (``main``) share a Unix socket. The process listens
on it once it is connected to its system and has written the whole pool. It ends when the parent
closes the socket.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from multiprocessing import connection
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bench import mooncake, redis
from kvstore.bench.ours import OurDriver
from kvstore.bench.session import Session
from kvstore.demo.processes import ChildError, Children
from kvstore.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvstore.bench.session import StoreDriver

READY_SECONDS: Final = 120.0
"""Time-out to connect and to write the whole pool: Mooncake's is cold at first."""
MORE_SECONDS: Final = 120.0
"""Time that a measurement may take beyond its own, to prepare and to clean up."""
CLOSE_SECONDS: Final = 20.0
OURS: Final = "kvstore"
MOONCAKE: Final = "mooncake"
REDIS: Final = "redis"


class Settings(NamedTuple):
    """Settings of a client process."""

    system: str
    mode: str
    """``Row.mode``; ``behind`` below is ``Row.behind``."""
    address: str
    pool_bytes: int
    """How much of the store's memory the process may fill."""
    memory_bytes: int
    """Size of its memory to put from, and of that to get into."""
    behind: str = ""
    processes: dict[str, int] = {}  # noqa: RUF012 - nothing changes it
    """The system's processes by name: their processor time is measured with this process's."""


class ClientProcess:
    """The parent's side. Use it in one thread."""

    def __init__(self, children: Children, name: str, settings: Settings) -> None:
        """Starts the process, and waits until it is connected and its pool is warm.

        Raises:
            ChildError: the process failed, or took too long.
        """
        path = str(children.directory / f"{name}.socket")
        self._children = children
        self._patience = READY_SECONDS
        self._child = children.start(name, "bench.client", path, json.dumps(settings._asdict()))
        self.pid = self._child.process.pid
        self.processor: dict[str, float] = {}
        """As ``Session.processor``."""

        def connect() -> connection.Connection | None:
            with contextlib.suppress(OSError):
                return connection.Client(path, "AF_UNIX")
            return None

        self._link = children.until(self._child, connect, READY_SECONDS)

    def prepare(self, op: str, size: int, batch: int, seconds: float) -> None:
        """Prepare a measurement (see ``Session.measure``), up to its first call."""
        self._patience = seconds + MORE_SECONDS
        self._say((op, size, batch, seconds))
        self._answer()

    def go(self) -> None:
        """Begin the calls; ``samples`` waits for the last one."""
        self._say(None)

    def samples(self) -> list[float]:
        """Seconds of each call.

        Raises:
            ChildError: the process failed, or took too long.
        """
        samples: list[float]
        samples, self.processor = self._answer()
        return samples

    def measure(self, op: str, size: int, batch: int, seconds: float) -> list[float]:
        """``prepare``, ``go`` and ``samples`` in one."""
        self.prepare(op, size, batch, seconds)
        self.go()
        return self.samples()

    def close(self) -> None:
        """Make the process remove its objects and end; if it does not, it is left to the
        ``Children``."""
        if not self._link.closed:
            self._link.close()
            with contextlib.suppress(ChildError):
                self._children.result(self._child, CLOSE_SECONDS)

    def _say(self, what: object) -> None:
        try:
            self._link.send(what)
        except OSError:
            raise self._child.error("ended") from None

    def _answer(self) -> Any:
        try:
            if not self._link.poll(self._patience):
                raise self._child.error(f"did not answer within {self._patience:.0f} s")
            answer = self._link.recv()
        except (EOFError, OSError):
            self._child.process.wait(READY_SECONDS)
            raise self._child.error("ended") from None
        if isinstance(answer, str):
            raise ChildError(f"{self._child.name}: {answer}")
        return answer


def environment() -> dict[str, str]:
    """The environment of all processes of a benchmark: it lets both systems use their defaults."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("KVSTORE_", "MOONCAKE_", "MC_"))
    }
    return kept | {"KVSTORE_CONFIG": ""}


def driver_of(settings: Settings) -> StoreDriver:
    """The driver that makes the calls of a system. Raises KVStoreError: it cannot be reached."""
    where = settings.address, settings.mode, settings.memory_bytes
    if settings.behind:
        module = importlib.import_module(f"bench.{settings.behind}")
        behind: StoreDriver = module.Driver(*where, on_mooncake=settings.system == MOONCAKE)
        return behind
    if settings.system == MOONCAKE:
        return mooncake.MooncakeDriver(*where)
    if settings.system == REDIS:
        return redis.RedisDriver(*where)
    if settings.system == OURS:
        return OurDriver(*where)
    raise InvalidArgumentError(f"there is no system {settings.system}")


def main(path: str, text: str) -> None:
    settings = Settings(**json.loads(text))
    session = Session(
        driver_of(settings), settings.pool_bytes, name=f"{os.getpid()}-",
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


def _measure(session: Session, question: Any, link: connection.Connection) -> object:
    def prepared() -> None:
        link.send(())
        link.recv()

    try:
        return session.measure(*question, prepared=prepared), session.processor
    except Exception as error:  # noqa: BLE001 - the parent ends everything, and says why
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    main(*sys.argv[1:])
