"""Namespaces of a model's objects, in which equal keys mean equal bytes.

LMCache names objects by model name, ranks and hashes of tokens. Engines with other weights under
one name, or other dtypes, give different objects the same name, so a namespace contains the
fingerprint of the weights and of the objects' shapes and dtypes. Ranks are part of the keys,
because a daemon serves all ranks of its host with one call.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Final

from kvstore.calls.fleet_records import FleetRecord
from kvstore.client.client import Client
from kvstore.connectors.common.fingerprint import config_of, fingerprint, weights_of
from kvstore.connectors.common.fleet import FleetAnnouncer
from kvstore.connectors.lmcache.conversions import Layout
from kvstore.limits import of_tenant
from kvstore.runtime.tasks import start_thread

ENGINE: Final = "lmcache"

FORMAT: Final = 2
"""Version of the format of an object's bytes. Objects of another version are misses."""

PATIENCE_S: Final = 1.0
"""Maximum wait of one call for the weights to be read; a later call finds the result."""


class ChunkNamespaces:
    """The namespaces of one LMCache process. Threads: any; its own threads read weight files and
    put fleet records."""

    def __init__(
        self,
        client: Client,
        log: logging.Logger,
        *,
        model_id: str | None = None,
    ) -> None:
        """
        Args:
            model_id: the user's name for the weights, combined with each model's name; None: use
                the digest of a model's files, or its name if there are none.
        """
        self._log = log
        self._model_id = model_id
        self._changing = threading.Lock()
        self._reading: dict[tuple[str, Layout], threading.Thread] = {}
        self._found: dict[tuple[str, Layout], str] = {}
        self._reading_files = threading.Lock()
        self._meanings: dict[str, Mapping[str, str]] = {}
        """The identity of the weights by model. Guarded by ``_reading_files``."""
        self._is_stopped = False
        self._tenant = client.config.tenant
        self._announcer = FleetAnnouncer(client, log)

    def of(self, model: str, layout: Layout, *, announce: bool = True) -> str | None:
        """Return the namespace of a model's objects; None: not known yet, or the weights are
        unreadable. Waits ``PATIENCE_S`` at most: 7 GB of files in the page cache are read in that
        time.

        Args:
            announce: whether to put a fleet record for a new pair.
        """
        what = model, layout
        if what not in self._found:
            with self._changing:
                reading = self._reading.get(what)
                if reading is None and not self._is_stopped:
                    reading = self._reading[what] = start_thread(
                        "kvstore-lmcache-identity", lambda: self._find(model, layout, announce)
                    )
            if reading is not None:
                reading.join(PATIENCE_S)
        return self._found.get(what)

    def stop(self) -> None:
        """Start no more threads. Closing the client ends calls of the running ones."""
        with self._changing:
            self._is_stopped = True
        self._announcer.stop()

    def join(self) -> None:
        """Wait for the threads, but at most ``PATIENCE_S`` for each one that reads files."""
        for thread in self._reading.values():
            thread.join(PATIENCE_S)
        self._announcer.join()

    def _find(self, model: str, layout: Layout, announce: bool) -> None:
        try:
            meaning = self._meaning(model)
        except Exception as error:  # noqa: BLE001 - unauthenticated peers' files
            self._log.error(
                "nothing is cached of %s: its weights cannot be read (%s). The setting model_id "
                "names them instead.",
                model,
                error,
            )
            return
        description = {"format": FORMAT, **meaning, "objects": layout}
        found = fingerprint(description)
        namespace = of_tenant(self._tenant, f"{ENGINE}/{found}/objects")
        self._found[model, layout] = namespace
        self._log.info("model %s, weights %s: namespace %s", model, meaning["weights"], namespace)
        if announce:
            self._announcer.announce(
                FleetRecord(ENGINE, (model,), found, (namespace,), description)
            )

    def _meaning(self, model: str) -> Mapping[str, str]:
        """Return the identity of a model's weights. Its files are read once for all of its layouts,
        one model at a time (see ``kvstore.connectors.common.weight_digests`` for the duration).

        Raises:
            OSError, ValueError: the files cannot be read.
        """
        if self._model_id is not None:
            return {"weights": f"{self._model_id} of {model}"}
        with self._reading_files:
            if model not in self._meanings:
                self._meanings[model] = {"weights": weights_of(model), "config": config_of(model)}
            return self._meanings[model]
