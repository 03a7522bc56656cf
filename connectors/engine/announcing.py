"""Puts fleet records in the background, so that an engine starts without waiting for the store."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from kvstore.client.sync import Client
from kvstore.connectors.engine.fleet import Fleet
from kvstore.errors import KVStoreError
from kvstore.fleet import ANNOUNCED_EVERY_S
from kvstore.process.background import CLOSE_S, join_all, start_thread

AGAIN_S: Final = 10.0
"""Pause before the next attempt, if the store did not answer."""


class Record(NamedTuple):
    """The arguments of ``Fleet.announce``."""

    engine: str
    models: Sequence[str]
    mark: str
    description: Mapping[str, object]
    namespaces: Sequence[str]


class Announcer:
    """A thread that puts each record, again and again until the store has taken it, and then once
    an hour, because records have a lifetime."""

    def __init__(self, client: Client, log: logging.Logger) -> None:
        self._fleet = Fleet(client, log)
        self._log = log
        self._records: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread = start_thread("kvstore-fleet", self._run)

    def announce(self, record: Record) -> None:
        """Returns at once."""
        self._records.put(record)

    def stop(self) -> None:
        """Ends the thread after the call that it is in; closing the client ends that call."""
        self._stopping.set()
        self._records.put(None)

    def join(self) -> None:
        join_all([self._thread], CLOSE_S)

    def _run(self) -> None:
        taken: dict[str, Record] = {}
        while True:
            try:
                record = self._records.get(timeout=ANNOUNCED_EVERY_S if taken else None)
            except queue.Empty:
                due = list(taken.values())
            else:
                if record is None:
                    return
                taken[record.mark] = record
                due = [record]
            for each in due:
                while not self._put(each):
                    if self._stopping.wait(AGAIN_S):
                        return

    def _put(self, record: Record) -> bool:
        try:
            self._fleet.announce(*record)
        except KVStoreError as error:
            self._log.log(
                logging.DEBUG if self._stopping.is_set() else logging.WARNING,
                "fleet_not_announced reason=%s", error,
            )  # fmt: skip
            return False
        return True
