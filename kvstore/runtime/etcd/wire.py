"""etcd's calls: names, messages, credentials and failures, shared by both clients."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import grpc
from google.protobuf.message import Message

from kvstore.errors import (
    EtcdUnreachableError,
    KVStoreError,
    PermissionDeniedError,
    StartupError,
)
from kvstore.runtime.addresses import EtcdPlace
from kvstore.runtime.etcd import rpc_pb2 as rpc

ResponseT = TypeVar("ResponseT", bound=Message)


class Method(NamedTuple, Generic[ResponseT]):
    path: str
    response: type[ResponseT]
    streams: bool = False


RANGE: Final = Method("/etcdserverpb.KV/Range", rpc.RangeResponse)
TXN: Final = Method("/etcdserverpb.KV/Txn", rpc.TxnResponse)
GRANT: Final = Method("/etcdserverpb.Lease/LeaseGrant", rpc.LeaseGrantResponse)
REVOKE: Final = Method("/etcdserverpb.Lease/LeaseRevoke", rpc.LeaseRevokeResponse)
KEEP_ALIVE: Final = Method(
    "/etcdserverpb.Lease/LeaseKeepAlive", rpc.LeaseKeepAliveResponse, streams=True
)
WATCH: Final = Method("/etcdserverpb.Watch/Watch", rpc.WatchResponse, streams=True)
STATUS: Final = Method("/etcdserverpb.Maintenance/Status", rpc.StatusResponse)
AUTHENTICATE: Final = Method("/etcdserverpb.Auth/Authenticate", rpc.AuthenticateResponse)

ATTEMPT_S: Final = 1.0
"""Timeout of one of several members. A healthy member takes milliseconds."""

OTHER_PREFIX: Final = (
    "Another program may use this prefix. Give each cluster its own: --etcd etcd://HOST/PREFIX."
)

CHANNEL_OPTIONS: Final = (
    # gRPC's default backoff grows to two minutes, too long for a restarted etcd.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


def credentials(place: EtcdPlace) -> grpc.ChannelCredentials | None:
    """Return the TLS credentials; None without TLS. Reads the files.

    Raises:
        StartupError: a file cannot be read.
    """
    if not place.ca:
        return None
    ca, cert, key = (_read(name) for name in (place.ca, place.cert, place.key))
    return grpc.ssl_channel_credentials(ca, key, cert)


def _read(name: str) -> bytes | None:
    try:
        return Path(name).expanduser().read_bytes() if name else None
    except OSError as error:
        raise StartupError(
            f"cannot read {name}, a certificate or key for etcd: {error.strerror}",
            advice="Give certificates as PEM files.",
        ) from error


def is_member_specific(error: grpc.RpcError) -> bool:
    """Return whether another member of the same etcd may succeed."""
    return error.code() in (
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )


def reason_of(error: grpc.RpcError) -> str:
    """Return the reason of a failed call in a few words."""
    return (error.details() or error.code().name.lower()).rpartition(": ")[2][:80]


def refused(error: grpc.RpcError, place: EtcdPlace) -> KVStoreError:
    """Return the error for a call that etcd refused."""
    details = error.details() or error.code().name.lower()
    message = f"the etcd at {place.text} refused a call: {details[:200]}"
    if error.code() in (
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.INVALID_ARGUMENT,
    ):
        advice = "Check the user, the password and the user's roles in etcd."
        return PermissionDeniedError(message, advice=advice)
    return EtcdUnreachableError(message, advice=advice_on(details))


def unavailable(place: EtcdPlace, reasons: dict[str, str]) -> EtcdUnreachableError:
    """Return the error for a call that every member failed. ``reasons``: by member."""
    why = "; ".join(f"{member}: {reason}" for member, reason in reasons.items())
    return EtcdUnreachableError(
        f"the etcd at {place.text} did not do what it was asked ({why or 'no time left'})"[:400],
        advice=advice_on(why),
    )


def advice_on(why: str) -> str:
    """Return the advice for an error text of an etcd member or of gRPC."""
    if "space exceeded" in why or "NOSPACE" in why:
        return (
            "The space of its database is used up, so it takes no writes: compact and defragment "
            "it (etcdctl compact, etcdctl defrag), then etcdctl alarm disarm"
        )
    if "CORRUPT" in why:
        return "A member of etcd differs from the others: etcdctl alarm list names it"
    if "http/2" in why.lower():
        return "That port speaks no gRPC: give the client port of etcd, usually 2379"
    if "connection refused" in why.lower():
        return "No process listens there: start etcd, or give the client port of one that runs"
    return "etcdctl endpoint health --endpoints ... says how it is"


def attempt_s(left_s: float, members_left: int) -> float:
    """Return the timeout at the next member, such that each of ``members_left`` members can be
    tried."""
    return left_s if members_left <= 1 else min(ATTEMPT_S, left_s / members_left)


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("token", token),) if token else ()
