"""Interface of the RPC service, and the ``Dispatcher`` shared by the gRPC and lane servers.

An RPC server passes the kind of a call and the request's bytes to the ``Dispatcher``, which
decodes, calls the service, encodes, measures, and turns every exception into a ``KVStoreError``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from kvstore.calls import MasterMessage, NodeMessage, Reply, Request
from kvstore.errors import BatchTooLargeError, InternalError, KVStoreError
from kvstore.limits import FRAME_BYTES_MAX
from kvstore.master.state.traffic import Caller
from kvstore.runtime.histograms import Histogram
from kvstore.security.identity import UNAUTHENTICATED, Identity
from kvstore.wire.messages import CALLS, RpcMethod, decode_request
from kvstore.wire.status import unexpected

logger = logging.getLogger("kvstore.master")

REPLY_BYTES_MAX = FRAME_BYTES_MAX - 1024
"""Leaves space for the head of a frame and gRPC's framing."""


class RpcService(Protocol):
    """Handles calls. RPC servers call it in the loop's thread, one call at a time."""

    def call(self, request: Request, caller: Caller | None = None) -> Reply | Awaitable[Reply]:
        """Return the reply, or an awaitable of it, which is cancelled if the caller disconnects.
        Raise the ``KVStoreError`` to send. ``caller``: None for a client without a token."""
        ...

    def node_session(
        self, incoming: AsyncIterator[NodeMessage], identity: Identity = UNAUTHENTICATED
    ) -> AsyncIterator[MasterMessage]:
        """Serve one node's stream; yield the master's messages.

        ``identity``: that of the node. ``incoming`` ends when the node
        closes its side, and raises a ``KVStoreError`` at a malformed message. The generator is
        cancelled when the stream breaks, and always closed. A ``KVStoreError`` from it is sent to
        the node and ends the stream.
        """
        ...


@dataclass(slots=True)
class RpcStats:
    """Counts and times of one kind of call since the master's start."""

    count: int = 0
    errors: int = 0
    us: Histogram = field(default_factory=Histogram)
    """Microseconds to decode, reply and encode, with the time that replies waited."""


class Dispatcher:
    def __init__(self, service: RpcService) -> None:
        self.service = service
        """Handles the calls; replaceable between two calls."""
        self.stats: dict[str, RpcStats] = {call.name: RpcStats() for call in CALLS.values()}

    def dispatch(
        self, call: RpcMethod[Any, Any], data: bytes, caller: Caller | None = None
    ) -> bytes | asyncio.Task[bytes]:
        """Return the encoded reply, or a task that waits for it; cancelling it cancels the call.

        Args:
            call: the kind of call.
            data: the request's bytes.
            caller: None for a client without a token.

        Raises:
            KVStoreError: the only exception, also of the task (except cancellation).
        """
        stats = self.stats[call.name]
        stats.count += 1
        started = time.perf_counter()
        try:
            reply = self.service.call(decode_request(call, data), caller)
            if type(reply) is call.reply:
                encoded = _encoded(call, cast(Reply, reply))
                stats.us.add((time.perf_counter() - started) * 1e6)
                return encoded
            waiting = asyncio.ensure_future(cast(Awaitable[Reply], reply))
        except Exception as error:  # noqa: BLE001  # no bug in one call ends the process
            stats.us.add((time.perf_counter() - started) * 1e6)
            raise _to_wire_error(call, stats, error) from None
        task = asyncio.get_running_loop().create_task(
            self._await_reply(call, stats, waiting, started)
        )
        # Not in a ``finally``, which a task cancelled before its first step does not run.
        task.add_done_callback(lambda _: waiting.cancel())
        return task

    async def _await_reply(
        self,
        call: RpcMethod[Any, Any],
        stats: RpcStats,
        waiting: asyncio.Future[Reply],
        started: float,
    ) -> bytes:
        try:
            encoded = _encoded(call, await waiting)
        except asyncio.CancelledError:
            stats.errors += 1
            raise
        except Exception as error:  # noqa: BLE001  # as above
            raise _to_wire_error(call, stats, error) from None
        finally:
            stats.us.add((time.perf_counter() - started) * 1e6)
            # The error's traceback refers to this frame: a cycle, which the collector does not find
            # after a wait of a second (``main._keep_collector_out``).
            del waiting
        return encoded


def _to_wire_error(call: RpcMethod[Any, Any], stats: RpcStats, error: Exception) -> KVStoreError:
    stats.errors += 1
    if not isinstance(error, KVStoreError):
        return unexpected(error, call.name, logger)
    if isinstance(error, InternalError):
        logger.error("internal error call=%s", call.name, exc_info=error)
    return error


def _encoded(call: RpcMethod[Any, Any], reply: Reply) -> bytes:
    encoded = call.encode_reply(reply)
    if len(encoded) > REPLY_BYTES_MAX:
        raise BatchTooLargeError(
            f"{call.name}: the reply of {len(encoded)} bytes exceeds {REPLY_BYTES_MAX}",
            advice="Request fewer keys or namespaces per call.",
            reply_bytes=len(encoded),
        )
    return encoded
