"""Leader lookup for clients and nodes: one blocking read of one key.

Uses blocking channels, because ``grpc.aio`` works without warnings only in one event loop per
process, which may be the user's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.errors import EtcdUnreachableError
from kvstore.runtime.addresses import EtcdPlace, is_host_port
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd import rpc_pb2 as rpc
from kvstore.runtime.etcd.wire import (
    AUTHENTICATE,
    CHANNEL_OPTIONS,
    OTHER_PREFIX,
    RANGE,
    STATUS,
    Method,
    attempt_s,
    credentials,
    is_member_specific,
    metadata,
    reason_of,
    refused,
    unavailable,
)
from kvstore.runtime.resolver import NameResolutionError, grpc_target

ResponseT = TypeVar("ResponseT", bound=Message)

_answered: Final[dict[tuple[str, ...], str]] = {}
"""The member that last answered, by the members of its etcd. A program uses few etcds."""


def find_leader(place: EtcdPlace, deadline: float) -> str:
    """Return the leader's ``host:port``; empty: no leader. Threads: any.

    Args:
        deadline: a ``uptime()`` value, by which this returns or raises.

    Raises:
        EtcdUnreachableError: no member of the etcd answered, or the leader's key holds no address.
        PermissionDeniedError: etcd refused the user.
        StartupError: a file for TLS cannot be read.
    """
    secure = credentials(place)
    reasons: dict[str, str] = {}
    for number, member in enumerate(_best_first(place)):
        left_s = deadline - uptime()
        if left_s <= 0:
            break
        timeout_s = attempt_s(left_s, len(place.endpoints) - number)
        by = uptime() + timeout_s
        try:
            with _channel(member, secure, by) as channel:
                found = _leader(channel, place, _token(channel, place, by), by)
            _answered[place.endpoints] = member
            return found
        except NameResolutionError as unknown:
            reasons[member] = str(unknown)
        except grpc.RpcError as error:
            if not is_member_specific(error):
                raise refused(error, place) from None
            reasons[member] = reason_of(error)
    raise unavailable(place, reasons)


class MemberStatus(NamedTuple):
    """The state of one member of an etcd."""

    version: str
    leads: bool
    """Whether this member is etcd's own leader."""
    master: str
    """The leading master known to this member; may be empty."""
    errors: Sequence[str] = ()
    """Errors that the member reports."""


def look_at(place: EtcdPlace, member: str, deadline: float) -> MemberStatus:
    """Query the state of one member of ``place``. Threads: any.

    Raises: as ``find_leader``; also if the member answers but has no quorum.
    """
    alone = place._replace(endpoints=(member,))
    try:
        with _channel(member, credentials(place), deadline) as channel:
            token = _token(channel, place, deadline)
            said = _ask(channel, STATUS, rpc.StatusRequest(), token, deadline)
            if not said.leader:
                raise EtcdUnreachableError(
                    f"etcd member {member} answers, but has no quorum",
                    advice="Check that the other members run and reach each other.",
                )
            master = _leader(channel, place, token, deadline)
    except NameResolutionError as unknown:
        raise unavailable(alone, {member: str(unknown)}) from None
    except grpc.RpcError as error:
        if not is_member_specific(error):
            raise refused(error, alone) from None
        raise unavailable(alone, {member: reason_of(error)}) from None
    return MemberStatus(
        said.version, said.leader == said.header.member_id, master, tuple(said.errors)
    )


def _best_first(place: EtcdPlace) -> list[str]:
    """Return the members, the one that last answered first, so that a hanging member costs only one
    call."""
    best = _answered.get(place.endpoints)
    return sorted(place.endpoints, key=lambda member: member != best)


def _channel(member: str, secure: grpc.ChannelCredentials | None, deadline: float) -> grpc.Channel:
    """Open a channel. Raises NameResolutionError."""
    target, named = grpc_target(member, deadline)
    if secure is None:
        return grpc.insecure_channel(target, options=CHANNEL_OPTIONS + named)
    return grpc.secure_channel(target, secure, options=CHANNEL_OPTIONS + named)


def _token(channel: grpc.Channel, place: EtcdPlace, deadline: float) -> str:
    if not place.user:
        return ""
    request = rpc.AuthenticateRequest(name=place.user, password=place.password)
    return _ask(channel, AUTHENTICATE, request, "", deadline).token


def _leader(channel: grpc.Channel, place: EtcdPlace, token: str, deadline: float) -> str:
    found = _ask(channel, RANGE, rpc.RangeRequest(key=place.leader_key), token, deadline)
    leader = found.kvs[0].value.decode(errors="replace") if found.kvs else ""
    if leader and not is_host_port(leader):
        raise EtcdUnreachableError(
            f"{place.leader_key.decode()} in the etcd at {place.text} holds {leader[:40]!r}, not "
            "the address of a master",
            advice=OTHER_PREFIX,
        )
    return leader


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
    return call(request, timeout=max(deadline - uptime(), 0.001), metadata=metadata(token))
