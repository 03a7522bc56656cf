"""The node's side of ``NodeService.Session``."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Self

import grpc
import grpc.aio

from kvstore.calls import MasterMessage, NodeMessage
from kvstore.errors import KVStoreError, MasterUnreachableError
from kvstore.limits import FRAME_BYTES_MAX
from kvstore.runtime.clock import uptime
from kvstore.runtime.resolver import RESOLVE_S, NameResolutionError, grpc_target
from kvstore.runtime.tasks import start_task
from kvstore.security.credentials import Credentials, channel_options
from kvstore.wire.node_messages import SESSION_PATH, decode_master_message, encode_node_message
from kvstore.wire.port_probe import (
    GRPC,
    NO_MASTER,
    TLS,
    identify_service,
    is_protocol_mismatch,
    unreachable_advice,
)
from kvstore.wire.status import (
    CLOSED_REASONS,
    decode_error,
    detail_of,
    from_grpc,
    short_reason,
    unexpected,
)

if TYPE_CHECKING:
    Call = grpc.aio.StreamStreamCall[bytes, bytes]

log = logging.getLogger("kvstore.node")

RECEIVED_MAX = 64
"""Messages that wait for ``receive``; beyond, gRPC's flow control pauses the master."""

_OPTIONS = (
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    # A host that vanished is noticed within seconds, whatever the stream carries.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_NOT_THE_MASTER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
)
"""Codes of gRPC itself for the end of a connection; the master's errors carry a detail. INTERNAL
("Internal error from Core"): the peer ended the stream while it was opened."""


class NodeStream:
    """One session with the master at ``address``.

        async with NodeStream("127.0.0.1:50001") as stream:
            await stream.send(NodeJoin(...))
            accepted = await stream.receive()

    Entering only resolves the host name; the first ``receive`` raises if there is no master.
    Leaving ends the session. One task may send while another receives.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """``credentials``: the node's identity; None: no authentication."""
        self._address = address
        self._credentials = credentials
        self._pems = None if credentials is None else credentials.pems()
        self._received: asyncio.Queue[MasterMessage | KVStoreError] = asyncio.Queue(RECEIVED_MAX)
        self._ended: KVStoreError | None = None
        self._channel: grpc.aio.Channel | None = None
        self._call: Call | None = None
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        try:
            target, named = await asyncio.to_thread(
                grpc_target, self._address, uptime() + RESOLVE_S
            )
        except NameResolutionError as error:
            raise MasterUnreachableError(
                f"no session with the master at {self._address}: {error}",
                advice="Check the address, and this host's name service.",
                address=self._address,
            ) from None
        if self._credentials is None:
            self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS + named)
        else:
            options = [*_OPTIONS, *named, *channel_options()]
            self._channel = grpc.aio.secure_channel(
                target, self._credentials.channel(), options=options
            )
        session: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
        session = self._channel.stream_stream(SESSION_PATH)
        self._call = session()
        self._reader = start_task("node stream", self._read(self._call))
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        if self._call is not None:
            self._call.cancel()
        if self._channel is not None:
            await self._channel.close()

    @property
    def is_outdated(self) -> bool:
        """Whether the node's certificate was renewed: the session ends with the old one."""
        return self._credentials is not None and self._credentials.pems() is not self._pems

    async def connect(self, timeout_s: float) -> None:
        """Waits until a connection is open. Raises MasterUnreachableError."""
        assert self._channel is not None, "enter the stream first"
        ready = grpc.ChannelConnectivity.READY
        try:
            async with asyncio.timeout(timeout_s):
                while (state := self._channel.get_state(try_to_connect=True)) is not ready:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise await self._ending()
                    await self._channel.wait_for_state_change(state)
        except TimeoutError:
            raise MasterUnreachableError(
                f"no master answers at {self._address} within {timeout_s:.0f} s",
                advice=unreachable_advice(self._address, []),
                address=self._address,
            ) from None

    async def _ending(self) -> KVStoreError:
        """Receives the error of a session without a master."""
        while not isinstance(received := await self._received.get(), KVStoreError):
            pass
        return received

    async def send(self, message: NodeMessage) -> None:
        """Returns when gRPC has accepted the message. Cancelling it ends the session.

        Raises:
            KVStoreError: the session has ended.
        """
        assert self._call is not None, "enter the stream first"
        if self._ended is not None:
            raise self._ended
        try:
            await self._call.write(encode_node_message(message))
        except (grpc.RpcError, asyncio.InvalidStateError) as error:
            ended = await self._end_reason(error)
        else:
            return
        raise ended  # without gRPC's error as context, which would keep the connection

    async def receive(self) -> MasterMessage:
        """Receives the next message. Cancelling it loses none.

        Raises:
            MasterUnreachableError: there is no master, or the stream ended.
            KVStoreError: the master ended the session with it.
        """
        if self._ended is not None and self._received.empty():
            raise self._ended
        received = await self._received.get()
        if isinstance(received, KVStoreError):
            raise received
        return received

    async def done_sending(self) -> None:
        """Closes this side; the master may continue to send until it ends the session."""
        assert self._call is not None, "enter the stream first"
        with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    async def _read(self, call: Call) -> None:
        # A task of its own: cancelling a read of grpc.aio would cancel the whole session.
        try:
            while isinstance(data := await call.read(), bytes):  # else it is EOF
                await self._received.put(decode_master_message(data))
            ended = await self._end_reason(None)
        except grpc.RpcError as error:
            ended = await self._end_reason(error)
        except KVStoreError as error:
            ended = error
        except Exception as error:  # noqa: BLE001  # otherwise ``receive`` would wait forever
            ended = unexpected(error, "reading what the master says", log)
        self._ended = ended
        await self._received.put(ended)

    async def _end_reason(self, error: Exception | None) -> KVStoreError:
        """The error that ended the session."""
        if not isinstance(error, grpc.RpcError):
            # ``write`` and ``read`` only report the end; the call has the reason.
            assert self._call is not None
            code, details = await self._call.code(), await self._call.details()
            if code is grpc.StatusCode.OK:
                return MasterUnreachableError(
                    f"the master at {self._address} ended the session", address=self._address
                )
            metadata = await self._call.trailing_metadata()
            error = grpc.aio.AioRpcError(code, metadata, metadata, details)
        detail = detail_of(error)
        if detail is not None:
            return decode_error(detail)
        code, details = error.code(), error.details() or ""
        if code in _NOT_THE_MASTER:
            reason = short_reason(details)
            what = ""
            if is_protocol_mismatch(details):
                what = await asyncio.to_thread(identify_service, self._address)
            if self._credentials is not None:
                if reason in CLOSED_REASONS:
                    reason = self._credentials.validity_error() or reason
                what = GRPC if what == TLS else what
            reason = NO_MASTER + what if what not in ("", GRPC) else reason
            return MasterUnreachableError(
                f"no session with the master at {self._address}: {reason}",
                advice=unreachable_advice(self._address, [reason]),
                address=self._address,
            )
        return from_grpc(code, details, None)
