"""Bounds how long an engine's thread waits for the store, in adapters that engines call
synchronously.

A call lasts at most 2 s, and a time for the bytes that it moves. After several failures in a row
the guard makes no calls for a while: the engine gets a miss at once, and computes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvstore.breaker import Breaker
from kvstore.client.sync import Client
from kvstore.config import ClientConfig, load
from kvstore.errors import BufferMismatchError, KVStoreError, UnavailableError

DEADLINE_MS: Final = 2_000
"""The deadline of one call, unless the settings name another (``timeout_ms``)."""

BYTES_PER_MS: Final = 256 << 10
"""The slowest network that is worth loading from: a call that moves 1 GiB may last 4 s longer."""

ResultT = TypeVar("ResultT")


class Guard:
    """A client behind a circuit breaker. Threads: any."""

    def __init__(self, client: Client, log: logging.Logger) -> None:
        self.client = client
        self._log = log
        self._breaker = Breaker.of_a_store()
        self._changing = threading.Lock()

    def run(self, call: Callable[[int], ResultT], *, size: int = 0) -> ResultT:
        """The result of ``call(timeout_ms)``, which moves ``size`` bytes.

        Raises:
            KVStoreError: from the call.
            UnavailableError: the store has failed several times in a row; it was not asked.
        """
        with self._changing:
            if self._breaker.is_open(time.monotonic()):
                raise UnavailableError("the store has failed several times in a row")
        try:
            result = call(self.client.config.timeout_ms + size // BYTES_PER_MS)
        except KVStoreError as error:
            self._note(error)
            raise
        with self._changing:
            was_closed = self._breaker.state(time.monotonic()) == "closed"
            self._breaker.succeeded()
        if not was_closed:
            self._log.info("the store answers again")
        return result

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[NDArray[np.uint8]], namespace: str
    ) -> list[int | None]:
        """As ``Client.get_into``, but an object of another size than its buffer is a miss, and
        spoils no other one. All of it ends by one deadline. Raises as ``run``."""

        def read(timeout_ms: int) -> list[int | None]:
            client, until = self.client, time.monotonic() + timeout_ms / 1000

            def left_ms() -> int:
                return max(1, round((until - time.monotonic()) * 1000))

            try:
                return client.get_into(keys, buffers, namespace=namespace, timeout_ms=timeout_ms)
            except BufferMismatchError:  # of one object; the others are not read, either
                sizes = client.lookup(keys, namespace=namespace, timeout_ms=left_ms())
            fits = [at for at, size in enumerate(sizes) if size == buffers[at].nbytes]
            found = client.get_into(
                [keys[at] for at in fits],
                [buffers[at] for at in fits],
                namespace=namespace,
                timeout_ms=left_ms(),
            )
            of = dict(zip(fits, found, strict=True))
            return [of.get(at) for at in range(len(keys))]

        return self.run(read, size=sum(buffer.nbytes for buffer in buffers))

    def _note(self, error: KVStoreError) -> None:
        with self._changing:
            if not isinstance(error, UnavailableError):
                self._breaker.succeeded()
                return
            opened = self._breaker.failed(time.monotonic())
        if opened:
            # As text: a kept log record must not keep the buffers in the error's frames.
            self._log.warning(
                "the store is not asked for a while, calls are misses: %s", str(error)
            )


def client_of_an_engine(**given: object) -> Client:
    """A client with the deadline of adapters; settings come from ``given``, the environment and a
    file, as for ``Client``.

    Raises:
        ConfigError, StartupError, MasterUnreachableError: as ``Client``.
    """
    config = load(ClientConfig, given)
    if "timeout_ms" not in config.model_fields_set:
        config = load(ClientConfig, {**given, "timeout_ms": DEADLINE_MS})
    return Client(config=config)
