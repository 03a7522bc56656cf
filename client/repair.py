"""Repairs: a thread of the node adds replicas of its objects, as a client of the store."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Final

from kvstore.config import ClientConfig, NodeConfig
from kvstore.errors import KVStoreError
from kvstore.runtime.tasks import start_thread

if TYPE_CHECKING:
    from kvstore.client.client import Client

log = logging.getLogger("kvstore.node")

IDLE_S: Final = 60.0
"""The client and its connections are closed after this time without work."""

STOP_S: Final = 2.0
"""Maximum wait of the process's end for a copy in progress."""


class Repairer:
    """A thread that, when woken, copies until the master grants nothing more. Threads: any."""

    def __init__(self, config: NodeConfig, node: str) -> None:
        self._config = ClientConfig(
            master=config.master,
            cluster=config.cluster,
            auth=config.auth,
            data_encryption=config.data_encryption,
            transports=("shm", "tcp"),
            name=f"{node}-repair",
        )
        self._node = node
        self._woken = threading.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._client: Client | None = None

    def wake(self) -> None:
        self._woken.set()
        if (self._thread is None or not self._thread.is_alive()) and not self._stopped:
            self._thread = start_thread("repair", self._run)

    def stop(self) -> None:
        self._stopped = True
        self._woken.set()
        client = self._client
        if client is not None:
            client.close()
        if self._thread is not None:
            self._thread.join(STOP_S)

    def _run(self) -> None:
        while True:
            if not self._woken.wait(IDLE_S):
                self._close()
                self._woken.wait()
            self._woken.clear()
            if self._stopped:
                break
            try:
                self._copy()
            except KVStoreError as error:
                if not self._stopped:
                    log.info("repair_deferred node=%s reason=%s", self._node, error)
        self._close()

    def _copy(self) -> None:
        """Copy until the master grants nothing more, or no granted copy succeeds."""
        from kvstore.client.client import Client  # slow, and most nodes never need it

        if self._client is None:
            self._client = Client(config=self._config)
        objects = size = failed = 0
        while not self._stopped:
            copied = self._client.move_page(self._node, repair=True)
            objects += copied.objects
            size += copied.size
            failed += copied.failed + copied.corrupt
            if not copied.objects:
                break
        if objects or failed:
            log.info(
                "replicas_restored node=%s objects=%d bytes=%d failed=%d",
                self._node,
                objects,
                size,
                failed,
            )

    def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()
