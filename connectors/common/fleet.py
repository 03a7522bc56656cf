"""Fleet records: descriptions of engines in the store, which make differences visible.

A record (``kvstore.calls.fleet_records``) names an engine, its models, its namespaces and the
settings on which the bytes of its blocks depend. An engine warns if another engine's record of the
same model differs from its own; ``kvstore why`` shows all records; the proxy reads those of vLLM.
"""

from __future__ import annotations

import json
import logging
import os.path
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvstore.calls.fleet_records import (
    ANNOUNCED_EVERY_S,
    FORMAT,
    LIFETIME_S,
    FleetRecord,
    as_read,
    compare_descriptions,
    record_keys,
    records_of,
    short_name,
)
from kvstore.client.client import Client
from kvstore.connectors.common.guarded_client import DenialLog
from kvstore.errors import KVStoreError, PermissionDeniedError
from kvstore.limits import FLEET_NAMESPACE, KEY_BYTES_MAX, of_tenant
from kvstore.runtime.clock import uptime
from kvstore.runtime.tasks import CLOSE_S, join_all, start_thread

AGAIN_S: Final = 5.0
"""Pause after a failed attempt."""


class FleetRecords:
    """The fleet records of one store, seen by one engine. Threads: one at a time."""

    def __init__(self, client: Client, log: logging.Logger) -> None:
        """``log`` gets one line for each announced fingerprint and for each distinct warning."""
        self._client = client
        self._namespace = of_tenant(client.config.tenant, FLEET_NAMESPACE)
        self._log = log
        self._logged: set[str] = set()
        self._due: dict[str, float] = {}
        """By fingerprint: the time from which a put renews the record's TTL."""

    def announce(self, record: FleetRecord, *, role: object = "", **more: object) -> list[str]:
        """Put this engine's record; return a warning for each other one of its model and engine.

        Args:
            role: this engine's role in its fleet, for the log; "": it loads and saves.
            more: further fields of the record, for example for the proxy.

        Raises:
            KVStoreError: the store did not answer.
        """
        prefix, fingerprint = _prefix(record.models), record.fingerprint
        own = prefix + fingerprint.encode()
        rows = self._client.list_objects(namespace=self._namespace, prefix=prefix)
        keys = [key for key in record_keys(rows) if key != own]
        others = self._client.get_many(keys, namespace=self._namespace, kind="bytes")
        warnings = [
            warning
            for other in records_of(others, record.tenant)
            if (warning := _warning(record, other))
        ]
        told = record._replace(format=FORMAT, announced=time.time())
        data = json.dumps({**told._asdict(), **more}, default=str).encode()
        # Only an overwriting put renews the TTL of an existing record.
        is_due = uptime() >= self._due.get(fingerprint, 0.0)
        self._client.put(own, data, namespace=self._namespace, ttl=LIFETIME_S, overwrite=is_due)
        if is_due:
            self._due[fingerprint] = uptime() + ANNOUNCED_EVERY_S
        if fingerprint not in self._logged:
            names, config = record.namespaces, self._client.config
            self._log.info(
                "fleet_joined fingerprint=%s master=%s cluster=%s namespaces=%s role=%s",
                fingerprint, config.master, config.cluster or "any",
                os.path.commonpath(names) + "/*" * (len(names) > 1), role or "both",
            )  # fmt: skip
        for warning in warnings:
            if warning not in self._logged:
                self._log.warning("FLEET: %s", warning)
        self._logged.update((fingerprint, *warnings))
        return warnings

    def withdraw(self, models: Sequence[str], fingerprint: str) -> None:
        """Remove the record of a fingerprint that this engine no longer has. Another engine with
        this fingerprint puts it again.

        Raises:
            KVStoreError: the store did not answer.
        """
        self._due.pop(fingerprint, None)
        self._client.remove(_prefix(models) + fingerprint.encode(), namespace=self._namespace)


class FleetAnnouncer:
    """A thread that puts fleet records, with retries, and renews them every ``ANNOUNCED_EVERY_S``,
    because records have a TTL. Threads: any."""

    def __init__(self, client: Client, log: logging.Logger) -> None:
        self._fleet = FleetRecords(client, log)
        self._log = log
        self._refusals = DenialLog(log)
        self._news: queue.SimpleQueue[tuple[FleetRecord, str, Callable[[], object]] | None] = (
            queue.SimpleQueue()
        )
        self._stopping = threading.Event()
        self._thread = start_thread("kvstore-fleet", self._run)

    def announce(self, record: FleetRecord, *, former: str = "", **more: object) -> None:
        """Queue the record for the thread.

        Args:
            former: the fingerprint that this one replaces, whose record is removed; "": none.
            more: as for ``FleetRecords.announce``.
        """
        self._news.put((record, former, partial(self._fleet.announce, record, **more)))

    def stop(self) -> None:
        """Stop the thread after its current call; closing the client ends that call."""
        self._stopping.set()
        self._news.put(None)

    def join(self) -> None:
        join_all([self._thread], CLOSE_S)

    def _run(self) -> None:
        current: dict[str, Callable[[], object]] = {}
        left: dict[str, Callable[[], object]] = {}
        pause_s: float | None = None
        while True:
            try:
                news = self._news.get(timeout=pause_s)
            except queue.Empty:
                pass
            else:
                if news is None:
                    return
                record, former, announce = news
                if former:
                    current.pop(former, None)
                    left[former] = partial(self._fleet.withdraw, record.models, former)
                current[record.fingerprint] = announce
            try:
                for each in [*left.values(), *current.values()]:
                    each()
                left.clear()
                pause_s = ANNOUNCED_EVERY_S
            except PermissionDeniedError as error:
                self._refusals.log_once(error)
                pause_s = ANNOUNCED_EVERY_S
            except KVStoreError as error:
                self._log.log(
                    logging.DEBUG if self._stopping.is_set() else logging.WARNING,
                    "fleet_not_announced reason=%s", error,
                )  # fmt: skip
                pause_s = AGAIN_S


def _warning(ours: FleetRecord, theirs: FleetRecord) -> str:
    """Describe how another engine differs; empty: it has ended, or is of another kind, which never
    shares blocks."""
    if theirs.engine != ours.engine or theirs.is_stopped(time.time()):
        return ""
    told = compare_descriptions(ours.engine, as_read(ours.description), theirs.description).text()
    return f"another engine serves {ours.models[0]}, and shares no block with this one: {told}"


def _prefix(models: Sequence[str]) -> bytes:
    """Return the prefix of the keys of all records of a model, whatever its path."""
    return short_name(models[0]).encode()[: KEY_BYTES_MAX // 2] + b"/"
