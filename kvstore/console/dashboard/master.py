"""The master, as seen by its HTTP child."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

from kvstore.calls import ClusterStatus
from kvstore.calls.fleet_records import FleetRecord, fleets_of
from kvstore.client.async_client import AsyncClient
from kvstore.console.diagnostics.evidence import read_records
from kvstore.console.diagnostics.problems import DetectedProblem, of_engines
from kvstore.errors import KVStoreError, UnavailableError
from kvstore.http import exposition
from kvstore.http.serving import Readiness
from kvstore.master.ipc_channel import ChildChannel
from kvstore.runtime import logs
from kvstore.runtime.tasks import start_task
from kvstore.runtime.watched_files import refused_files
from kvstore.security.impersonation import ITSELF, check_acting, impersonate

log = logging.getLogger("kvstore.console")

ANSWER_S: Final = 1.0
"""Timeout of a query to the master: equal to the default timeout of a Kubernetes probe."""

STATUS_MS: Final = 5_000
SEGMENTS_MS: Final = 2_000
"""Timeouts of calls to the store: in general, and of the one in ``nodes_of``, which is shorter."""

SHARE: Final = 0.05
"""Maximum fraction of time spent in status queries, whatever the number of scrapes."""


FRESH_S: Final = 1.0
"""Seconds for which a reply is reused, whatever the number of open dashboards."""

FLEET_S: Final = 10.0
"""Seconds for which fleet records, and problems of engines, are reused."""

NOTICES_MAX: Final = 1_000


ValueT = TypeVar("ValueT")


class MasterSample(NamedTuple):
    measured: dict[str, Any]
    """The reply to ``measures``."""
    status: ClusterStatus | None
    """None: the master does not lead, or the call failed."""
    leader: str
    """``host:port`` of another master that leads; empty: this one leads, or no leader is known."""
    at_ms: int
    """Wall clock, milliseconds since 1970."""


class RecentClusterEvents(NamedTuple):
    """The master's last cluster events; see
    ``kvstore.master.cluster_events.ClusterEventLog.after``."""

    run: int
    last: int
    kept: deque[list[Any]]
    """Number, time, event and fields of each."""


class CoalescedQuery(Generic[ValueT]):
    """A query that is made once for all callers that wait for it. Its reply is reused for
    ``fresh_s``, or longer so that queries take at most ``share`` of the time. Waiting callers also
    share an error; the next caller queries again."""

    def __init__(
        self, name: str, ask: Callable[[], Coroutine[Any, Any, ValueT]], fresh_s: float = 0.0,
        *, share: float = 1.0,
    ) -> None:  # fmt: skip
        self._name = name
        self._ask = ask
        self._fresh_s = fresh_s
        self._share = share
        self._fresh_until = 0.0
        self._task: asyncio.Task[ValueT] | None = None

    async def __call__(self) -> ValueT:
        """Raises UnavailableError: the master does not answer."""
        if self._task is None or (self._task.done() and time.monotonic() >= self._fresh_until):
            self._task = start_task(self._name, self._reply(), expected=UnavailableError)
        return await asyncio.shield(self._task)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _reply(self) -> ValueT:
        started, self._fresh_until = time.monotonic(), 0.0
        with impersonate(ITSELF):  # the answer is for all who ask
            answer = await self._ask()
        ended = time.monotonic()
        self._fresh_until = ended + max(self._fresh_s, (ended - started) * (1 / self._share - 1))
        return answer


class ParentMaster:
    """The parent process. Methods raise UnavailableError if it does not answer."""

    def __init__(
        self,
        address: str,
        *,
        cluster: str,
        pid: int,
        channel: ChildChannel,
        scheme: str,
        auth: str = "",
    ) -> None:
        """
        Args:
            scheme: http or https, of this process's port.
        """
        self.address = address
        """The master's own ``host:port``; on loopback also if it listens on all addresses."""
        self._pid = pid
        self._scheme = scheme
        self._channel = channel
        self._lives = start_task("lives", channel.request_until_reply("role", ANSWER_S))
        self.client = AsyncClient(
            address, cluster=cluster, name="kvstore-web", timeout_ms=STATUS_MS, auth=auth,
            # With authentication, each request needs a call of its own for the permission check.
            placements_max=0 if auth else None,
        )  # fmt: skip
        self.client._check_calls(check_acting)
        self._status = CoalescedQuery("status", self._store_status, share=SHARE)
        self._noticed = RecentClusterEvents(0, 0, deque(maxlen=NOTICES_MAX))
        self.seen = CoalescedQuery("look", self._sample, FRESH_S)
        """The master's measurements, and its status if it leads."""
        self.notices = CoalescedQuery("notices", self._note, FRESH_S)
        self.fleet_records = CoalescedQuery("fleet", self._read_fleet, FLEET_S)
        """The fleet records; empty if they cannot be read."""
        self._engines = CoalescedQuery("engines", self._find_engine_problems, FLEET_S)
        self._engine_problems: list[DetectedProblem] = []

    async def close(self) -> None:
        for shared in (
            self.seen, self._status, self.notices, self.fleet_records, self._engines
        ):  # fmt: skip
            shared.close()
        self._lives.cancel()
        await self.client.close()

    async def readiness(self) -> Readiness:
        """Return whether this master leads or knows the leader, and its own memory, if it has any,
        has joined."""
        said = await self._call("role")
        if said["awaits_memory"]:
            return Readiness(False, "its own memory has not joined yet")
        if said["leads"]:
            return Readiness(True, "leads")
        if said["leader"]:
            return Readiness(True, f"stands by; {said['leader']} leads")
        return Readiness(False, "stands by, and knows of no master that leads")

    async def _sample(self) -> MasterSample:
        measured, leader, status = await self._call("measures"), "", None
        if measured["leads"]:
            status = await self._status()
        else:
            leader = (await self._call("role"))["leader"]
        return MasterSample(measured, status, leader, time.time_ns() // 1_000_000)

    async def _note(self) -> RecentClusterEvents:
        while True:
            answer = await self._call(f"notices {self._noticed.last}")
            if answer["run"] != self._noticed.run:
                self._noticed = RecentClusterEvents(answer["run"], 0, deque(maxlen=NOTICES_MAX))
                continue
            self._noticed.kept.extend(answer["notices"])
            self._noticed = self._noticed._replace(last=answer["last"])
            if answer["is_all"]:
                return self._noticed

    async def metrics(self) -> bytes:
        seen = await self.seen()
        measured, status = seen.measured, seen.status
        of_both = measured["counters"] | {
            name: own + measured["counters"].get(name, 0) for name, own in logs.counters().items()
        }
        files = measured["files_refused"]
        files = files | {name: own | files.get(name, 0) for name, own in refused_files().items()}
        measured = measured | {"counters": of_both, "files_refused": files}
        return await asyncio.to_thread(
            exposition.of_master, measured, status, pid=self._pid, scheme=self._scheme
        )

    async def nodes_of(self, segments: Iterable[int]) -> Mapping[int, str]:
        """Return node names by segment, possibly for more segments. Requests the leader's status
        only if the last reply lacks one of these segments."""
        status = (await self.seen()).status
        names = {} if status is None else status.nodes_by_segment()
        if not names.keys() >= set(segments):
            names = (await self.client.status(timeout_ms=SEGMENTS_MS)).nodes_by_segment()
        return names

    async def _read_fleet(self) -> list[FleetRecord]:
        try:
            status = await self.client.status()
            spaces = fleets_of("", (row.name for row in status.namespaces))
            return await self.client._carry_out(read_records, spaces)
        except KVStoreError as error:
            log.warning("fleet_unknown reason=%s", error)
            return []

    async def engine_problems(self) -> list[DetectedProblem]:
        """Return those that traffic and fleet records show. While a new look takes longer than
        ``ANSWER_S``, for example because a node hangs, return those of the last one."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                self._engine_problems = await self._engines()
        return self._engine_problems

    async def _find_engine_problems(self) -> list[DetectedProblem]:
        try:
            report = await self.client.traffic()
        except KVStoreError as error:
            log.warning("traffic_unknown reason=%s", error)
            return []
        return of_engines(report.namespaces, await self.fleet_records())

    async def fleet(self) -> dict[str, tuple[str, int]]:
        """Return the model and its tokens per block by namespace, from the fleet records."""
        return {
            name: (record.models[0], record.block_size)
            for record in await self._read_fleet()
            for name in record.namespaces
        }

    async def _call(self, question: str) -> dict[str, Any]:
        try:
            return await self._channel.request(question, ANSWER_S)
        except UnavailableError as error:
            raise UnavailableError(f"the master does not answer: {error.message}") from None

    async def _store_status(self) -> ClusterStatus | None:
        try:
            return await self.client.status()
        except KVStoreError as error:
            log.warning("status_unknown reason=%s", error)
            return None
