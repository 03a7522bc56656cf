"""A peer that speaks the protocol well and lies, beside an honest client: as a client on both
carriers, and as a node.

Whatever it says: the honest client finds what it has put, and can put more; no process ends, none
logs a traceback, no call hangs; and a master that is started again finds everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import calls
from kvstore.client.rpc.lane_client import LaneConnection, connect
from kvstore.errors import InternalError, KVStoreError
from kvstore.limits import PROTOCOL_VERSION
from kvstore.node.session import NodeStream
from kvstore.runtime.addresses import split_address
from kvstore.runtime.clock import uptime
from kvstore.runtime.host import host_id
from kvstore.wire.frames import ERROR
from kvstore.wire.messages import CALLS, JOIN_METADATA, decode_reply, encode_request
from kvstore.wire.status import decode_error, detail_of
from tests.support.cluster import Cluster
from tests.support.message_tampering import (
    MINE,
    ForeignValues,
    TamperedMessage,
    tampered_variants,
    true_calls,
    true_join,
    true_messages,
)
from tests.support.processes import free_port
from tests.support.wait import until

HONEST = "honest"
CHAIN = [bytes([number]) * 16 for number in range(1, 9)]
CALL_S = 2.0
"""How long the liar waits for an answer."""
HANGS_S = 8.0
"""No call of the honest client takes so long, on a busy machine."""


class HonestClient:
    """Puts before the lies, and finds it all after them."""

    def __init__(self, cluster: Cluster) -> None:
        self.client = cluster.client(namespace=HONEST, timeout_ms=10_000)
        self.far = cluster.client(namespace=HONEST, timeout_ms=10_000, transports=("tcp",))
        self.values = {f"object-{number}": bytes([number]) * 5_000 for number in range(8)}
        for key, value in self.values.items():
            self.client.put(key, value)
        self.client.put_chain(CHAIN, [key * 100 for key in CHAIN])
        self.client.pin(["object-0"], 600)
        self._number = itertools.count()

    def check(self, after: object) -> None:
        """All is there, and another put works, in time."""
        started = time.monotonic()
        fresh = f"fresh-{next(self._number)}"
        self.client.put(fresh, fresh.encode() * 10, wait_ms=6_000)  # a term may have ended
        for client in (self.client, self.far):
            assert client.get(fresh) == fresh.encode() * 10, after
            found = client.get_many(list(self.values))
            assert dict(zip(self.values, found, strict=True)) == self.values, after
        assert self.client.match_prefix(CHAIN) == len(CHAIN), after
        assert self.client.get(CHAIN[-1]) == CHAIN[-1] * 100, after
        self.client.remove(fresh)
        assert self.client.get(fresh) is None, after
        assert time.monotonic() - started < HANGS_S, after

    def theirs(self, cluster: Cluster) -> ForeignValues:
        """What a liar would claim of it."""
        status = cluster.status()
        segments = [segment for node in status.nodes for segment in node.segments]
        described = describe(cluster, [each.segment_id for each in segments])
        return ForeignValues(
            keys=[b"object-0", CHAIN[0]],
            namespaces=[HONEST],
            numbers=[status.epoch, status.epoch + 1, 3] + [each.segment_id for each in segments],
            texts=[node.name for node in status.nodes]
            + [node.address for node in status.nodes]
            + [each.shm_name for each in segments]
            + [host_id()],
            blobs=[each.uuid for each in described] + [each.token for each in described],
        )


class RawRpcSender:
    """Sends what a stub never would."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.host, _ = split_address(address)
        join = calls.Join(MINE, "host", PROTOCOL_VERSION)
        joined = self.by_grpc(join)
        assert isinstance(joined, calls.JoinReply)
        self.joined = joined
        self._lane: LaneConnection | None = None

    def close(self) -> None:
        self._forget()
        self.channel.close()

    def by_grpc(self, asked: calls.Request) -> calls.Reply:
        """Raises KVStoreError; grpc.RpcError: no answer."""
        call = CALLS[type(asked)]
        send: Any = self.channel.unary_unary(call.path)
        token = getattr(self, "joined", None)
        metadata = () if token is None else ((JOIN_METADATA, token.lane_token),)
        try:
            answer = send(encode_request(asked), timeout=CALL_S, metadata=metadata)
        except grpc.RpcError as error:
            detail = detail_of(error)
            if detail is None:
                raise
            raise decode_error(detail) from None
        return decode_reply(call, answer)

    def by_lane(self, asked: calls.Request) -> calls.Reply:
        """Raises KVStoreError; anything else: no answer."""
        call = CALLS[type(asked)]
        if self._lane is None:
            self._lane = connect(self.joined, self.host, uptime() + 5, 0.0, 0)
            self._lane.handshake(self.joined, uptime() + 5)
        try:
            _, kind, _, raw = self._lane.exchange(
                call.wire_name, encode_request(asked), uptime() + CALL_S, spin=False
            )
        except BaseException:
            self._forget()
            raise
        if kind == ERROR:
            raise decode_error(raw)
        return decode_reply(call, raw)

    def _forget(self) -> None:
        if self._lane is not None:
            self._lane.close()
            self._lane = None


def describe(cluster: Cluster, segment_ids: list[int]) -> Sequence[calls.SegmentInfo]:
    with contextlib.closing(RawRpcSender(cluster.address)) as peer:
        described = peer.by_grpc(calls.DescribeSegments(segment_ids))
    assert isinstance(described, calls.DescribeSegmentsReply)
    return described.segments


def allowed(lie: TamperedMessage, node: str) -> bool:
    """Whether every caller may say so, until callers have identities: it is no lie."""
    message, field, value = lie
    match message:
        case calls.Clear():
            return field == "namespace" and value in ("", HONEST)
        case calls.Drain():
            return field == "node" and value == node
        case calls.NodeJoin():
            # What was removed while other memory was away, memory alone remembers: so any
            # node may say that others were away.
            return field.startswith("segments.0.removal_watermark")
    return False


def may_wait(lie: TamperedMessage) -> bool:
    """Whether the answer may come later than the liar waits."""
    return lie.field == "wait_ms" or isinstance(lie.message, calls.Remove | calls.Clear)


@pytest.fixture
def honest(cluster: Cluster) -> HonestClient:
    cluster.settings["http_port"] = free_port()
    cluster.start(nodes=1)
    honest = HonestClient(cluster)
    honest.check("nothing")
    return honest


def starts_again(cluster: Cluster, honest: HonestClient) -> None:
    """A killed master finds everything: nothing that a liar said has stayed in memory."""
    cluster.master_server.kill()
    cluster.master()
    until(lambda: {node.state for node in cluster.status().nodes} == {"alive"}, within_s=30)
    until(lambda: honest.client.get("object-0") is not None, within_s=30)
    honest.check("the master was started again")


@pytest.mark.parametrize("carrier", ["grpc", "lane"])
def test_a_client_that_lies(cluster: Cluster, honest: HonestClient, carrier: str) -> None:
    theirs = honest.theirs(cluster)
    node = cluster.nodes[0].name
    peer = RawRpcSender(cluster.address)
    ask = peer.by_grpc if carrier == "grpc" else peer.by_lane
    try:
        for true in true_calls():
            call = CALLS[type(true)]
            if carrier == "lane" and isinstance(true, calls.Join):
                continue  # a lane has joined
            for lie in tampered_variants(true, theirs):
                if allowed(lie, node):
                    continue
                with contextlib.suppress(KVStoreError):
                    encode_request(lie.message)
                    answered(ask, lie)
            honest.check(call.name)
    finally:
        peer.close()
    starts_again(cluster, honest)


def answered(ask: Callable[[calls.Request], calls.Reply], lie: TamperedMessage) -> None:
    """Whatever is sent has an answer: a reply, or an error that is not ours."""
    try:
        ask(lie.message)
    except InternalError as error:
        pytest.fail(f"{lie}: {error}")
    except KVStoreError:
        pass
    except (TimeoutError, grpc.RpcError) as error:
        code = error.code() if isinstance(error, grpc.Call) else None
        is_late = isinstance(error, TimeoutError) or code is grpc.StatusCode.DEADLINE_EXCEEDED
        if not is_late or not may_wait(lie):
            pytest.fail(f"{lie}: {error!r}")


def outcome(cluster: Cluster, *messages: calls.NodeMessage) -> str:
    """Sends these messages as a node; the name of the error that ends the stream."""

    async def session() -> None:
        async with NodeStream(cluster.address) as stream:
            await stream.connect("liar", "host", CALL_S)
            for message in messages:
                await stream.send(message)
            await asyncio.sleep(0.02)  # the stream stays open while the master answers
            await stream.done_sending()
            while True:
                await asyncio.wait_for(stream.receive(), CALL_S)

    try:
        asyncio.run(session())
    except KVStoreError as error:
        return type(error).__name__
    raise AssertionError("it goes on for ever")


def test_a_node_that_lies_at_its_join(
    cluster: Cluster, honest: HonestClient, tmp_path: Path
) -> None:
    theirs = honest.theirs(cluster)
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched" * 10_000)
    before = victim.read_bytes()
    with victim.open("r+b") as opened:
        place = f"{os.getpid()}/{opened.fileno()}/{1 << 20}"
        for device in (None, calls.DeviceLocation("cuda:0", "kvstore.liar", place)):
            true = true_join("liar-node", host_id(), device=device, fresh=False)
            told = [lie for lie in tampered_variants(true, theirs) if not allowed(lie, "")]
            for number, lie in enumerate(told):
                assert outcome(cluster, lie.message) != "InternalError", lie
                if number % 20 == 0:
                    honest.check(str(lie))
        assert victim.read_bytes() == before
    honest.check("joins")
    starts_again(cluster, honest)


def test_a_node_that_lies_afterwards(cluster: Cluster, honest: HonestClient) -> None:
    """Claims of what others have, of versions to come, and numbers that index nothing."""
    theirs = honest.theirs(cluster)
    join = true_join("liar-node", "elsewhere", fresh=False)
    for true in true_messages():
        for lie in [TamperedMessage(true, "", "true"), *tampered_variants(true, theirs)]:
            assert outcome(cluster, join, lie.message) != "InternalError", lie
        honest.check(type(true).__name__)
    starts_again(cluster, honest)
