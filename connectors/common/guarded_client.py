"""A client for adapters that engines call synchronously, with bounded waiting times.

A call of the engine takes at most 2 s, plus a time in proportion to its bytes, for any number of
calls to the store (*exchanges*). After several failures in a row a circuit breaker returns misses
at once for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from kvstore.client.client import Client
from kvstore.config import ClientConfig, load
from kvstore.errors import (
    DeadlineExceededError,
    KVStoreError,
    PermissionDeniedError,
    UnavailableError,
)
from kvstore.limits import BATCH_KEYS_MAX
from kvstore.runtime.breaker import Breaker

DEADLINE_MS: Final = 2_000
"""Deadline of one call, unless configured (``timeout_ms``)."""

BYTES_PER_MS: Final = 256 << 10
"""The slowest network worth loading from: a call for 1 GiB may take 4 s longer."""

REFUSALS_MAX: Final = 16
"""Distinct reasons that are logged; an engine of several models has one per namespace."""

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class DenialLog:
    """Logs that the store refuses calls, one line per reason, of thousands of calls. Threads:
    any."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._logged: set[str] = set()

    def log_once(self, error: PermissionDeniedError) -> None:
        """Log this refusal, unless its text was logged before."""
        why = str(error)  # as text: the error's frames hold buffers
        with self._lock:
            if why in self._logged or len(self._logged) >= REFUSALS_MAX:
                return
            self._logged.add(why)
        self._log.warning("refused_by_the_store, such calls are misses: %s", why)


class GuardedClient:
    """A client behind a circuit breaker. Threads: any."""

    def __init__(self, client: Client, log: logging.Logger) -> None:
        self.client = client
        self._log = log
        self._breaker = Breaker.of_a_store()
        self._changing = threading.Lock()
        self._refusals = DenialLog(log)
        self.openings = 0
        """Number of times that the breaker has opened."""

    def run(
        self, call: Callable[[int], ResultT], *, size: int = 0, is_short: bool = False
    ) -> ResultT:
        """Call ``call(timeout_ms)``, which transfers ``size`` bytes, and return its result.

        Args:
            is_short: whether a timeout does not count as a failure of the store, because the call
                has little time.

        Raises:
            KVStoreError: from the call.
            UnavailableError: also without a call, while the breaker is open.
        """
        with self._changing:
            if self._breaker.is_open(time.monotonic()):
                raise UnavailableError("the store has failed several times in a row")
        try:
            result = call(self.client.config.timeout_ms + size // BYTES_PER_MS)
        except KVStoreError as error:
            if not (is_short and isinstance(error, DeadlineExceededError)):
                self._note(error)
            raise
        with self._changing:
            was_closed = self._breaker.state(time.monotonic()) == "closed"
            self._breaker.succeeded()
        if not was_closed:
            self._log.info("the store answers again")
        return result

    def _note(self, error: KVStoreError) -> None:
        if isinstance(error, PermissionDeniedError):
            self._refusals.log_once(error)
        with self._changing:
            if not isinstance(error, UnavailableError):
                self._breaker.succeeded()
                return
            opened = self._breaker.failed(time.monotonic())
            self.openings += opened
        if opened:
            # As text: the error's frames hold buffers, which a stored log record would keep alive.
            self._log.warning(
                "the store is not asked for a while, calls are misses: %s", str(error)
            )


class GuardedCall:
    """One call of an engine, whose exchanges share its deadline. All methods raise the same errors
    as ``GuardedClient.run``. For one thread."""

    def __init__(self, guard: GuardedClient) -> None:
        self._guard = guard
        self._start = time.monotonic()
        self._moved = 0

    def run(self, exchange: Callable[[int], ResultT], *, size: int = 0) -> ResultT:
        """As ``GuardedClient.run``, with the remaining time of this call."""
        before_ms = self._moved // BYTES_PER_MS
        self._moved += size

        def within(timeout_ms: int) -> ResultT:
            spent_ms = int(1000 * (time.monotonic() - self._start))
            return exchange(max(1, timeout_ms + before_ms - spent_ms))

        return self._guard.run(within, size=size)

    def lookup(self, keys: Sequence[str | bytes], namespace: str) -> list[int | None]:
        """As ``Client.lookup``, for any number of keys."""
        client = self._guard.client

        def ask(some: Sequence[str | bytes], timeout_ms: int) -> list[int | None]:
            return client.lookup(some, namespace=namespace, timeout_ms=timeout_ms)

        return [size for some in slices(keys) for size in self.run(partial(ask, some))]


def slices(items: Sequence[ItemT]) -> list[Sequence[ItemT]]:
    """Split items into slices that fit into one call to the master."""
    return [items[at : at + BATCH_KEYS_MAX] for at in range(0, len(items), BATCH_KEYS_MAX)]


def client_of_an_engine(**given: object) -> Client:
    """Return a client with a timeout of ``DEADLINE_MS`` unless configured. Its settings come from
    ``given``, the environment and a file, as for ``Client``.

    Raises:
        ConfigError, StartupError, MasterUnreachableError: as for ``Client``.
    """
    config = load(ClientConfig, given)
    if "timeout_ms" not in config.model_fields_set:
        config = load(ClientConfig, {**given, "timeout_ms": DEADLINE_MS})
    return Client(config=config)
