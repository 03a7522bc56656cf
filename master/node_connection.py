"""A node's stream on its connection to the lane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack

from kvstore.calls import NodeMessage
from kvstore.errors import KVStoreError, without_frames
from kvstore.master.dispatcher import RpcService, logger
from kvstore.runtime.tasks import start_task
from kvstore.security.identity import Identity
from kvstore.wire.frames import REPLY, frame
from kvstore.wire.node_messages import decode_node_message, encode_master_message
from kvstore.wire.status import unexpected


class NodeConnection:
    """Passes messages between a lane connection and the service. Threads: the loop's."""

    def __init__(
        self,
        service: RpcService,
        identity: Identity,
        *,
        write: Callable[[list[bytes]], None],
        taken: Callable[[], None],
        ended: Callable[[KVStoreError | None], None],
    ) -> None:
        """
        Args:
            write: sends frames.
            taken: called when the service has taken a message, and the next may follow.
            ended: called once, unless the stream is cancelled; with the error to send, if any.
        """
        self._write = write
        self._taken = taken
        self._ended = ended
        self._received: asyncio.Queue[bytes] = asyncio.Queue(1)
        self.writable = asyncio.Event()
        """Clear while the node leaves replies unread."""
        self.writable.set()
        self.task = start_task("node stream", self._serve(service, identity))

    def cancel(self) -> None:
        """End the stream, whose connection is lost. The object is unusable then."""
        self.task.cancel()
        del self.task  # which keeps its cancellation, whose traceback refers to us

    def receive(self, payload: bytes) -> None:
        """Pass a message to the service, which has taken the one before."""
        self._received.put_nowait(payload)

    async def _messages(self) -> AsyncIterator[NodeMessage]:
        while data := await self._received.get():
            self._taken()
            yield decode_node_message(data)

    async def _serve(self, service: RpcService, identity: Identity) -> None:
        # The service's generator is closed here, not when it is collected.
        ended: KVStoreError | None = None
        try:
            async with AsyncExitStack() as stack:
                outgoing = service.node_session(self._messages(), identity)
                if isinstance(outgoing, AsyncGenerator):
                    stack.push_async_callback(outgoing.aclose)
                async for message in outgoing:
                    await self.writable.wait()
                    self._write([frame(0, REPLY, b"", encode_master_message(message))])
        except KVStoreError as error:
            ended = without_frames(error)  # a cycle that is frozen would never be freed
        except Exception as error:  # noqa: BLE001  # the process outlives any bug in one stream
            ended = unexpected(error, "a node's stream", logger)
        self._ended(ended)
