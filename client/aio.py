"""``AsyncClient``: the verbs of ``Client`` for an event loop.

The same flows, driven by awaiting: questions go over one multiplexed connection in the loop, bytes
move in a few threads, so that the loop never waits for a copy. What each verb does, takes and
raises is documented at ``Client``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from kvstore import calls
from kvstore.calls import PutOutcome
from kvstore.children import start_master
from kvstore.client.aio_stub import AsyncMasterStub
from kvstore.client.asking import Match, ObjectStat
from kvstore.client.leases import Lease
from kvstore.client.moving import Moved
from kvstore.client.operations import AnyKey, DType, View
from kvstore.client.session import ClientStats, Session, read_config
from kvstore.client.steps import Ask, Flow, Pause
from kvstore.client.stub import MasterStub
from kvstore.client.values import Buffer, Kind, Storable, Value, writable
from kvstore.config import ClientConfig, parse_size
from kvstore.errors import ClosedError, DeadlineExceededError, KVStoreError

ResultT = TypeVar("ResultT")

MOVES_AT_ONCE = 4
"""Threads that move bytes: so many copies keep any memory bus busy."""


class AsyncClient:
    """A client of one store, for one event loop: that of its first call.

        async with AsyncClient("127.0.0.1:50001") as client:
            await client.put("greeting", tensor)

    A call that is cancelled stops at its next step, and what it was granted lapses at its deadline;
    a copy that is under way goes on to its end first.
    """

    def __init__(
        self,
        master: str | None = None,
        *,
        memory: int | str | None = None,
        config: ClientConfig | None = None,
        **settings: object,
    ) -> None:
        """As ``Client``. Blocks only with ``memory``, until that has joined."""
        self.config = read_config(master, memory, config, settings)
        self._timeout_s = self.config.timeout_ms / 1000
        self._session = Session(self.config, self._ask_within)
        host, name = self._session.host, self._session.name
        lane = self.config.lane
        self._stub = AsyncMasterStub(self.config.master, host=host, name=name, lane=lane)
        # Leases are renewed by a thread: a loop may be busy.
        self._renewing = MasterStub(self.config.master, host=host, name=name, lane=lane, spin_us=0)
        self._threads = ThreadPoolExecutor(MOVES_AT_ONCE, "kvstore-aio")
        self._operations = self._session.operations
        self._closed = False
        try:
            self._session.contribute(self._renewing.join)
        except BaseException:
            self._close_threads()
            raise

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
    ) -> PutOutcome:
        """As ``Client.put``. ``value`` must not change until this returns."""
        return await self._run(
            self._operations.put(key, value, namespace, parent, replicas, overwrite, wait_ms)
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
    ) -> list[PutOutcome]:
        """As ``Client.put_many``."""
        return await self._run(
            self._operations.put_many(items, namespace, parent, False, replicas, overwrite, wait_ms)
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
    ) -> list[PutOutcome]:
        """As ``Client.put_chain``."""
        return await self._run(
            self._operations.put_chain(keys, values, namespace, parent, replicas, wait_ms)
        )

    async def allocate(
        self,
        shape: int | Sequence[int],
        dtype: DType = "uint8",
        *,
        kind: Literal["torch", "numpy"] = "torch",
        wait_ms: int | None = None,
    ) -> Value:
        """As ``Client.allocate``."""
        return await self._run(self._operations.allocate(shape, dtype, kind, wait_ms))

    # --- getting ------------------------------------------------------------------------------

    async def get(
        self,
        key: AnyKey,
        *,
        namespace: str | None = None,
        copy: bool = True,
        kind: Kind | None = None,
    ) -> View | None:
        """As ``Client.get``."""
        return (await self._run(self._operations.get_many([key], namespace, copy, kind)))[0]

    async def get_many(
        self,
        keys: Sequence[AnyKey],
        *,
        namespace: str | None = None,
        copy: bool = True,
        kind: Kind | None = None,
    ) -> list[View | None]:
        """As ``Client.get_many``."""
        return await self._run(self._operations.get_many(keys, namespace, copy, kind))

    async def get_into(
        self,
        keys: Sequence[AnyKey] | AnyKey,
        buffers: Sequence[Buffer | Sequence[Buffer]] | Buffer,
        *,
        namespace: str | None = None,
    ) -> list[bool]:
        """As ``Client.get_into``. After a cancellation the buffers may still be written to for as
        long as one copy takes."""
        return await self._run(self._operations.get_into(keys, buffers, namespace))

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

    async def match_prefix(self, keys: Sequence[AnyKey], *, namespace: str | None = None) -> int:
        """As ``Client.match_prefix``."""
        return (await self._run(self._operations.match_prefix(keys, [namespace])))[0].matched

    async def match_prefixes(
        self, keys: Sequence[AnyKey], *, namespaces: Sequence[str]
    ) -> list[int]:
        """As ``Client.match_prefixes``."""
        return [match.matched for match in await self.matches(keys, namespaces=namespaces)]

    async def matches(self, keys: Sequence[AnyKey], *, namespaces: Sequence[str]) -> list[Match]:
        """As ``Client.matches``."""
        return await self._run(self._operations.match_prefix(keys, namespaces))

    async def exists(self, key: AnyKey, *, namespace: str | None = None) -> bool:
        """As ``Client.exists``."""
        return (await self._run(self._operations.exists([key], namespace)))[0]

    async def exists_many(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None
    ) -> list[bool]:
        """As ``Client.exists_many``."""
        return await self._run(self._operations.exists(keys, namespace))

    async def stat(self, key: AnyKey, *, namespace: str | None = None) -> ObjectStat | None:
        """As ``Client.stat``."""
        return await self._run(self._operations.stat(key, namespace))

    async def status(self) -> calls.ClusterStatus:
        """As ``Client.status``."""
        return await self._run(self._operations.status())

    async def list_objects(
        self, *, namespace: str = "", prefix: bytes = b""
    ) -> AsyncIterator[calls.ObjectRow]:
        """As ``Client.list_objects``."""
        cursor = 0
        while True:
            page = await self._run(self._operations.list_page(namespace, prefix, cursor))
            for row in page.objects:
                yield row
            cursor = page.next_cursor
            if not cursor:
                return

    def stats(self) -> ClientStats:
        """As ``Client.stats``."""
        return self._session.stats(self._stub.epoch)

    # --- removing -----------------------------------------------------------------------------

    async def remove(self, key: AnyKey, *, namespace: str | None = None) -> bool:
        """As ``Client.remove``."""
        return (await self._run(self._operations.remove([key], namespace)))[0]

    async def remove_many(
        self, keys: Sequence[AnyKey], *, namespace: str | None = None
    ) -> list[bool]:
        """As ``Client.remove_many``."""
        return await self._run(self._operations.remove(keys, namespace))

    async def clear(
        self,
        namespace: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """As ``Client.clear``."""
        removed = 0
        while True:
            cleared = await self._run(self._operations.clear_some(namespace))
            removed += cleared.removed
            if progress is not None:
                progress(removed, cleared.remaining)
            if not cleared.removed:
                return removed

    # --- draining -----------------------------------------------------------------------------

    async def drain(self, node: str, *, undo: bool = False, leave: bool = False) -> calls.Drained:
        """As ``Client.drain``."""
        return await self._run(self._operations.drain(node, undo, leave))

    async def move_some(self, node: str, cursor: int = 0) -> Moved:
        """As ``Client.move_some``."""
        return await self._run(self._operations.move_some(node, cursor))

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
        self._session.views.close()
        self._renewing.close()
        self._threads.shutdown(wait=True)
        self._session.close()

    # --- driving flows ------------------------------------------------------------------------

    async def _run(self, flow: Flow[ResultT]) -> ResultT:
        """Do what the flow says, step by step, until it returns or the time is over."""
        if self._closed:
            raise ClosedError("the client is closed")
        loop = asyncio.get_running_loop()
        deadline = time.monotonic() + self._timeout_s
        try:
            step = next(flow)
            while True:
                outcome: object
                try:
                    if isinstance(step, Ask):
                        outcome = await self._stub.call(step.request, deadline)
                    elif isinstance(step, Pause):
                        outcome = None
                        await self._pause(step.seconds, deadline)
                    else:
                        move = self._session.movers.move
                        outcome = await loop.run_in_executor(self._threads, move, step, deadline)
                except KVStoreError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as done:
            result: ResultT = done.value
            return result

    async def _pause(self, seconds: float, deadline: float) -> None:
        if deadline - time.monotonic() <= seconds:
            raise DeadlineExceededError(f"{self._timeout_s:.1f} s were not enough")
        await asyncio.sleep(seconds)

    def _ask_within(self, request: calls.Request, seconds: float) -> calls.Reply:
        return self._renewing.call(request, time.monotonic() + seconds)
