"""``AsyncClient``: the verbs of ``Client`` for an event loop.

It awaits the same flows. Calls to the master share one multiplexed connection in the loop; a few
threads move bytes, so that the loop never waits for a copy. ``Client`` documents each verb.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.children import start_master
from kvstore.client import forks
from kvstore.client.aio_stub import AsyncMasterStub
from kvstore.client.asking import Match, ObjectStat
from kvstore.client.leases import Lease
from kvstore.client.moving import Moved
from kvstore.client.operations import AnyKey, DType, View, seconds
from kvstore.client.session import ClientStats, Session, read_config
from kvstore.client.steps import Ask, Flow, Pause, Transfer
from kvstore.client.stub import MasterStub
from kvstore.client.values import Buffer, Kind, Storable, Value, writable
from kvstore.clocks import uptime
from kvstore.config import ClientConfig, parse_size
from kvstore.errors import ClosedError, DeadlineExceededError, KVStoreError
from kvstore.transport.stopping import Stop

ResultT = TypeVar("ResultT")

MOVES_AT_ONCE = 4
"""Threads that move bytes: this many parallel copies use up the memory bandwidth."""


class AsyncClient:
    """A client of one store, for one event loop: that of its first call.

        async with AsyncClient("127.0.0.1:50001") as client:
            await client.put("greeting", tensor)

    A cancelled call ends when its transfer has been cut short, which takes milliseconds (if the
    transfer engine moves registered memory: when that transfer has ended). After that the client
    touches no byte of the caller's memory. The grant of a cancelled put lapses at its deadline.

    After a fork the child can use the client in an event loop of its own; see ``Client``.
    """

    def __init__(
        self,
        master: str | None = None,
        *,
        memory: int | str | None = None,
        config: ClientConfig | None = None,
        **settings: object,
    ) -> None:
        """As ``Client``. Blocks only with ``memory``, until the contributed node has joined."""
        self.config = read_config(master, memory, config, settings)
        self._timeout_s = self.config.timeout_ms / 1000
        self._session = Session(self.config, self._ask_within, self._connect_renewing)
        self._connect()
        self._operations = self._session.operations
        self._closed = False
        forks.watch(self)
        try:
            self._session.contribute(self._renewing.join)
        except BaseException:
            self._close_threads()
            raise

    def _connect(self) -> None:
        master, lane, cluster = self.config.master, self.config.lane, self.config.cluster
        host, name = self._session.host, self._session.name
        self._stub = AsyncMasterStub(master, host=host, name=name, lane=lane, cluster=cluster)
        # Leases are renewed by a thread: a loop may be busy.
        self._renewing = MasterStub(
            master, host=host, name=name, lane=lane, cluster=cluster, spin_us=0
        )
        self._threads = ThreadPoolExecutor(MOVES_AT_ONCE, "kvstore-aio")

    def _begin_anew(self) -> None:
        """Called automatically in the child of a fork; see ``Client``."""
        self._stub.abandon()
        self._renewing.abandon()
        self._session.begin_anew()
        forks.keep(self._threads)
        self._connect()

    def _give_up(self) -> None:
        """Refuse all calls, without closing anything."""
        self._closed = True

    @classmethod
    async def embedded(cls, memory: int | str = "1GiB", **settings: Any) -> Self:
        """As ``Client.embedded``."""
        child = await asyncio.to_thread(start_master, memory=parse_size(memory))
        try:
            client = cls(f"127.0.0.1:{child.said['port']}", **settings)
        except BaseException:
            await asyncio.to_thread(child.stop)
            raise
        client._session.children.append(child)
        return client

    # --- putting ------------------------------------------------------------------------------

    async def put(
        self,
        key: AnyKey,
        value: Storable,
        *,
        namespace: str | None = None,
        parent: AnyKey | None = None,
        replicas: int | None = None,
        overwrite: bool = False,
        wait_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> PutOutcome:
        """As ``Client.put``. ``value`` must not change until this returns."""
        return await self._run(
            self._operations.put(
                key, value, namespace, parent, replicas, overwrite, wait_ms, timeout_ms
            ),
            timeout_ms,
        )

    async def put_many(
        self,
        items: Iterable[tuple[AnyKey, Storable]],
        *,
        namespace: str | None = None,
        parent: AnyKey | None = None,
        replicas: int | None = None,
        overwrite: bool = False,
        wait_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> list[PutOutcome]:
        """As ``Client.put_many``."""
        return await self._run(
            self._operations.put_many(
                items, namespace, parent, False, replicas, overwrite, wait_ms, timeout_ms
            ),
            timeout_ms,
        )

    async def put_chain(
        self,
        keys: Sequence[AnyKey],
        values: Sequence[Storable],
        *,
        namespace: str | None = None,
        parent: AnyKey | None = None,
        replicas: int | None = None,
        wait_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> list[PutOutcome]:
        """As ``Client.put_chain``."""
        return await self._run(
            self._operations.put_chain(
                keys, values, namespace, parent, replicas, wait_ms, timeout_ms
            ),
            timeout_ms,
        )

    async def allocate(
        self,
        shape: int | Sequence[int],
        dtype: DType = "uint8",
        *,
        kind: Literal["torch", "numpy"] = "torch",
        wait_ms: int | None = None,
        timeout_ms: int | None = None,
    ) -> Value:
        """As ``Client.allocate``."""
        return await self._run(
            self._operations.allocate(shape, dtype, kind, wait_ms, timeout_ms), timeout_ms
        )

    # --- getting ------------------------------------------------------------------------------

    async def get(
        self,
        key: AnyKey,
        *,
        namespace: str | None = None,
        copy: bool = True,
        kind: Kind | None = None,
        timeout_ms: int | None = None,
    ) -> View | None:
        """As ``Client.get``."""
        found = await self._run(
            self._operations.get_many([key], namespace, copy, kind, timeout_ms), timeout_ms
        )
        return found[0]

    async def get_many(
        self,
        keys: Sequence[AnyKey],
        *,
        namespace: str | None = None,
        copy: bool = True,
        kind: Kind | None = None,
        timeout_ms: int | None = None,
    ) -> list[View | None]:
        """As ``Client.get_many``."""
        return await self._run(
            self._operations.get_many(keys, namespace, copy, kind, timeout_ms), timeout_ms
        )

    async def get_into(
        self,
        keys: Sequence[AnyKey] | AnyKey,
        buffers: Sequence[Buffer | Sequence[Buffer]] | Buffer,
        *,
        namespace: str | None = None,
        timeout_ms: int | None = None,
    ) -> list[bool]:
        """As ``Client.get_into``. After a cancellation the buffers' contents are undefined."""
        return await self._run(
            self._operations.get_into(keys, buffers, namespace, timeout_ms), timeout_ms
        )

    async def register(self, buffer: Buffer) -> None:
        """As ``Client.register``."""
        await asyncio.to_thread(self._session.movers.register, writable(buffer)[0][0])

    async def unregister(self, buffer: Buffer) -> None:
        """As ``Client.unregister``."""
        await asyncio.to_thread(self._session.movers.unregister, writable(buffer)[0][0])

    def lease(self, view: View) -> Lease | None:
        """As ``Client.lease``."""
        return self._session.views.of(view)

    # --- asking -------------------------------------------------------------------------------

    async def match_prefix(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> int:
        """As ``Client.match_prefix``."""
        found = await self._run(self._operations.match_prefix(keys, [namespace]), timeout_ms)
        return found[0].matched

    async def match_prefixes(
        self, keys: Sequence[AnyKey], *, namespaces: Sequence[str], timeout_ms: int | None = None
    ) -> list[int]:
        """As ``Client.match_prefixes``."""
        return [
            match.matched
            for match in await self.matches(keys, namespaces=namespaces, timeout_ms=timeout_ms)
        ]

    async def matches(
        self, keys: Sequence[AnyKey], *, namespaces: Sequence[str], timeout_ms: int | None = None
    ) -> list[Match]:
        """As ``Client.matches``."""
        return await self._run(self._operations.match_prefix(keys, namespaces), timeout_ms)

    async def exists(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> bool:
        """As ``Client.exists``."""
        return (await self._run(self._operations.exists([key], namespace), timeout_ms))[0]

    async def exists_many(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> list[bool]:
        """As ``Client.exists_many``."""
        return await self._run(self._operations.exists(keys, namespace), timeout_ms)

    async def stat(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> ObjectStat | None:
        """As ``Client.stat``."""
        return await self._run(self._operations.stat(key, namespace), timeout_ms)

    async def status(self, *, timeout_ms: int | None = None) -> calls.ClusterStatus:
        """As ``Client.status``."""
        return await self._run(self._operations.status(), timeout_ms)

    async def list_objects(
        self, *, namespace: str = "", prefix: bytes = b"", timeout_ms: int | None = None
    ) -> AsyncIterator[calls.ObjectRow]:
        """As ``Client.list_objects``."""
        cursor = 0
        while True:
            page = await self._run(
                self._operations.list_page(namespace, prefix, cursor), timeout_ms
            )
            for row in page.objects:
                yield row
            cursor = page.next_cursor
            if not cursor:
                return

    def stats(self) -> ClientStats:
        """As ``Client.stats``."""
        return self._session.stats(self._stub.epoch)

    # --- removing -----------------------------------------------------------------------------

    async def remove(
        self, key: AnyKey, *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> bool:
        """As ``Client.remove``."""
        return (await self._run(self._operations.remove([key], namespace), timeout_ms))[0]

    async def remove_many(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None, timeout_ms: int | None = None
    ) -> list[bool]:
        """As ``Client.remove_many``."""
        return await self._run(self._operations.remove(keys, namespace), timeout_ms)

    async def clear(
        self,
        namespace: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        timeout_ms: int | None = None,
    ) -> int:
        """As ``Client.clear``."""
        removed = 0
        while True:
            cleared = await self._run(self._operations.clear_some(namespace), timeout_ms)
            removed += cleared.removed
            if progress is not None:
                progress(removed, cleared.remaining)
            if not cleared.removed:
                return removed

    # --- draining -----------------------------------------------------------------------------

    async def drain(
        self, node: str, *, undo: bool = False, leave: bool = False, timeout_ms: int | None = None
    ) -> calls.Drained:
        """As ``Client.drain``."""
        return await self._run(self._operations.drain(node, undo, leave), timeout_ms)

    async def move_some(
        self,
        node: str,
        cursor: int = 0,
        *,
        repair: bool = False,
        timeout_ms: int | None = None,
    ) -> Moved:
        """As ``Client.move_some``."""
        return await self._run(self._operations.move_some(node, cursor, repair), timeout_ms)

    # --- life ---------------------------------------------------------------------------------

    async def close(self) -> None:
        """As ``Client.close``."""
        if self._closed:
            return
        self._closed = True
        await self._stub.close()
        await asyncio.to_thread(self._close_threads)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<AsyncClient of {self.config.master}{', closed' if self._closed else ''}>"

    def _close_threads(self) -> None:
        self._session.views.stop_renewing()
        self._renewing.close()
        self._session.views.close()
        self._threads.shutdown(wait=True)
        self._session.close()

    # --- driving flows ------------------------------------------------------------------------

    async def _run(self, flow: Flow[ResultT], timeout_ms: int | None = None) -> ResultT:
        """Carries out the flow's steps until it returns or the time is over."""
        if self._closed:
            raise ClosedError("the client is closed")
        timeout_s = self._timeout_s if timeout_ms is None else seconds(timeout_ms)
        deadline = uptime() + timeout_s
        try:
            step = next(flow)
            while True:
                outcome: object
                try:
                    if isinstance(step, Ask):
                        outcome = await self._stub.call(step.request, deadline)
                    elif isinstance(step, Pause):
                        outcome = None
                        await self._pause(step.seconds, deadline, timeout_s)
                    else:
                        outcome = await self._move(step, deadline)
                except KVStoreError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as done:
            result: ResultT = done.value
            return result

    async def _move(
        self, transfers: Sequence[Transfer], deadline: float
    ) -> list[KVStoreError | None]:
        """Carries out transfers. However it ends, the caller's memory is not touched afterwards."""
        stop = Stop()
        try:
            moving = self._threads.submit(self._session.movers.move, transfers, deadline, stop)
        except RuntimeError:  # shut down
            raise ClosedError("the client is closed") from None
        try:
            return await asyncio.wrap_future(moving)
        except asyncio.CancelledError:
            stop.set()
            if not moving.cancel():
                await _ended(moving)
            raise
        except GeneratorExit:  # the loop was closed around us: nothing can be awaited any more
            stop.set()
            if not moving.cancel():
                wait([moving])
            raise

    async def _pause(self, seconds: float, deadline: float, timeout_s: float) -> None:
        if deadline - uptime() <= seconds:
            raise DeadlineExceededError(f"the call timed out after {timeout_s:.1f} s")
        await asyncio.sleep(seconds)

    def _connect_renewing(self) -> None:
        self._renewing.join(uptime() + self._timeout_s)

    def _ask_within(self, request: calls.Request, seconds: float) -> calls.Reply:
        return self._renewing.call(request, uptime() + seconds)


async def _ended(moving: Future[list[KVStoreError | None]]) -> None:
    """Waits for the end of transfers that were cut short, however often the task is cancelled."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    moving.add_done_callback(tell)
    while not moving.done():
        with contextlib.suppress(asyncio.CancelledError):
            await ended.wait()
