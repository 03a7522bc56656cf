"""The simulated client: the production flows, carried out step by step in virtual time.

What is production code here: the flows, ``attempts`` (when a call is
sent again), the encoders, the caches. What is simulated: sockets, shared memory and the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from random import Random
from typing import Any, TypeVar, cast

import numpy as np

from kvstore import calls
from kvstore.calls import SegmentInfo, Version
from kvstore.client.devices import ClientDevices
from kvstore.client.flows.location_cache import PlacementCache, SegmentTable
from kvstore.client.flows.steps import CallMaster, Context, Flow, SleepFor, Transfer, WaitForDevice
from kvstore.client.leases.grants_ahead import GrantsAhead
from kvstore.client.leases.lease_table import Lease, Mounted, ObjectLease
from kvstore.client.leases.read_leases import IDLE_S, ReadLeases
from kvstore.client.rpc import retries
from kvstore.client.rpc.retries import ConnectionBrokenError, MasterConnectionState, attempts
from kvstore.config import ClientConfig
from kvstore.errors import (
    DeadlineExceededError,
    InvalidRangeError,
    KVStoreError,
    NodeUnreachableError,
    PermissionDeniedError,
)
from kvstore.limits import PROTOCOL_VERSION
from kvstore.memory.header import EXTENT_ALIGN, HEADER_BYTES, unpack
from kvstore.transport.common import RangeCopy, check_moves, deadline_exceeded, segment_unmounted
from kvstore.transport.tcp_client import CONNECT_STALLS
from kvstore.wire.messages import CALLS, RpcMethod, decode_reply, encode_request
from kvstore.wire.status import decode_error
from tests.simulation.memory import Memory
from tests.simulation.network import BrokenStreamError, End, Network
from tests.simulation.oracle import ExpectedBytes, Oracle, View
from tests.simulation.scheduler import Process, TimedOutError
from tests.simulation.views import LeaseSnapshot, SimViews
from tests.support.range_copies import moves_of

ResultT = TypeVar("ResultT")

TokenRefusedError = retries.TokenRefusedError
CARRIER_ERRORS = (
    KVStoreError, ConnectionBrokenError, retries.LaneUnreachableError, TokenRefusedError,
)  # fmt: skip


LEASE_MARGIN_S = 0.04
STALL_S = 0.2
CONNECT_S = STALL_S * CONNECT_STALLS
"""As ``transport.tcp_client`` has them, in the simulation's times."""


class SimLink(MasterConnectionState):
    """As ``MasterConnectionState``, in the simulation's times."""

    def failover_timeout_s(self, request: calls.Request) -> float:
        return super().failover_timeout_s(request) / 5


class Client:
    """One client process; several of its operations may be under way at once."""

    def __init__(
        self, process: Process, network: Network, oracle: Oracle, *,
        memories: Callable[[bytes], Memory | None], piece_bytes: int,
        piece_us: tuple[int, int], rate: float, config: ClientConfig,
        call_ids: Iterator[int], masters: str = "master:1",
    ) -> None:  # fmt: skip
        """
        Args:
            memories: the segment of that uuid, if it is mapped by somebody still.
            piece_us: between two pieces of a transfer, from and to.
            rate: of its clock against the true one; the lease margin has to cover it.
        """
        self.process = process
        self.oracle = oracle
        self.config = config
        self.die_after_pieces = 0
        """Dies when it has moved so many more pieces; 0: does not."""
        self._network = network
        self._memories = memories
        self._piece_bytes = piece_bytes
        self.piece_us = piece_us
        self._rate = rate
        self._call_ids = call_ids
        self._random = Random(process.scheduler.random.getrandbits(32))
        self._clock_offset = self._random.uniform(0, 1000)
        self._mapped: dict[bytes, Memory] = {}
        self._released_again: list[int] = []
        """Leases to release late, or again."""
        self._tokens: dict[tuple[int, int], Version] = {}
        """What was granted to us, by segment and offset."""
        self._join = calls.Join(process.name, process.host, PROTOCOL_VERSION)
        self._link = SimLink(masters, lane=True, rng=self._random)
        self.views = SimViews(self.ask_within, lease_margin_s=LEASE_MARGIN_S, clock=self.clock)
        self.views.watch = self.watch
        self.context = Context(
            clock=self.clock,
            host=process.host,
            client_number=process.scheduler.random.getrandbits(63) + 1,
            segments=SegmentTable(self.clock),
            placements=PlacementCache(config.placements_max, self.clock),
            leases=ReadLeases(
                config.placements_max, self.clock, process.scheduler.random.getrandbits(60) + 1
            ),
            pool=cast(Any, self),
            views=cast(Any, self.views),
            lease_margin_s=LEASE_MARGIN_S,
            verify_payload=True,
            counters={},
            failover_s=0.6,
            ahead=GrantsAhead(),
        )
        self.devices = ClientDevices()
        oracle.clients[process.name] = self
        process.on_death[self] = self._forget
        process.spawn("renew", self._renew_forever())
        process.spawn("release", self._release_forever())

    def _forget(self) -> None:
        self.oracle.clients.pop(self.process.name)

    def clock(self) -> float:
        return self._clock_offset + self.process.scheduler.now_us * self._rate / 1e6

    def _us(self, seconds: float) -> int:
        """How long so many seconds of our clock take."""
        return max(0, int(seconds * 1e6 / self._rate) + 1)

    async def sleep(self, seconds: float) -> None:
        await self.process.sleep(self._us(seconds))

    # --- flows --------------------------------------------------------------------------------

    async def run(self, flow: Flow[ResultT]) -> ResultT:
        """As ``Client._run``."""
        timeout_s = self.config.timeout_ms / 1000
        deadline = self.clock() + timeout_s
        try:
            step = next(flow)
            while True:
                outcome: object
                try:
                    if isinstance(step, CallMaster):
                        outcome = await self.call(self._carried(step.request), deadline)
                    elif isinstance(step, SleepFor):
                        outcome = None
                        if deadline - self.clock() <= step.seconds:
                            raise DeadlineExceededError(f"{timeout_s:.1f} s were not enough")
                        await self.sleep(step.seconds)
                    else:
                        assert not isinstance(step, WaitForDevice)  # there are no devices here
                        outcome = await self._move(step, deadline)
                except KVStoreError as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as done:
            result: ResultT = done.value
            return result

    def _carried(self, request: calls.Request) -> calls.Request:
        """The request; sometimes it releases a lease late, or twice."""
        released = list(getattr(request, "released", ()))
        for number in released:
            draw = self._random.random()
            if draw < 0.1:
                self._released_again.append(number)
            if draw < 0.05:
                request = cast(calls.Lookup, request)._replace(
                    released=[each for each in released if each != number]
                )
        if self._released_again and hasattr(request, "released") and self._random.random() < 0.1:
            again = [*cast(calls.Lookup, request).released, self._released_again.pop()]
            request = cast(calls.Lookup, request)._replace(released=again)
        return request

    async def ask_within(self, request: calls.Request, seconds: float) -> calls.Reply:
        return await self.call(request, self.clock() + seconds)

    # --- calls --------------------------------------------------------------------------------

    async def call(self, request: calls.Request, deadline: float) -> calls.Reply:
        """As ``MasterStub.call``."""
        call = CALLS[type(request)]
        payload = encode_request(request)
        flow = attempts(self._link, call, deadline, self.clock)
        call_id = 0
        data = b""
        try:
            step = next(flow)
            while True:
                try:
                    if isinstance(step, retries.JoinAt):
                        await self._join_at(step, deadline)
                        outcome = None
                    elif isinstance(step, retries.Backoff):
                        await self.sleep(step.seconds)
                        outcome = None
                    else:
                        assert not isinstance(step, retries.FindLeader), "they are listed"
                        port, address = "lane", self._link.address
                        if isinstance(step, retries.SendOnGrpc):
                            port, address = "grpc", step.address
                        until = min(deadline, self.clock() + self._link.failover_timeout_s(request))
                        call_id = next(self._call_ids)
                        await self.process.reached(f"client: before {call.name}")
                        outcome = await self._exchange(
                            address, port, call_id, call, payload, until, last=until == deadline
                        )
                        await self.process.reached(f"client: after {call.name}")
                except CARRIER_ERRORS as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as done:
            data = done.value
        reply = decode_reply(call, data)
        self.oracle.acknowledged(call_id, reply)
        if isinstance(reply, calls.Grants):
            for index, (segment, offset) in enumerate(
                zip(reply.segments, reply.offsets, strict=True)
            ):
                token = reply.tokens[index // reply.replicas]
                self._tokens[segment, offset] = Version(reply.epoch, token)
        if isinstance(reply, calls.CommitReply) and reply.next_token:
            place = reply.next_segment, reply.next_offset
            epoch = cast(calls.Commit, request).epoch
            self._tokens[place] = Version(epoch, reply.next_token)
            self.oracle.count("granted_ahead")
        if isinstance(reply, calls.StartMovesReply):
            grants, sources = reply.grants, reply.sources
            copied = [Version(grants.epoch, token) for token in grants.tokens]
            if reply.keeps_version:
                copied = list(map(Version, sources.epochs, sources.counters))
            for index, place in enumerate(zip(grants.segments, grants.offsets, strict=True)):
                self._tokens[place] = copied[index // grants.replicas]
        return reply

    async def _join_at(self, step: retries.JoinAt, deadline: float) -> None:
        if self._link.generation != step.generation:
            return
        patience_s = step.timeout_s if self._link.alone else step.timeout_s / 5
        until = min(deadline, self.clock() + patience_s)
        payload = encode_request(self._join._replace(highest_epoch=self._link.epoch))
        last = until == deadline
        data = await self._exchange(
            step.address, "join", 0, CALLS[calls.Join], payload, until, last=last
        )
        joined = decode_reply(CALLS[calls.Join], data)
        assert isinstance(joined, calls.JoinReply)
        self._link.accept(joined, step.address)

    async def _exchange(
        self, address: str, port: str, call_id: int, call: RpcMethod[Any, Any], payload: bytes,
        deadline: float, *, last: bool = True,
    ) -> bytes:  # fmt: skip
        joined = self._link.joined
        token = None if port == "join" or joined is None or not call.lane else joined.lane_token
        generation = self._link.generation
        master = address.partition(":")[0]
        if call.idempotent and token is not None:
            self._network.duplicate(self.process, master, port, (0, call.wire_name, payload, token))
        end = self._network.connect(self.process, master, port)
        try:
            end.send((call_id, call.wire_name, payload, token))
            kind, data = await end.receive(self._us(deadline - self.clock()))
        except TimedOutError:
            if not last:
                silent = ConnectionBrokenError("no answer in time", sent=True, silent=True)
                silent.generation = generation if port == "lane" else None
                raise silent from None
            raise retries.deadline_error(self._link, call.name) from None
        except BrokenStreamError:
            broken = ConnectionBrokenError("the connection broke", sent=True)
            broken.generation = generation if port == "lane" else None
            raise broken from None
        finally:
            end.close()
        if kind == "reply":
            return cast(bytes, data)
        error = decode_error(data)
        if kind == "refused" or (
            isinstance(error, PermissionDeniedError) and error.fields.get("join")
        ):
            raise TokenRefusedError(str(error))
        raise error

    # --- moving bytes -------------------------------------------------------------------------

    async def _move(
        self, transfers: Sequence[Transfer], deadline: float
    ) -> list[KVStoreError | None]:
        """As ``TransportSelector.move``: all segments at the same time."""
        tasks = [
            self.process.spawn(f"move{index}", self._move_one(transfer, deadline))
            for index, transfer in enumerate(transfers)
        ]
        return [await task.result for task in tasks]

    async def _move_one(self, transfer: Transfer, deadline: float) -> KVStoreError | None:
        if transfer.deadline is not None:
            deadline = min(deadline, transfer.deadline)
        segment = transfer.segment
        try:
            check_moves(segment, list(moves_of(transfer)))
            memory = self._mapping(segment)
            if memory is not None:
                await self._shm(transfer, memory, deadline)
            elif "tcp" not in self.config.transports:
                raise NodeUnreachableError("no transport reaches it", quiesced=1)
            elif transfer.write:
                await self._tcp_write(transfer, deadline)
            else:
                await self._tcp_read(transfer, deadline)
        except KVStoreError as error:
            self._mapped.pop(segment.uuid, None)
            return error
        return None

    async def _shm(self, transfer: Transfer, memory: Memory, deadline: float) -> None:
        segment = transfer.segment
        for move, version in self._versions(transfer):
            self._watch_header(transfer, move)
            for offset, piece in self._pieces(move):
                if memory.generation != segment.generation:
                    raise segment_unmounted(segment)
                if self.clock() >= deadline:
                    raise deadline_exceeded(segment)
                if transfer.write:
                    self.oracle.write(memory, offset, piece, version)
                else:
                    piece[:] = memory.memory[offset : offset + len(piece)]
                if move.hasher is not None:
                    move.hasher.update(piece)
                await self._between_pieces(_what(transfer, move))

    async def _greeted(self, end: End, segment: SegmentInfo, deadline: float) -> int:
        """Say hello; returns the number of the connection."""
        number = self._random.getrandbits(63) + 1
        writer = self.context.client_number, number
        end.send((segment.uuid, segment.generation, writer))
        until = min(deadline, self.clock() + CONNECT_S)
        try:
            if await end.receive(self._us(until - self.clock())) != "ok":
                raise segment_unmounted(segment)
        except TimedOutError:
            if until == deadline:
                raise
            raise NodeUnreachableError("no connection in time", quiesced=1, silent_ms=1) from None
        return number

    async def _next(self, end: End, deadline: float) -> Any:
        """As ``end.receive``, for as long as bytes move.

        Raises:
            BrokenStreamError, TimedOutError, NodeUnreachableError
        """
        stall_us = self._us(STALL_S)
        while True:
            sent = len(end.outgoing)
            left_us = self._us(deadline - self.clock())
            try:
                return await end.receive(min(left_us, stall_us))
            except TimedOutError:
                if left_us <= stall_us:
                    raise
            if len(end.outgoing) == sent:
                raise NodeUnreachableError("no byte moved", quiesced=0, silent_ms=1)

    async def _tcp_write(self, transfer: Transfer, deadline: float) -> None:
        segment = transfer.segment
        count = sum(1 for move in moves_of(transfer) for _ in self._pieces(move))
        end = self._network.connect(self.process, segment.node, "data")
        number = 0
        try:
            number = await self._greeted(end, segment, deadline)
            end.send(("write", count))
            for move, version in self._versions(transfer):
                self._watch_header(transfer, move)
                for offset, piece in self._pieces(move):
                    if self.clock() >= deadline:
                        raise TimedOutError
                    if move.hasher is not None:
                        move.hasher.update(piece)
                    end.send((offset, bytes(piece), version))
                    await self._between_pieces(_what(transfer, move))
            status = await self._next(end, deadline)
            if status != "ok":
                raise segment_unmounted(segment)
            end.close()
        except NodeUnreachableError as stalled:
            if not stalled.fields["quiesced"]:
                stalled.fields["connection"] = number
            raise
        except BrokenStreamError:
            raise NodeUnreachableError(
                "the connection broke", quiesced=int(not number), connection=number
            ) from None
        except TimedOutError:
            late = deadline_exceeded(segment, quiesced=int(not number))
            late.fields["connection"] = number
            raise late from None
        finally:
            if not end.closed:
                end.reset()

    async def _tcp_read(self, transfer: Transfer, deadline: float) -> None:
        segment = transfer.segment
        end = self._network.connect(self.process, segment.node, "data")
        try:
            await self._greeted(end, segment, deadline)
            ranges = [(move.offset, len(move.buffer)) for move in moves_of(transfer)]
            end.send(("read", ranges))
            for move in moves_of(transfer):
                for _, piece in self._pieces(move):
                    data = await self._next(end, deadline)
                    if data == "gone":
                        raise segment_unmounted(segment)
                    piece[:] = data
                    if move.hasher is not None:
                        move.hasher.update(piece)
        except BrokenStreamError:
            raise NodeUnreachableError("the connection broke", quiesced=1) from None
        except TimedOutError:
            raise deadline_exceeded(segment) from None
        finally:
            end.close()

    def _mapping(self, segment: SegmentInfo) -> Memory | None:
        """As ``ShmTransport``: the segment, where we have it mapped or can map it."""
        if "shm" not in self.config.transports or segment.host != self.process.host:
            return None
        memory = self._mapped.get(segment.uuid)
        if memory is None:
            memory = self._memories(segment.uuid)
            if memory is None or not memory.linked:
                return None
            self._mapped[segment.uuid] = memory
        return memory

    def _pieces(self, move: RangeCopy) -> Iterator[tuple[int, memoryview]]:
        for start in range(0, len(move.buffer), self._piece_bytes):
            yield move.offset + start, move.buffer[start : start + self._piece_bytes]

    def _versions(self, transfer: Transfer) -> Iterator[tuple[RangeCopy, Version]]:
        """The moves, each with the version of the grant that it belongs to."""
        version = Version(0, 0)
        segment_id = transfer.segment.segment_id
        for move in moves_of(transfer):
            if move.hasher is None:  # a header, its wiping or its stamp: not payload
                place = move.offset & -EXTENT_ALIGN
                version = self._tokens.get((segment_id, place), version)
            yield move, version

    def _watch_header(self, transfer: Transfer, move: RangeCopy) -> None:
        if transfer.write and len(move.buffer) == HEADER_BYTES:
            header = unpack(move.buffer, transfer.segment.seed, move.offset)
            if header is not None:
                self.oracle.sealed(header)

    async def _between_pieces(self, what: str = "payload") -> None:
        await self.process.reached(f"client: {what} written")
        if self.die_after_pieces:
            self.die_after_pieces -= 1
            if not self.die_after_pieces:
                self.oracle.note(f"{self.process.name} dies between two pieces")
                self.process.scheduler.after(0, "die", self.process.kill)
        await self.process.sleep(self._random.randint(*self.piece_us))

    # --- zero copy ----------------------------------------------------------------------------

    def view(self, segment: SegmentInfo, offset: int, length: int) -> memoryview | None:
        """As ``TransportSelector.view``."""
        memory = self._mapping(segment)
        if memory is None:
            return None
        if offset + length > memory.size:
            raise InvalidRangeError("outside")
        if memory.generation != segment.generation:
            raise segment_unmounted(segment)
        self._note_mapped(memory)
        return memory.memory[offset : offset + length]

    def maps(self, segment: SegmentInfo) -> bool:
        """As ``TransportSelector.maps``."""
        return self._mapping(segment) is not None

    def readonly_memory(self, segment: SegmentInfo) -> memoryview | None:
        """As ``TransportSelector.readonly_memory``."""
        memory = self._mapping(segment)
        return None if memory is None else memory.memory

    def memory(self, segment: SegmentInfo) -> memoryview:
        """As ``TransportSelector.memory``."""
        memory = self._mapping(segment)
        if memory is None or memory.generation != segment.generation:
            raise segment_unmounted(segment)
        self._note_mapped(memory)
        return memory.memory

    def _note_mapped(self, memory: Memory) -> None:
        address = int(np.frombuffer(memory.memory, np.uint8).ctypes.data)
        self.views.mapped[address] = (memory.uuid, memory.size)

    def watch(self, segment: SegmentInfo) -> Mounted:
        """As ``TransportSelector.watch``."""
        memory = self._mapping(segment)
        return lambda: memory is not None and memory.generation == segment.generation

    async def compute(self, lease: Lease, data: bytes) -> bool:
        """As a program that fills its allocation and asks now and then whether it is its own;
        returns whether all of it was written."""
        granted = lease.what
        assert not isinstance(granted, ObjectLease)
        version = Version(granted.epoch, granted.token)
        place = self.views.place(lease)
        memory = self._memories(place.uuid)
        assert memory is not None
        for start in range(0, len(data), self._piece_bytes):
            if not lease.is_held:
                return False
            offset = place.offset + HEADER_BYTES + start
            piece = data[start : start + self._piece_bytes]
            self.oracle.write(memory, offset, piece, version, by_hand=True)
            await self.sleep(self._random.choice((0.001, 0.01, 0.2)))
        return lease.is_held

    async def _renew_forever(self) -> None:
        while True:
            await self.sleep(self.views.pause_s())
            await self.views.renew()

    async def _release_forever(self) -> None:
        assert self.context.ahead is not None
        while True:
            await self.sleep(IDLE_S)
            for held in (self.context.leases, self.context.ahead):
                if held and held.due_at() <= self.clock():
                    for request in held.give_back():
                        with suppress(KVStoreError):
                            await self.ask_within(request, 1.0)

    # --- what the oracle asks -----------------------------------------------------------------

    def believed(self) -> Iterator[ExpectedBytes]:
        now = self.clock()
        for placed in self.context.placements._placed.values():
            if placed.until > now:
                for segment, offset, _ in placed.replicas:
                    yield ExpectedBytes(
                        self.process.name, "leased", segment.uuid, offset,
                        HEADER_BYTES + placed.size, Version(placed.epoch, placed.counter),
                    )  # fmt: skip
        for _, held in self.views.held():
            yield self._promise(held)

    def views_on(self, uuid: bytes) -> Iterator[View]:
        for _, held in self.views.held():
            if held.uuid == uuid and isinstance(held.what, ObjectLease):
                data = memoryview(held.array)  # type: ignore[arg-type]
                yield View(self._promise(held), data, held.snapshot)

    def _promise(self, held: LeaseSnapshot) -> ExpectedBytes:
        if isinstance(held.what, ObjectLease):
            what, version = "view", Version(held.what.epoch, held.what.counter)
        else:
            what, version = "allocation", Version(held.what.epoch, held.what.token)
        length = HEADER_BYTES + held.array.nbytes
        return ExpectedBytes(self.process.name, what, held.uuid, held.offset, length, version)


def _what(transfer: Transfer, move: RangeCopy) -> str:
    """Of which part of an object this is, for the names of steps."""
    if not transfer.write:
        return "nothing"
    if move.hasher is not None:
        return "payload"
    return "wiping" if len(move.buffer) < HEADER_BYTES else "header"
