"""Calls of a candidate to etcd: leases, the leader's key, and a watch for its end."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, NamedTuple, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from kvstore.errors import KVStoreError, NotLeaderError, ProtocolError
from kvstore.runtime.addresses import EtcdPlace
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd import rpc_pb2 as rpc
from kvstore.runtime.etcd.wire import (
    AUTHENTICATE,
    CHANNEL_OPTIONS,
    GRANT,
    KEEP_ALIVE,
    OTHER_PREFIX,
    RANGE,
    REVOKE,
    TXN,
    WATCH,
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

log = logging.getLogger("kvstore.master")

EPOCH_DIGITS_MAX: Final = 20

ResponseT = TypeVar("ResponseT", bound=Message)


class EtcdLease(NamedTuple):
    lease_id: int
    ttl_s: int
    """Granted by etcd; may exceed the request."""


class LeaderEntry(NamedTuple):
    address: str
    lease_id: int
    revision: int
    """Revision at which the key was created; grows with every leader."""


class LeaderSnapshot(NamedTuple):
    """The leader's key at one revision."""

    leader: LeaderEntry | None
    revision: int
    """Revision of etcd's store at that time."""


class Etcd:
    """A connection to one etcd. Threads: that of one event loop.

    Every method takes ``deadline``, a value of ``uptime()`` by which it returns or raises. A call
    that fails at one member is retried at the next one, so it may be executed twice; a second
    ``new_epoch`` fails.

    Raises (all of them):
        EtcdUnreachableError: no member answered in time; the call may have been executed.
        PermissionDeniedError: etcd refused the user.
    """

    def __init__(self, place: EtcdPlace) -> None:
        """Raise StartupError if a file for TLS cannot be read."""
        self.place = place
        self._credentials = credentials(place)
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._turn = 0
        self._token = ""

    async def close(self) -> None:
        """Idempotent."""
        for channel in list(self._channels.values()):
            await channel.close()
        self._channels.clear()

    # --- leases -------------------------------------------------------------------------------

    async def grant(self, ttl_s: int, deadline: float) -> EtcdLease:
        granted = await self._call(GRANT, rpc.LeaseGrantRequest(TTL=ttl_s), deadline)
        return EtcdLease(granted.ID, granted.TTL)

    async def keep_alive(self, lease_id: int, deadline: float) -> int:
        """Renew the lease; return its remaining seconds, counted from a time after the start of
        this call; 0: the lease does not exist any more."""
        kept = await self._call(KEEP_ALIVE, rpc.LeaseKeepAliveRequest(ID=lease_id), deadline)
        return max(kept.TTL, 0)

    async def revoke(self, lease_id: int, deadline: float) -> None:
        """Revoke the lease, which deletes all attached keys. Idempotent."""
        await self._call(
            REVOKE, rpc.LeaseRevokeRequest(ID=lease_id), deadline, missing_is_fine=True
        )

    # --- the leader's key ---------------------------------------------------------------------

    async def read_leader(self, deadline: float) -> LeaderSnapshot:
        found = await self._call(RANGE, rpc.RangeRequest(key=self.place.leader_key), deadline)
        return LeaderSnapshot(_leader(found), found.header.revision)

    async def campaign(self, lease_id: int, address: str, deadline: float) -> LeaderEntry:
        """Write ``address`` into the leader's key if there is no leader; return the leader."""
        put = rpc.PutRequest(key=self.place.leader_key, value=address.encode(), lease=lease_id)
        done = await self._create(put, deadline)
        if done.succeeded:
            return LeaderEntry(address, lease_id, done.header.revision)
        leader = _leader(done.responses[0].response_range)
        assert leader is not None, "a key that could not be created exists"
        return leader

    async def cluster_named(self, name: str, deadline: float) -> str:
        """Return the cluster name stored under this prefix, or store ``name`` if there is none.
        Empty: neither exists."""
        key = self.place.cluster_key
        if not name:
            found = await self._call(RANGE, rpc.RangeRequest(key=key), deadline)
            return found.kvs[0].value.decode(errors="replace") if found.kvs else ""
        done = await self._create(rpc.PutRequest(key=key, value=name.encode()), deadline)
        if done.succeeded:
            return name
        return done.responses[0].response_range.kvs[0].value.decode(errors="replace")

    async def _create(self, put: rpc.PutRequest, deadline: float) -> rpc.TxnResponse:
        """Put a key if it does not exist, else read it."""
        absent = rpc.Compare(target=rpc.Compare.CREATE, key=put.key, create_revision=0)
        transaction = rpc.TxnRequest(
            compare=[absent],
            success=[rpc.RequestOp(request_put=put)],
            failure=[rpc.RequestOp(request_range=rpc.RangeRequest(key=put.key))],
        )
        return await self._call(TXN, transaction, deadline)

    async def watch_for_end(self, revision: int, deadline: float) -> bool:
        """Wait until the leader's key changes after ``revision``; return False at the deadline."""
        create = rpc.WatchCreateRequest(key=self.place.leader_key, start_revision=revision + 1)
        request = rpc.WatchRequest(create_request=create)
        try:
            await self._call(WATCH, request, deadline)
        except KVStoreError:
            if uptime() < deadline - 0.001:
                raise
            return False
        return True

    async def new_epoch(
        self, leader: LeaderEntry, least: int, epoch_max: int, deadline: float
    ) -> int:
        """Return an epoch higher than all before, for ``leader``, if it still leads.

        Args:
            least: the minimum, Unix time in milliseconds, as masters without etcd use, so that the
                new epoch is higher than theirs.
            epoch_max: the highest plausible epoch; a higher one in etcd is replaced as damaged.

        Raises:
            NotLeaderError: another leader, or none, is in the key.
            ProtocolError: the key of the epoch has an invalid value.
        """
        key = self.place.epoch_key
        found = await self._call(RANGE, rpc.RangeRequest(key=key), deadline)
        last, changed_at = 0, 0
        if found.kvs:
            value, changed_at = found.kvs[0].value, found.kvs[0].mod_revision
            if not value.isdigit() or len(value) > EPOCH_DIGITS_MAX:
                raise ProtocolError(
                    f"{key.decode()} in the etcd at {self.place.text} holds {value[:40]!r}, "
                    "not an epoch",
                    advice=OTHER_PREFIX,
                )
            last = int(value)
            if last > epoch_max:
                log.warning("epoch_rejected in_etcd=%d highest=%d", last, epoch_max)
                last = 0
        epoch = max(last + 1, least)
        still = rpc.Compare(
            target=rpc.Compare.CREATE, key=self.place.leader_key, create_revision=leader.revision
        )
        unchanged = rpc.Compare(target=rpc.Compare.MOD, key=key, mod_revision=changed_at)
        put = rpc.PutRequest(key=key, value=str(epoch).encode())
        transaction = rpc.TxnRequest(
            compare=[still, unchanged], success=[rpc.RequestOp(request_put=put)]
        )
        if not (await self._call(TXN, transaction, deadline)).succeeded:
            raise NotLeaderError("the lease ended before the epoch was written", leader="")
        return epoch

    # --- one call, at one member after another ------------------------------------------------

    async def _call(
        self,
        method: Method[ResponseT],
        request: Message,
        deadline: float,
        *,
        missing_is_fine: bool = False,
    ) -> ResponseT:
        members = self.place.endpoints
        reasons: dict[str, str] = {}
        authenticated = False
        for tried in range(len(members) + 1):  # each member once, the first one twice
            member = members[self._turn % len(members)]
            left_s = deadline - uptime()
            if left_s <= 0:
                break
            first_s = attempt_s(left_s, len(members) - tried)
            timeout_s = left_s if method is WATCH else first_s
            try:
                if self.place.user and not self._token:
                    self._token = await self._authenticate(member, first_s)
                return await self._ask(member, method, request, timeout_s, first_s)
            except grpc.RpcError as error:
                failure = error
            if missing_is_fine and failure.code() is grpc.StatusCode.NOT_FOUND:
                return method.response()
            if "auth" in (failure.details() or "") and self._token and not authenticated:
                self._token, authenticated = "", True  # etcd restarted since it issued it
                continue
            if not is_member_specific(failure):
                raise refused(failure, self.place)
            reasons[member] = reason_of(failure)
            await self._forget(member)
            self._turn += 1
        raise unavailable(self.place, reasons)

    async def _authenticate(self, member: str, timeout_s: float) -> str:
        request = rpc.AuthenticateRequest(name=self.place.user, password=self.place.password)
        return (await self._ask(member, AUTHENTICATE, request, timeout_s, timeout_s)).token

    async def _ask(
        self,
        member: str,
        method: Method[ResponseT],
        request: Message,
        timeout_s: float,
        first_s: float,
    ) -> ResponseT:
        """Send one call. ``first_s``: timeout of a stream's first message. Raises grpc.RpcError."""
        channel = await self._channel(member, timeout_s)
        encode, decode = type(request).SerializeToString, method.response.FromString
        if not method.streams:
            call: Any = channel.unary_unary(method.path, encode, decode)
            answer: ResponseT = await call(
                request, timeout=timeout_s, metadata=metadata(self._token)
            )
            return answer
        stream: Any = channel.stream_stream(method.path, encode, decode)(
            timeout=timeout_s, metadata=metadata(self._token)
        )
        try:
            async with asyncio.timeout(first_s):
                await stream.write(request)
                response = await stream.read()
            while response is not grpc.aio.EOF:
                if method is not WATCH or response.events or response.canceled:
                    found: ResponseT = response
                    return found
                response = await stream.read()
            raise _unavailable("the member ended the stream")
        except TimeoutError:
            raise _unavailable("the member does not answer") from None
        finally:
            stream.cancel()

    async def _channel(self, member: str, timeout_s: float) -> grpc.aio.Channel:
        """Return the member's channel. Raises grpc.RpcError: its name cannot be resolved."""
        channel = self._channels.get(member)
        if channel is None:
            try:
                target, named = await asyncio.to_thread(grpc_target, member, uptime() + timeout_s)
            except NameResolutionError as error:
                raise _unavailable(str(error)) from None
            options = CHANNEL_OPTIONS + named
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(target, options=options)
            else:
                channel = grpc.aio.secure_channel(target, self._credentials, options=options)
            self._channels[member] = channel
        return channel

    async def _forget(self, member: str) -> None:
        """Drop the member's channel, so that the next call connects without its backoff."""
        channel = self._channels.pop(member, None)
        if channel is not None:
            await channel.close()


def _unavailable(details: str) -> grpc.aio.AioRpcError:
    """Return the error that gRPC raises for an unavailable peer."""
    nothing = grpc.aio.Metadata()
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, nothing, nothing, details)


def _leader(found: rpc.RangeResponse) -> LeaderEntry | None:
    if not found.kvs:
        return None
    row = found.kvs[0]
    return LeaderEntry(row.value.decode(errors="replace"), row.lease, row.create_revision)
