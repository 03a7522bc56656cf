"""Reports the progress of a node that reserves its memory: in the log, over HTTP, to systemd. A GiB
takes 750 ms, so a large node takes minutes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Final

from kvstore.http import exposition
from kvstore.http.access_control import AccessControl
from kvstore.http.families import NODE
from kvstore.http.ports import HttpSecurity
from kvstore.http.serving import ProcessStatus, Readiness, serving
from kvstore.runtime import sd_notify
from kvstore.runtime.formatting import duration_text, size_text
from kvstore.runtime.tasks import start_thread

log = logging.getLogger("kvstore.node")

LOG_INTERVAL_S: Final = 10.0
"""How often progress is logged."""

STOP_S: Final = 5.0
"""How long ``serve_startup_health`` waits for its thread."""


class StartupProgress:
    """The reserved memory. The thread that reserves it calls this; another one reads it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._done = 0
        self._began = time.monotonic()
        self._logged_s = -LOG_INTERVAL_S
        self(0, size)

    def __call__(self, done: int, size: int) -> None:
        self._done, self._size = done, size
        elapsed = time.monotonic() - self._began
        if elapsed - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = elapsed
            log.info("reserving_memory bytes=%d of=%d seconds=%.0f", done, size, elapsed)
            sd_notify.still_starting(self.text)

    @property
    def text(self) -> str:
        """``reserves memory: 12.0 GiB of 664 GiB, 8 min 20 s left``"""
        done, elapsed = self._done, time.monotonic() - self._began
        text = f"reserves memory: {size_text(done)} of {size_text(self._size)}"
        if not done:
            return text
        left_s = elapsed / done * (self._size - done)
        return f"{text}, {duration_text(int(left_s * 1000))} left"

    def endpoints(self) -> ProcessStatus:
        async def readiness() -> Readiness:
            return Readiness(False, self.text)

        async def page() -> bytes:
            rows: dict[str, exposition.Rows] = {
                "kvstore_node_joined": {(): 0},
                "kvstore_node_memory_bytes": {(): self._done},
                **exposition.of_log("node"),
            }
            return exposition.page(NODE, rows, pid=os.getpid())

        return ProcessStatus(readiness, page)


@contextlib.contextmanager
def serve_startup_health(
    starting: StartupProgress, listener: socket.socket | None, access: AccessControl,
    secured: HttpSecurity,
) -> Iterator[None]:  # fmt: skip
    """Serves health requests in a thread, inside the block. Afterwards ``listener`` is unchanged;
    requests wait in the kernel until the node's loop serves them."""
    if listener is None:
        yield
        return
    same = listener.dup()
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()

    async def serve() -> None:
        async with serving(same, starting.endpoints(), access=access, secured=secured):
            await stopped.wait()

    def run() -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(serve())

    thread = start_thread("kvstore-starting", run)
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # it has died, and the log says why
            loop.call_soon_threadsafe(stopped.set)
        thread.join(STOP_S)
