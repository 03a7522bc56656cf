"""Retries of calls: when to send, resend or fail. Pure: it uses no socket.

``attempts`` is a generator: it yields the next ``Action``, and is sent its result or thrown its
error. ``kvstore.client.rpc.stub`` drives it, and tests drive it with a list. Its rules:

- Calls of clients require a join. A call whose connection breaks joins again; the epoch shows
  whether the master is the same.
- A call that was not sent may be sent again. One that was sent may be repeated if it is idempotent,
  or if the master that may have executed it has ended with its state (a new epoch).
- With several masters or etcd, the call leaves a master that is silent, unreachable or a standby
  for the leader, as often as necessary.
- The lane is preferred. While it is unreachable, all calls use gRPC, and the stub retries it.
- Between attempts the call backs off exponentially, with jitter, never beyond the deadline.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator
from typing import Any, Final, NamedTuple, cast

import grpc

from kvstore.calls import Allocate, Clear, Commit, JoinReply, PutEnd, PutStart, Remove, Request
from kvstore.config import DEFAULT_PORT
from kvstore.errors import (
    DeadlineExceededError,
    KVStoreError,
    MasterUnreachableError,
    NotLeaderError,
    PermissionDeniedError,
    UnavailableError,
)
from kvstore.runtime.addresses import (
    ETCD_SCHEME,
    EtcdPlace,
    join_address,
    parse_etcd,
    shown_place,
    split_address,
)
from kvstore.wire.messages import JOIN_METADATA, RpcMethod
from kvstore.wire.port_probe import ASK_S, GRPC, NO_MASTER, is_protocol_mismatch, unreachable_advice
from kvstore.wire.status import decode_error, detail_of, from_grpc, short_reason

LANE_RETRY_MAX_S: Final = 30.0
"""Maximum pause between attempts to reach the lane. The first one is 1 s; each one doubles."""

LANE_CONNECT_S: Final = 1.0
"""Limit on connecting to the lane: a firewall may drop packets, and gRPC could make the call."""

REFUSALS_MAX: Final = 2
"""Rejected fresh tokens, after which gRPC is used: the lane may be another process's."""

JOIN_S: Final = 2.0
"""Time for one of several masters to reply to a join before the next one is tried."""

LOCATE_S: Final = 2.0
"""Time for etcd to name the leader before it is queried again."""

SILENCE_S: Final = 2.0
"""Maximum silence of one of several masters, in addition to the call's own wait: a stopped master
keeps its connections open."""

WIPES_S: Final = 8.0
"""Maximum wait of calls that remove or replace objects: nodes must wipe, or count as dead."""

HOPS_MAX: Final = 3
"""Redirections that one call follows without a pause."""

BACKOFF_FIRST_S: Final = 0.02
BACKOFF_MAX_S: Final = 1.0
BACKOFF_SEVERAL_S: Final = 0.5
"""Maximum backoff with several masters, one of which will lead within seconds."""

LOG_WAIT_S: Final = 1.0
"""A call without a master for this long logs why it waits."""

ATTEMPT_S: Final = 0.01
"""Minimum remaining time for another attempt."""

NO_REPLY: Final = "no reply in time"


class ConnectionBrokenError(Exception):
    """A failed connection, before or during a call.

    ``sent``: the master may have received the call. ``silent``: the connection is intact, but no
    reply came. ``strange``: the peer may be no master. ``generation``: that of the link when the
    connection was made; None: the present one.
    """

    def __init__(
        self, reason: str, *, sent: bool, silent: bool = False, strange: bool = False
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent
        self.silent = silent
        self.strange = strange
        self.generation: int | None = None


class LaneUnreachableError(Exception):
    """Failure to reach the lane; nothing was sent. The text is the reason, and what to do."""


class TokenRefusedError(Exception):
    """Rejection of the token: the joined master is not there any more. Not executed."""


class FindLeader(NamedTuple):
    """Query etcd for the leader. Result: its address; empty if there is none."""

    address: EtcdPlace
    timeout_s: float


class JoinAt(NamedTuple):
    """Join the master at ``address``, unless another call has joined since ``generation``."""

    address: str
    timeout_s: float
    generation: int


class SendOnLane(NamedTuple):
    """Send the call on the lane. Result: the encoded reply."""


class SendOnGrpc(NamedTuple):
    """Send the call by gRPC. Result: the encoded reply."""

    address: str


class ProbePort(NamedTuple):
    """Identify the listener at ``address``. Result: that of ``port_probe.identify_service``."""

    address: str
    timeout_s: float


class Backoff(NamedTuple):
    seconds: float
    reason: str = ""
    """Reason for the wait; empty during its first ``LOG_WAIT_S``."""


Action = FindLeader | JoinAt | SendOnLane | SendOnGrpc | ProbePort | Backoff
Attempts = Generator[Action, Any, bytes]
"""Generator of ``attempts``. Receives the encoded reply after ``SendOnLane`` and ``SendOnGrpc``, an
address after ``FindLeader``, a text after ``ProbePort``; other results are ignored."""


def parse_addresses(address: str) -> tuple[str, ...]:
    """Parse ``host:port,...``; empty for ``etcd://...``. Raises InvalidArgumentError."""
    if address.startswith(ETCD_SCHEME):
        return ()
    return tuple(
        join_address(*split_address(part, default_port=DEFAULT_PORT)) for part in address.split(",")
    )


class MasterConnectionState:
    """State of the connection to the master, shared by all calls of a stub."""

    def __init__(self, address: str, *, lane: bool, rng: random.Random | None = None) -> None:
        self.addresses = parse_addresses(address)
        """Possible leaders; empty if etcd names the leader."""
        self.etcd = parse_etcd(address) if address.startswith(ETCD_SCHEME) else None
        self.alone = len(self.addresses) == 1
        self.shown = shown_place(address)
        self.joined: JoinReply | None = None
        self.current = False
        """Whether ``joined`` is assumed valid."""
        self.generation = 0
        """Incremented at each join and loss; connections of an earlier generation are closed."""
        self._address_index = 0
        self._leader = ""
        self._lane = lane
        self._lane_failures = 0  # since the last success
        self._lane_retry_at = 0.0
        self._lane_problem = ""
        self._warned = False
        self._random = rng or random.Random()  # noqa: S311  # jitter, no secret

    @property
    def address(self) -> str:
        """The master in use, or to try next; empty: etcd must be queried."""
        return self._leader or (self.addresses[self._address_index] if self.addresses else "")

    @property
    def epoch(self) -> int:
        return self.joined.epoch if self.joined is not None else 0

    def accept(self, joined: JoinReply, address: str) -> None:
        """Use the master at ``address`` after a join, despite other calls."""
        if address != self.address:
            self._leader = address
        before = self.joined
        if before is None or before.lane_token != joined.lane_token:
            self._lane_failures = 0
        self.joined = joined
        self.current = True
        self.generation += 1

    def on_master_lost(self, generation: int) -> None:
        """Record that the master joined in ``generation`` is unreachable or another one."""
        if self.current and self.generation == generation:
            self.current = False
            self.generation += 1

    def next_address(self, failed: str) -> None:
        """Select the next address after ``failed``, unless another call has done so or joined."""
        if self.current or self.address != failed:
            return
        if self._leader:
            self._leader = ""
        if self.addresses and self.addresses[self._address_index] == failed:
            self._address_index = (self._address_index + 1) % len(self.addresses)

    def follow(self, leader: str) -> None:
        """Select the ``leader`` that etcd or a standby has named, after ``on_master_lost``."""
        if not self.current:
            self._leader = leader

    def failover_timeout_s(self, request: Request) -> float:
        """Return the maximum silence of a master on ``request`` before another one is tried."""
        if self.alone:
            return math.inf
        if isinstance(request, PutStart | Allocate):
            return SILENCE_S + request.wait_ms / 1000
        if isinstance(request, PutEnd | Commit | Remove | Clear):
            return SILENCE_S + WIPES_S
        return SILENCE_S

    @property
    def is_lane_usable(self) -> bool:
        joined = self.joined
        if joined is None or not self._lane or self._lane_failures:
            return False
        return bool(joined.lane_port or joined.lane_unix)

    def should_retry_lane(self, now: float) -> bool:
        """Return whether the caller should try an unreachable lane now; True to one caller."""
        if not self._lane_failures or now < self._lane_retry_at:
            return False
        self._lane_retry_at = now + LANE_RETRY_MAX_S
        return True

    def on_lane_failed(self, now: float, error: Exception) -> None:
        self._lane_retry_at = now + min(2.0**self._lane_failures, LANE_RETRY_MAX_S)
        self._lane_failures += 1
        self._lane_problem = str(error)

    def on_lane_connected(self) -> None:
        self._lane_failures = 0

    def lane_warning(self) -> str | None:
        """Return the warning for a call that gRPC made instead of the lane; once per client."""
        if not self._lane_problem or self._warned:
            return None
        self._warned = True
        port = self.joined.lane_port if self.joined is not None else 0
        host, _ = split_address(self.address)
        return (
            f"lane unreachable, calls go over gRPC address={join_address(host, port)} "
            f"reason={self._lane_problem!r}"
        )

    def backoff_s(self, attempt: int) -> float:
        """Return the backoff after ``attempt`` failures, 1 or more: doubling, half of it random."""
        maximum = BACKOFF_MAX_S if self.alone else BACKOFF_SEVERAL_S
        longest: float = min(maximum, BACKOFF_FIRST_S * 2 ** min(attempt - 1, 16))
        return longest * (0.5 + 0.5 * self._random.random())

    def metadata(self, call: RpcMethod[Any, Any]) -> tuple[tuple[str, str | bytes], ...]:
        if self.joined is None or not call.lane:
            return ()
        return ((JOIN_METADATA, self.joined.lane_token),)


def attempts(
    link: MasterConnectionState,
    call: RpcMethod[Any, Any] | None,
    deadline: float,
    clock: Callable[[], float],
    broken: ConnectionBrokenError | NotLeaderError | None = None,
    started: float | None = None,
) -> Attempts:
    """Drive one call to its reply; see the module.

    Args:
        call: None: only joins, and returns nothing.
        broken: the error of an earlier attempt on the lane.
        started: the start of that attempt.

    Raises:
        KVStoreError: the master's error; MasterUnreachableError; DeadlineExceededError.
    """
    started = clock() if started is None else started
    failures = refusals = hops = 0
    reasons: dict[str, str] = {}
    identified: set[str] = set()
    epoch = link.epoch  # of the present attempt
    doubtful: int | None = None  # the epoch in which an attempt may have been executed
    while True:
        pause_s = 0.0
        joining = strange = False
        address, generation = link.address, link.generation
        try:
            if broken is not None:
                error, broken = broken, None
                raise error
            if not address:
                joining = True
                address = yield from _locate(link, deadline - clock())
                joining = False
            if (call is None or call.lane) and not link.current:
                joining = True
                yield _join(link, address, deadline - clock())
                joining = False
                generation = link.generation
            if call is None:
                return b""
            epoch = link.epoch  # another call may join again meanwhile
            if doubtful == epoch:
                raise _unknown_outcome_error(call, address, reasons)
            if call.lane and link.is_lane_usable:
                return cast(bytes, (yield SendOnLane()))
            return cast(bytes, (yield SendOnGrpc(address)))
        except TokenRefusedError as refused:
            refusals += 1
            if refusals > REFUSALS_MAX:
                link.on_lane_failed(clock(), refused)
                reasons[address] = str(refused)
                pause_s = link.backoff_s(refusals)
            link.on_master_lost(generation)
        except LaneUnreachableError as unreachable:
            link.on_lane_failed(clock(), unreachable)
        except ConnectionBrokenError as failure:
            failures += 1
            # A call that needs no join may be the first one.
            is_first = joining or link.joined is None
            strange = is_first and failure.strange and address not in identified
            if address not in identified:
                reasons[address] = failure.reason
            if failure.generation is not None:
                generation = failure.generation
            if failure.sent and call is not None and not joining and not call.idempotent:
                doubtful = epoch
            link.on_master_lost(generation)
            if failure.silent:
                link.next_address(address)
            elif joining or call is None or not call.lane:
                link.next_address(address)
                pause_s = link.backoff_s(failures)
            elif failures > 1:
                pause_s = link.backoff_s(failures - 1)
        except NotLeaderError as refusal:
            failures += 1
            reasons[address or link.shown] = refusal.message
            if call is not None and not joining and not call.idempotent:
                # A leader whose term ended while it executed the call replies so, too.
                doubtful = epoch
            link.on_master_lost(generation)
            link.next_address(address)
            leader = str(refusal.fields.get("leader", ""))
            if leader and leader != address:
                link.follow(leader)
                hops += 1
            if not leader or hops > HOPS_MAX:
                pause_s = link.backoff_s(failures)
        except UnavailableError as refusal:
            # A master that is a standby or is stopping refuses every join.
            if not joining or isinstance(refusal, DeadlineExceededError):
                harmless = joining or call is None or call.idempotent
                if reasons and harmless and isinstance(refusal, DeadlineExceededError):
                    # The last of several attempts reached the deadline.
                    raise _unreachable(link, reasons, failures, clock() - started) from None
                raise
            failures += 1
            if clock() < deadline or not reasons:  # an attempt that was cut short says less
                reasons[address or link.shown] = refusal.message
            link.next_address(address)
            pause_s = link.backoff_s(failures)
        left_s = deadline - clock()
        if strange and left_s >= ATTEMPT_S:
            what = yield ProbePort(address, min(ASK_S, left_s / 2))
            if what and what != GRPC:
                reasons[address] = NO_MASTER + what
                identified.add(address)
        now = clock()
        left_s = deadline - now
        if left_s < ATTEMPT_S or (link.alone and identified):
            raise _unreachable(link, reasons, failures, now - started)
        if pause_s:
            reason = reasons.get(address or link.shown, "") if now - started > LOG_WAIT_S else ""
            yield Backoff(min(pause_s, left_s / 2), reason)


def _locate(link: MasterConnectionState, left_s: float) -> Generator[Action, Any, str]:
    """Locate the leader. Raises NotLeaderError: no master leads."""
    assert link.etcd is not None, "where there are addresses, there is an address"
    leader = yield FindLeader(link.etcd, min(left_s, LOCATE_S))
    if not leader:
        raise NotLeaderError("no master leads now", leader="")
    link.follow(leader)
    return link.address or leader


def _join(link: MasterConnectionState, address: str, left_s: float) -> JoinAt:
    timeout_s = left_s if link.alone else min(left_s, JOIN_S)
    return JoinAt(address, timeout_s, link.generation)


def _unknown_outcome_error(
    call: RpcMethod[Any, Any], address: str, reasons: dict[str, str]
) -> MasterUnreachableError:
    return MasterUnreachableError(
        f"the connection to the master at {address} broke during {call.name} "
        f"({next(iter(reasons.values()), 'no reason given')}); the master may have "
        f"executed the call",
        advice="Repeat the whole operation.",
        address=address,
        sent=1,
    )


def _unreachable(
    link: MasterConnectionState, reasons: dict[str, str], attempts: int, waited_s: float
) -> MasterUnreachableError:
    tried = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
    return MasterUnreachableError(
        f"no master could be reached in {waited_s:.1f} s ({tried or link.shown})",
        advice=unreachable_advice(link.shown, reasons.values()),
        addresses=link.shown,
        attempts=attempts,
        waited_ms=round(waited_s * 1000),
    )


def deadline_error(link: MasterConnectionState, name: str) -> DeadlineExceededError:
    """Build the error of a call whose deadline passed without a reply."""
    return DeadlineExceededError(
        f"{name}: no reply from the master at {link.address or link.shown} before the deadline",
        advice=f"Check the master, or raise timeout_ms: kvstore doctor --master {link.shown}.",
        address=link.address or link.shown,
    )


def failover_error(generation: int) -> ConnectionBrokenError:
    """Build the error of a call with a silent master, on a connection of this generation."""
    error = ConnectionBrokenError(NO_REPLY, sent=True, silent=True)
    error.generation = generation
    return error


def grpc_failure(
    error: grpc.RpcError, link: MasterConnectionState, name: str, *, last: bool
) -> KVStoreError | ConnectionBrokenError | TokenRefusedError:
    """Classify a failed gRPC call. ``last``: it had all the remaining time of the call."""
    detail = detail_of(error)
    if detail is not None:
        reply = decode_error(detail)
        if isinstance(reply, PermissionDeniedError) and "join" in reply.fields:
            return TokenRefusedError(reply.message)
        return reply
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return (
            deadline_error(link, name)
            if last
            else ConnectionBrokenError(NO_REPLY, sent=True, silent=True)
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return ConnectionBrokenError(
            short_reason(details), sent=True, strange=is_protocol_mismatch(details)
        )
    return from_grpc(code, details, None)
