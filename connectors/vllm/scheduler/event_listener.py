"""Receives the store's object events about blocks of this engine that may have been removed.

    master's HTTP ── events ──► a thread ──► ``ReceivedEvents``, taken by the scheduler in each step

Only masters with ``--events`` serve them. While no events are received, ``listening`` is False and
the scheduler queries the store instead: with a master without events, and from the end of one
stream until the next one resumes it. A stream that is silent for ``SILENT_S`` ends.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple

from kvstore.client.sse_client import StreamEvent, follow
from kvstore.config import http_token_given
from kvstore.connectors.vllm.scheduler.events import Block
from kvstore.errors import ClosedError, KVStoreError
from kvstore.runtime.cancellation import CancelToken
from kvstore.runtime.tasks import CLOSE_S, join_all, start_thread

log = logging.getLogger("vllm.kvstore")

RECEIVED_MAX: Final = 1 << 16
"""Limit of the blocks that wait for the scheduler, which takes none while its engine has no
requests. Beyond it all of them are dropped, and count as missed."""

TAKEN_MAX: Final = 1_024
"""Blocks that one step of the scheduler takes: half a millisecond."""

PAUSE_S: Final = 0.5
PAUSE_MAX_S: Final = 5.0
"""Pause before the next connection attempt; doubles with each failure up to ``PAUSE_MAX_S``."""


class ReceivedEvents(NamedTuple):
    listening: bool
    """Whether events are received now."""
    missed: bool
    """Whether events may have been missed, so that any block may have been removed."""
    blocks: list[Block]
    """Blocks of which a part, or all, may have been removed."""


NOTHING: Final = ReceivedEvents(listening=False, missed=False, blocks=[])


class EventListener:
    """Follows the events of some namespaces, in its own thread. One other thread calls it."""

    def __init__(
        self, find: Callable[[], str], under: str, groups: Mapping[str, int], auth: str = ""
    ) -> None:
        """
        Args:
            find: returns ``host:port`` of the leader's events, or "": it serves none. Called by the
                thread; may block, and raise KVStoreError: no master answers.
            under: the prefix of all these namespaces.
            groups: the cache group of each namespace.
            auth: the certificate file; empty: no authentication.
        """
        self._auth = auth
        self._find = find
        self._under = under
        self._groups = groups
        self._lock = threading.Lock()  # guards the two below
        self._blocks: deque[Block] = deque()
        self._missed = False
        self._listening = False
        self._failures = 0
        """Attempts since events were last received."""
        self._place = ""
        self._stop = CancelToken()
        self._stopped = threading.Event()
        self._thread = start_thread("kvstore-events", self._run, died=self._died)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def take(self) -> ReceivedEvents:
        """Return events received since the last call, at most ``TAKEN_MAX`` blocks, without
        waiting."""
        with self._lock:
            missed, self._missed = self._missed, False
            count = min(len(self._blocks), TAKEN_MAX)
            blocks = [self._blocks.popleft() for _ in range(count)]
        return ReceivedEvents(self._listening, missed, blocks)

    def stop(self) -> None:
        """Stop the thread without waiting for it."""
        self._stopped.set()
        self._stop.set()

    def close(self) -> None:
        """End the thread. Takes less than a second, or ``CONNECT_S`` if the thread is connecting to
        a host that does not answer."""
        self.stop()
        join_all([self._thread], CLOSE_S)

    def _run(self) -> None:
        with self._stop.here():
            while not self._stopped.is_set():
                try:
                    for event in follow(
                        self._segments(), under=self._under, snapshot=False, since=self._place,
                        token=http_token_given(), auth=self._auth, on_received=self._received,
                        failed=self._failed,
                    ):  # fmt: skip
                        self._took(event)
                except ClosedError:  # ``stop`` was called
                    break
                except KVStoreError as error:  # the master refuses to serve events
                    self._failed(error.message)
        self._listening = False

    def _died(self, error: BaseException) -> None:
        """Make the scheduler query the store, after a bug has ended the thread."""
        log.error("events_unavailable error=%r", error)
        self._listening = False

    def _segments(self) -> Iterator[str]:
        """Yield the address for each attempt to connect, after a pause if the last one failed."""
        while not self._stopped.is_set():
            if self._failures:
                self._stopped.wait(min(PAUSE_MAX_S, PAUSE_S * 2 ** min(self._failures, 8)))
            try:
                address = self._find()
            except ClosedError:
                return
            except KVStoreError as error:
                self._failed(error.message)
                continue
            if address:
                yield address
            else:
                self._failed("the master serves none: kvstore-master --events")

    def _received(self) -> None:
        self._failures = 0
        if not self._listening:
            self._listening = True
            log.info("events_heard under=%s", self._under)

    def _failed(self, why: str) -> None:
        if not self._failures and not self._stopped.is_set():
            log.info("events_unavailable, this engine asks the store instead: %s", why)
        self._failures += 1
        self._listening = False

    def _took(self, event: StreamEvent) -> None:
        if event.name == "removed":
            group = self._groups.get(event.data["namespace"])
            if group is not None:
                with self._lock:
                    self._blocks.append((group, bytes.fromhex(event.data["key"])))
                if len(self._blocks) > RECEIVED_MAX:
                    self._miss()
        elif event.name != "stored":
            self._miss()
        self._place = event.position

    def _miss(self) -> None:
        with self._lock:
            self._missed = True
            self._blocks.clear()
