"""A node's stream to its master: frames on the master's lane (``kvstore.wire.frames``)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import Self, cast

import grpc
import grpc.aio

from kvstore.calls import Join, JoinReply, MasterMessage, NodeMessage
from kvstore.errors import KVStoreError, MasterUnreachableError, ProtocolError
from kvstore.limits import FRAME_BYTES_MAX, PROTOCOL_VERSION
from kvstore.runtime.addresses import split_address
from kvstore.runtime.clock import uptime
from kvstore.runtime.resolver import (
    Address,
    NameResolutionError,
    grpc_target,
    limit_silence,
    resolve,
)
from kvstore.security.credentials import MASTER_NAME, Credentials, channel_options
from kvstore.wire.frames import (
    CALL,
    ERROR,
    NODE_MESSAGE,
    REPLY,
    Frame,
    FrameReader,
    frame,
    hello,
)
from kvstore.wire.messages import CALLS, decode_reply, encode_request
from kvstore.wire.node_messages import decode_master_message, encode_node_message
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
)

JOIN = CALLS[Join]

SILENCE_S = 5
"""Time after which a host that has vanished is noticed, even if nothing is sent."""

_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_NOT_THE_MASTER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
)
"""Codes of gRPC itself for the end of a connection; the master's errors carry a detail. INTERNAL
("Internal error from Core"): the peer ended the connection while it was opened."""


class NodeStream:
    """One session with the master at ``address``.

        async with NodeStream("127.0.0.1:50001") as stream:
            await stream.connect("node-1", "host-1", 5.0)
            await stream.send(NodeJoin(...))
            accepted = await stream.receive()

    Leaving ends the session. One task may receive while others send.
    """

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        """``credentials``: the node's identity; None: no authentication."""
        self._address = address
        self._credentials = credentials
        self._pems = None if credentials is None else credentials.pems()
        self._ended: KVStoreError | None = None
        self._frames: FrameReader
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()

    @property
    def is_outdated(self) -> bool:
        """Whether the node's certificate was renewed: the session ends with the old one."""
        return self._credentials is not None and self._credentials.pems() is not self._pems

    async def connect(self, name: str, host: str, timeout_s: float) -> None:
        """Asks the master for its lane, and connects to it.

        Raises:
            MasterUnreachableError: nothing answers, or not in time, or no master.
            KVStoreError: the master refuses the node.
        """
        until = uptime() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                joined = await self._join(Join(name, host, PROTOCOL_VERSION), until)
                await self._open_lane(joined, until)
        except TimeoutError:
            raise MasterUnreachableError(
                f"no master answers at {self._address} within {timeout_s:.0f} s",
                advice=unreachable_advice(self._address, []),
                address=self._address,
            ) from None
        except NameResolutionError as error:
            raise self._unreachable(
                str(error), "Check the address, and this host's name service."
            ) from None

    async def _join(self, join: Join, until: float) -> JoinReply:
        target, named = await asyncio.to_thread(grpc_target, self._address, until)
        options = [*_OPTIONS, *named]
        if self._credentials is None:
            channel = grpc.aio.insecure_channel(target, options=options)
        else:
            options += channel_options()
            channel = grpc.aio.secure_channel(target, self._credentials.channel(), options=options)
        async with channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(JOIN.path)
            try:
                return cast(JoinReply, decode_reply(JOIN, await call(encode_request(join))))
            except grpc.aio.AioRpcError as error:
                failure = await self._join_error(error)
        raise failure  # without gRPC's error as context, which would keep the connection

    async def _open_lane(self, joined: JoinReply, until: float) -> None:
        """Connects to the lane. Of several masters with one name, one knows the token."""
        host, _ = split_address(self._address)
        port, reason, advice = joined.lane_port, "", ""
        for address in await asyncio.to_thread(resolve, host, port, until):
            try:
                await self._connect(address)
                await self._write_frame(hello(joined.lane_token))
                _, kind, _, payload = await self._next()
            except OSError as error:
                reason = os.strerror(error.errno).lower() if error.errno else str(error)
                reason = f"its lane, TCP port {port}: {reason}"
                advice = f"Nodes need TCP port {port} of the master's host, too."
            else:
                if kind != ERROR:
                    return
                refusal = decode_error(payload)  # the term has ended, or no connection is free
                reason, advice = refusal.message, refusal.advice
            self._close()
        raise self._unreachable(reason, advice)

    async def _connect(self, address: Address) -> None:
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            limit_silence(sock, SILENCE_S)
            await asyncio.get_running_loop().sock_connect(sock, address.place)
        except BaseException:
            sock.close()
            raise
        tls = None if self._credentials is None else self._credentials.client()
        self._frames = FrameReader(FRAME_BYTES_MAX)
        self._reader, self._writer = await asyncio.open_connection(
            sock=sock, ssl=tls, server_hostname=None if tls is None else MASTER_NAME
        )

    async def send(self, message: NodeMessage) -> None:
        """Returns when the connection can take more. Cancelling it loses no message.

        Raises:
            KVStoreError: the session has ended.
        """
        await self._send(encode_node_message(message))

    async def done_sending(self) -> None:
        """Closes this side; the master may continue to send until it ends the session."""
        with contextlib.suppress(KVStoreError):
            await self._send(b"")

    async def _send(self, payload: bytes) -> None:
        if self._ended is not None:
            raise self._ended
        try:
            await self._write_frame(frame(0, CALL, NODE_MESSAGE, payload))
        except OSError:
            raise self._ending() from None

    async def _write_frame(self, data: bytes) -> None:
        assert self._writer is not None, "connect first"
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> MasterMessage:
        """Receives the next message. Cancelling it loses none.

        Raises:
            MasterUnreachableError: the stream ended.
            KVStoreError: the master ended the session with it.
        """
        if self._ended is not None:
            raise self._ended
        try:
            _, kind, _, payload = await self._next()
            if kind == REPLY:
                return decode_master_message(payload)
            ended = decode_error(payload)
        except OSError:
            ended = self._ending()
        except KVStoreError as error:
            ended = error
        self._ended = ended
        raise ended

    async def _next(self) -> Frame:
        """Receives a frame. Raises ProtocolError; OSError: the connection ended."""
        frames = self._frames
        while (received := frames.next()) is None:
            space = frames.space()
            if not (data := await self._reader.read(len(space))):
                raise ConnectionError("the master closed the connection")
            space[: len(data)] = data
            frames.received(len(data))
        if received[1] not in (REPLY, ERROR):
            raise ProtocolError(f"a master sends no frames of kind {received[1]}")
        return received

    def _ending(self) -> KVStoreError:
        return MasterUnreachableError(
            f"the master at {self._address} ended the session", address=self._address
        )

    def _unreachable(self, reason: str, advice: str) -> KVStoreError:
        return MasterUnreachableError(
            f"no session with the master at {self._address}: {reason}",
            advice=advice,
            address=self._address,
        )

    async def _join_error(self, error: grpc.aio.AioRpcError) -> KVStoreError:
        detail = detail_of(error)
        if detail is not None:
            return decode_error(detail)
        code, details = error.code(), error.details() or ""
        if code not in _NOT_THE_MASTER:
            return from_grpc(code, details, None)
        reason = short_reason(details)
        what = ""
        if is_protocol_mismatch(details):
            what = await asyncio.to_thread(identify_service, self._address)
        if self._credentials is not None:
            if reason in CLOSED_REASONS:
                reason = self._credentials.validity_error() or reason
            what = GRPC if what == TLS else what
        reason = NO_MASTER + what if what not in ("", GRPC) else reason
        return self._unreachable(reason, unreachable_advice(self._address, [reason]))
