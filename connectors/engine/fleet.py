"""Descriptions that engines put into the store, so that differences between engines can be seen.

Fleet records (``kvstore.fleet``) say which engine serves which models, in which namespaces its
blocks are, and what was described. Engines warn of records of the same model that differ from
theirs; ``kvstore why`` shows all of them; the proxy reads those of vLLM.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

from kvstore.client.sync import Client
from kvstore.clocks import uptime
from kvstore.fleet import (
    ANNOUNCED_EVERY_S,
    FORMAT,
    LIFETIME_S,
    as_read,
    differences,
    parse,
    short_name,
    worth_reading,
)
from kvstore.limits import FLEET_NAMESPACE, KEY_BYTES_MAX

WARNINGS_MAX = 64
"""Of one announcement; a stranger may put what it likes."""


class Fleet:
    """The fleet records of one store, seen by one engine. Threads: one at a time."""

    def __init__(self, client: Client, log: logging.Logger) -> None:
        """``log``: is told of each fingerprint that was announced, and of each warning, once."""
        self._client = client
        self._log = log
        self._told: set[str] = set()
        self._due: dict[str, float] = {}
        """When the lifetime of each record begins anew."""

    def announce(
        self,
        engine: str,
        models: Sequence[str],
        mark: str,
        description: Mapping[str, object],
        namespaces: Sequence[str],
        **more: object,
    ) -> list[str]:
        """Puts this engine's description, and returns warnings of different ones of the same model.

        Args:
            engine: ``"vllm"``, ``"sglang"``, ``"lmcache"`` ...
            models: names of the model, the first one the name or path that was loaded.
            mark: the fingerprint.
            namespaces: where its blocks are.
            more: further fields, for readers of this engine's records.

        Raises:
            KVStoreError: the store did not answer.
        """
        record = {
            "format": FORMAT,
            "engine": engine,
            "models": list(models),
            "fingerprint": mark,
            "namespaces": list(namespaces),
            "description": description,
            **more,
        }
        prefix = _prefix(models)
        warnings: list[str] = []
        rows = self._client.list_objects(namespace=FLEET_NAMESPACE, prefix=prefix)
        for keys in worth_reading(rows):
            if len(warnings) >= WARNINGS_MAX:
                break
            others = [key for key in keys if key != prefix + mark.encode()]
            for other in self._client.get_many(others, namespace=FLEET_NAMESPACE, kind="bytes"):
                if isinstance(other, bytes):
                    warnings += _warnings(models[0], record, other)
        data = json.dumps(record, default=str).encode()
        # The lifetime of a record that is there begins anew only with an overwriting put.
        is_due = uptime() >= self._due.get(mark, 0.0)
        self._client.put(
            prefix + mark.encode(), data, namespace=FLEET_NAMESPACE, ttl=LIFETIME_S,
            overwrite=is_due,
        )  # fmt: skip
        if is_due:
            self._due[mark] = uptime() + ANNOUNCED_EVERY_S
        if mark not in self._told:
            self._log.info("fleet_joined fingerprint=%s", mark)
        for warning in warnings:
            if warning not in self._told:
                self._log.warning("FLEET: %s", warning)
        self._told.update((mark, *warnings))
        return warnings

    def leave(self, models: Sequence[str], mark: str) -> None:
        """Removes the description with the fingerprint ``mark``, which this engine has no longer;
        an engine that still has it puts the description again.

        Raises:
            KVStoreError: the store did not answer.
        """
        self._due.pop(mark, None)
        self._client.remove(_prefix(models) + mark.encode(), namespace=FLEET_NAMESPACE)


def _warnings(model: str, record: Mapping[str, object], raw: bytes) -> list[str]:
    other, ours = parse(raw), record["description"]
    if other is None or not isinstance(ours, Mapping) or other.engine != record["engine"]:
        return []  # blocks of different engines differ in any case
    differing = "; ".join(
        f"{each.field}: {each.ours!r} here, {each.theirs!r} there"
        for each in differences(as_read(ours), other.description)
    )
    told = differing or "only the layout of the cache"
    return [f"another engine serves {model}, and shares no block with this one. {told}"]


def _prefix(models: Sequence[str]) -> bytes:
    """One prefix for all records of a model, whatever path it was loaded from."""
    return short_name(models[0]).encode()[: KEY_BYTES_MAX // 2] + b"/"
