"""Where the leader is, for clients and nodes: one read of one key, by a call that blocks.

By gRPC's blocking channels, because ``grpc.aio`` serves one event loop per process without noise,
and that one may be the user's own.
"""

from __future__ import annotations

import time
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.addresses import EtcdPlace
from kvstore.etcd import rpc_pb2 as rpc
from kvstore.etcd.wire import (
    AUTHENTICATE,
    CHANNEL_OPTIONS,
    RANGE,
    Method,
    credentials,
    metadata,
    refused,
    unavailable,
    worth_another_member,
)

ResponseT = TypeVar("ResponseT", bound=Message)


def find_leader(place: EtcdPlace, deadline: float) -> str:
    """The leader's ``host:port``; empty where nobody leads now. Threads: any.

    Args:
        deadline: a ``time.monotonic()`` value, by which this returns or raises.

    Raises:
        EtcdUnreachableError: no member of the etcd answered.
        PermissionDeniedError: it did not let us.
        StartupError: a file for TLS cannot be read.
    """
    secure = credentials(place)
    reasons: dict[str, str] = {}
    for number, member in enumerate(place.endpoints):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        timeout_s = left_s / (len(place.endpoints) - number)
        if secure is None:
            channel = grpc.insecure_channel(member, options=CHANNEL_OPTIONS)
        else:
            channel = grpc.secure_channel(member, secure, options=CHANNEL_OPTIONS)
        try:
            return _look(channel, place, time.monotonic() + timeout_s)
        except grpc.RpcError as error:
            failure = error
        finally:
            channel.close()
        if not worth_another_member(failure):
            raise refused(failure, place)
        details = failure.details() or failure.code().name.lower()
        reasons[member] = details.rpartition(": ")[2][:80]
    raise unavailable(place, reasons)


def _look(channel: grpc.Channel, place: EtcdPlace, deadline: float) -> str:
    token = ""
    if place.user:
        request = rpc.AuthenticateRequest(name=place.user, password=place.password)
        token = _ask(channel, AUTHENTICATE, request, "", deadline).token
    found = _ask(channel, RANGE, rpc.RangeRequest(key=place.leader_key), token, deadline)
    return found.kvs[0].value.decode(errors="replace") if found.kvs else ""


def _ask(
    channel: grpc.Channel,
    method: Method[ResponseT],
    request: Message,
    token: str,
    deadline: float,
) -> ResponseT:
    call: grpc.UnaryUnaryMultiCallable[Message, ResponseT]
    call = channel.unary_unary(
        method.path, type(request).SerializeToString, method.response.FromString
    )
    return call(request, timeout=max(deadline - time.monotonic(), 0.001), metadata=metadata(token))
