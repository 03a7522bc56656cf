"""Puts an engine's fleet records in the background: an engine does not wait for a store."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.background import start_thread
from kvstore.client.sync import Client
from kvstore.connectors.fleet import Fleet
from kvstore.errors import KVStoreError

AGAIN_S: Final = 10.0
"""Until the next attempt, where the store did not answer."""


class Record(NamedTuple):
    """The arguments of ``Fleet.announce``."""

    engine: str
    models: Sequence[str]
    mark: str
    description: Mapping[str, object]
    namespaces: Sequence[str]


class Announcer:
    """A thread that puts records, again until the store has taken them, and logs warnings of
    engines that differ."""

    def __init__(self, client: Client, log: logging.Logger) -> None:
        self._fleet = Fleet(client)
        self._log = log
        self._records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = start_thread("kvstore-fleet", self._run)

    def announce(self, record: Record) -> None:
        """Returns at once."""
        self._records.put(record)

    def stop(self) -> None:
        """Announces nothing more. A call under way ends with the client."""
        self._stopping.set()
        self._records.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while (record := self._records.get()) is not None:
            while not self._put(record):
                if self._stopping.wait(AGAIN_S):
                    return

    def _put(self, record: Record) -> bool:
        try:
            warnings = self._fleet.announce(*record)
        except KVStoreError as error:
            self._log.log(
                logging.DEBUG if self._stopping.is_set() else logging.WARNING,
                "fleet_not_announced reason=%s", error,
            )  # fmt: skip
            return False
        self._log.info("fleet_joined fingerprint=%s", record.mark)
        for warning in warnings:
            self._log.warning("FLEET: %s", warning)
        return True
