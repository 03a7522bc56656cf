"""``AsyncClient``: the methods of ``Client`` as coroutines. Each call runs in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextvars import copy_context
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from kvstore import calls
from kvstore.client import fork_support
from kvstore.client.client import Client
from kvstore.config import ClientConfig
from kvstore.device import streams
from kvstore.errors import DeadlineExceededError, InvalidArgumentError
from kvstore.runtime.cancellation import CancelToken
from kvstore.runtime.clock import uptime
from kvstore.runtime.tasks import CLOSE_S, Job, ThreadPool

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

CALLS_AT_ONCE = 64
"""Maximum threads of one client, started on demand; further calls wait for a free one."""


def _awaited(
    method: Callable[Concatenate[Client, P], ResultT],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, ResultT]]:
    """Return the coroutine method that makes this call in a thread and awaits it."""

    @functools.wraps(method)
    async def call(self: AsyncClient, /, *args: P.args, **named: P.kwargs) -> ResultT:
        return await self._carry_out(method, *args, **named)

    return call


def _direct(
    method: Callable[Concatenate[Client, P], ResultT],
) -> Callable[Concatenate[AsyncClient, P], ResultT]:
    """Return the same method for one that makes no call."""

    @functools.wraps(method)
    def call(self: AsyncClient, /, *args: P.args, **named: P.kwargs) -> ResultT:
        return method(self._client, *args, **named)

    return call


class AsyncClient:
    """A client of one store, for one event loop: that of its first call.

        async with AsyncClient("127.0.0.1:50001") as client:
            await client.put("greeting", tensor)

    Its methods are those of ``Client``, where they are documented. At most ``CALLS_AT_ONCE`` run at
    once; the others wait, which counts towards their ``timeout_ms``. The memory that a call stores
    or fills must not change until the call ends.

    A cancelled call that waits for the master ends at once. A cancelled transfer is aborted within
    milliseconds (with a transfer engine and registered memory: when the transfer has ended); after
    that the client does not touch the caller's memory. The buffers of a cancelled ``get_into`` have
    undefined contents; the grant of a cancelled put lapses at its deadline.

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
        self._begin(Client(master, memory=memory, config=config, **settings))

    def _begin(self, client: Client) -> None:
        self._client = client
        self._threads = _new_threads()
        fork_support.watch(self)

    def _reset_after_fork(self) -> None:
        """Reset the client in the child of a fork, as ``Client._reset_after_fork`` does."""
        fork_support.leak_deliberately(self._threads)
        self._threads = _new_threads()

    def _close_after_fork(self) -> None:
        self._client._close_after_fork()

    def __del__(self) -> None:
        threads = self.__dict__.get("_threads")
        if threads is not None:
            threads.end()

    @classmethod
    async def embedded(cls, memory: int | str = "1GiB", **settings: Any) -> Self:
        client = cls.__new__(cls)
        client._begin(await asyncio.to_thread(Client.embedded, memory, **settings))
        return client

    @property
    def config(self) -> ClientConfig:
        return self._client.config

    put = _awaited(Client.put)
    put_many = _awaited(Client.put_many)
    put_chain = _awaited(Client.put_chain)
    allocate = _awaited(Client.allocate)
    pin = _awaited(Client.pin)
    unpin = _awaited(Client.unpin)
    hint = _awaited(Client.hint)
    retain = _awaited(Client.retain)
    end_session = _awaited(Client.end_session)
    demote = _awaited(Client.demote)
    prefetch = _awaited(Client.prefetch)
    apply_hints = _awaited(Client.apply_hints)

    get = _awaited(Client.get)
    get_many = _awaited(Client.get_many)
    get_into = _awaited(Client.get_into)
    get_ranges = _awaited(Client.get_ranges)

    match_prefix = _awaited(Client.match_prefix)
    match_all = _awaited(Client.match_all)
    matches = _awaited(Client.matches)
    release_match = _awaited(Client.release_match)
    lookup = _awaited(Client.lookup)
    release = _awaited(Client.release)
    exists = _awaited(Client.exists)
    exists_many = _awaited(Client.exists_many)
    stat = _awaited(Client.stat)
    list_page = _awaited(Client.list_page)
    status = _awaited(Client.status)
    http = _awaited(Client.http)
    traffic = _awaited(Client.traffic)
    chains = _awaited(Client.chains)
    blocks = _awaited(Client.blocks)

    remove = _awaited(Client.remove)
    remove_many = _awaited(Client.remove_many)

    drain = _awaited(Client.drain)
    move_page = _awaited(Client.move_page)

    register = _awaited(Client.register)
    unregister = _awaited(Client.unregister)
    memory_at = _direct(Client.memory_at)
    payload_at = _direct(Client.payload_at)
    device = _direct(Client.device)
    lease = _direct(Client.lease)
    stats = _direct(Client.stats)
    _check_calls = _direct(Client._check_calls)

    async def list_objects(
        self, *, namespace: str = "", prefix: bytes = b"", timeout_ms: int | None = None
    ) -> AsyncIterator[calls.ObjectRow]:
        cursor: int | None = 0
        while cursor is not None:
            page = await self.list_page(namespace, prefix, cursor, timeout_ms=timeout_ms)
            for row in page.objects:
                yield row
            cursor = page.next_cursor or None

    async def clear(
        self,
        namespace: str | None = None,
        *,
        progress: Callable[[int, int], None] | None = None,
        timeout_ms: int | None = None,
    ) -> int:
        if progress is not None and not callable(progress):
            raise InvalidArgumentError("progress is a function of two numbers")
        removed = 0
        while True:
            cleared = await self._carry_out(Client._clear_some, namespace, timeout_ms=timeout_ms)
            removed += cleared.removed
            if progress is not None:
                progress(removed, cleared.remaining)
            if not cleared.removed:
                return removed

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._client.close()
        self._threads.close(CLOSE_S)

    def __reduce__(self) -> tuple[object, ...]:
        config = self.config.model_copy(update={"memory": 0})
        return functools.partial(type(self), config=config), ()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<Async{repr(self._client)[1:]}"

    async def _carry_out(
        self,
        method: Callable[Concatenate[Client, P], ResultT],
        /,
        *args: P.args,
        **named: P.kwargs,
    ) -> ResultT:
        """Make the call in a thread. After it ends, the caller's memory is not touched any more."""
        timeout_ms: Any = named.get("timeout_ms")
        timeout_s = self._client._seconds(timeout_ms)
        stop = CancelToken(uptime() + timeout_s)
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        theirs = streams.current_streams()

        def carry_out() -> ResultT:
            with stop.here(), streams.computing_on(theirs):
                return method(self._client, *args, **named)

        call = Job(functools.partial(copy_context().run, carry_out), tell)
        self._threads.begin(call)
        out_of_time = loop.call_later(timeout_s, call.cancel)  # no effect once it has started
        try:
            await ended.wait()
            if call.is_cancelled:
                raise DeadlineExceededError(
                    f"the call timed out after {timeout_s:.1f} s: {CALLS_AT_ONCE} calls of this "
                    "client were in progress"
                )
            return call.result()
        except asyncio.CancelledError:
            if not call.cancel() and not stop.set():
                while not call.is_done:
                    with contextlib.suppress(asyncio.CancelledError):
                        await ended.wait()
            raise
        except GeneratorExit:  # the loop was closed: nothing can be awaited
            if not call.cancel() and not stop.set():
                call.wait()
            raise
        finally:
            out_of_time.cancel()
            del call  # its error refers to this frame


def _new_threads() -> ThreadPool:
    return ThreadPool("kvstore-aio", CALLS_AT_ONCE)
