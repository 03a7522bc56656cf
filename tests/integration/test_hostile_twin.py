"""A peer that speaks the protocol well and lies, beside an honest client: as a client on both
carriers, as a node, as the master of a node, on a node's data port, over HTTP and on the ports of
events.

Whatever it says: the honest client finds what it has put, and can put more; no process ends, none
logs a traceback, no call hangs; and a master that is started again finds everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import zmq

from kvstore import calls
from kvstore.client.calling.lane import LaneConnection, connect
from kvstore.clocks import uptime
from kvstore.errors import InternalError, KVStoreError
from kvstore.limits import PROTOCOL_VERSION
from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.memory.segment import NodeSegment
from kvstore.network import tcp_protocol as data
from kvstore.network.addresses import split_address
from kvstore.network.host import host_id
from kvstore.node.agent import NodeAgent
from kvstore.transport.tcp_server import DataServer
from kvstore.wire.frames import ERROR
from kvstore.wire.messages import CALLS, JOIN_METADATA, decode_reply, encode_request
from kvstore.wire.node_messages import SESSION_PATH, encode_node_message
from kvstore.wire.status import decode_error, detail_of
from tests.conformance.carrier_peers import ScriptedService, Server
from tests.support.cluster import Cluster
from tests.support.http import request
from tests.support.processes import free_port
from tests.support.twin import (
    MINE,
    NUMBERS,
    TEXTS,
    Lie,
    Theirs,
    false_ranges,
    lies,
    true_calls,
    true_join,
    true_messages,
    true_order,
)
from tests.support.waiting import until

HONEST = "honest"
CHAIN = [bytes([number]) * 16 for number in range(1, 9)]
CALL_S = 2.0
"""How long the liar waits for an answer."""
HANGS_S = 8.0
"""No call of the honest client takes so long, on a busy machine."""


class Honest:
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

    def theirs(self, cluster: Cluster) -> Theirs:
        """What a liar would claim of it."""
        status = cluster.status()
        segments = [segment for node in status.nodes for segment in node.segments]
        described = describe(cluster, [each.segment_id for each in segments])
        return Theirs(
            keys=[b"object-0", CHAIN[0]],
            namespaces=[HONEST],
            numbers=[status.epoch, status.epoch + 1, 3] + [each.segment_id for each in segments],
            texts=[node.name for node in status.nodes]
            + [node.address for node in status.nodes]
            + [each.shm_name for each in segments]
            + [host_id()],
            blobs=[each.uuid for each in described] + [each.token for each in described],
        )


class Carrier:
    """Sends what a stub never would."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address)
        self.host, _ = split_address(address)
        join = calls.Join(MINE, "host", PROTOCOL_VERSION)
        joined = self.by_grpc(join)
        assert isinstance(joined, calls.Joined)
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
            self._lane.greet(self.joined, uptime() + 5)
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
    with contextlib.closing(Carrier(cluster.address)) as peer:
        described = peer.by_grpc(calls.DescribeSegments(segment_ids))
    assert isinstance(described, calls.Segments)
    return described.segments


def allowed(lie: Lie, node: str) -> bool:
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
            return field.startswith("segments.0.mark")
    return False


def may_wait(lie: Lie) -> bool:
    """Whether the answer may come later than the liar waits."""
    return lie.field == "wait_ms" or isinstance(lie.message, calls.Remove | calls.Clear)


@pytest.fixture
def honest(cluster: Cluster) -> Honest:
    cluster.settings["http_port"] = free_port()
    cluster.start(nodes=1)
    honest = Honest(cluster)
    honest.check("nothing")
    return honest


def starts_again(cluster: Cluster, honest: Honest) -> None:
    """A killed master finds everything: nothing that a liar said has stayed in memory."""
    cluster.master_server.kill()
    cluster.master()
    until(lambda: {node.state for node in cluster.status().nodes} == {"alive"}, within_s=30)
    until(lambda: honest.client.get("object-0") is not None, within_s=30)
    honest.check("the master was started again")


@pytest.mark.parametrize("carrier", ["grpc", "lane"])
def test_a_client_that_lies(cluster: Cluster, honest: Honest, carrier: str) -> None:
    theirs = honest.theirs(cluster)
    node = cluster.nodes[0].name
    peer = Carrier(cluster.address)
    ask = peer.by_grpc if carrier == "grpc" else peer.by_lane
    try:
        for true in true_calls():
            call = CALLS[type(true)]
            if carrier == "lane" and isinstance(true, calls.Join):
                continue  # a lane has joined
            for lie in lies(true, theirs):
                if allowed(lie, node):
                    continue
                with contextlib.suppress(KVStoreError):
                    encode_request(lie.message)
                    answered(ask, lie)
            honest.check(call.name)
    finally:
        peer.close()
    starts_again(cluster, honest)


def answered(ask: Callable[[calls.Request], calls.Reply], lie: Lie) -> None:
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


def test_pins_of_many_namespaces_leave_room(cluster: Cluster, honest: Honest) -> None:
    """A bound for each namespace is none: the liar has as many as it wants."""
    for number in range(12):
        liar = cluster.client(namespace=f"pins-{number}", timeout_ms=3_000)
        names = [f"{number}-{each}" for each in range(6)]
        with contextlib.suppress(KVStoreError):
            liar.put_many({name: bytes(1 << 20) for name in names})
            liar.pin(names, 86_400)
        honest.client.get_many(list(honest.values))  # so that it is not the least recently used
        assert honest.client.match_prefix(CHAIN) == len(CHAIN)
    honest.client.put("large", bytes(4 << 20))
    assert honest.client.get("large") == bytes(4 << 20)
    honest.check("pins")


class FalseNode:
    """One stream of a node; ``said`` counts what the master has answered."""

    def __init__(self, channel: grpc.Channel, join: calls.NodeJoin) -> None:
        session: Any = channel.stream_stream(SESSION_PATH)
        self._to_send: list[bytes] = [encode_node_message(join)]
        self.stream = session(self._sent(), timeout=CALL_S)
        self.accepted = False

    def _sent(self) -> Iterator[bytes]:
        while self._to_send:
            yield self._to_send.pop(0)
        time.sleep(0.02)  # the stream stays open while the master answers

    def then(self, *messages: calls.NodeMessage) -> None:
        self._to_send += [encode_node_message(each) for each in messages]

    def outcome(self) -> str:
        """Raises nothing: what became of it."""
        try:
            for _ in self.stream:
                self.accepted = True
        except grpc.RpcError as error:
            detail = detail_of(error)
            return "" if detail is None else type(decode_error(detail)).__name__
        return "ended"


def test_a_node_that_lies_at_its_join(cluster: Cluster, honest: Honest, tmp_path: Path) -> None:
    theirs = honest.theirs(cluster)
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched" * 10_000)
    before = victim.read_bytes()
    with victim.open("r+b") as opened, grpc.insecure_channel(cluster.address) as channel:
        place = f"{os.getpid()}/{opened.fileno()}/{1 << 20}"
        for device in (None, calls.DevicePlace("cuda:0", "kvstore.liar", place)):
            true = true_join("liar-node", host_id(), device=device, fresh=False)
            told = [lie for lie in lies(true, theirs) if not allowed(lie, "")]
            for number, lie in enumerate(told):
                with contextlib.suppress(KVStoreError):
                    outcome = FalseNode(channel, lie.message).outcome()
                    assert outcome != "InternalError", lie
                if number % 20 == 0:
                    honest.check(str(lie))
        for kind in ("cuda:0", "fake:0", "fake", "cpu", "none"):
            place_there = calls.DevicePlace(kind, "kvstore.liar", place)
            join = true_join("liar-node", host_id(), device=place_there)
            node = FalseNode(channel, join)
            for _ in range(3):  # while it may be granted memory there
                with contextlib.suppress(KVStoreError):
                    honest.client.put(f"{kind}-{_}", bytes(1_000))
            node.outcome()
        assert victim.read_bytes() == before
    honest.check("joins")
    starts_again(cluster, honest)


def test_a_node_that_lies_afterwards(cluster: Cluster, honest: Honest) -> None:
    """Claims of what others have, of versions to come, and numbers that index nothing."""
    theirs = honest.theirs(cluster)
    join = true_join("liar-node", "elsewhere", fresh=False)
    with grpc.insecure_channel(cluster.address) as channel:
        for true in true_messages():
            for lie in [Lie(true, "", "true"), *lies(true, theirs)]:
                with contextlib.suppress(KVStoreError):
                    node = FalseNode(channel, join)
                    node.then(lie.message)
                    assert node.outcome() != "InternalError", lie
            honest.check(type(true).__name__)
    starts_again(cluster, honest)


class FalseMaster:
    """A master that says orders that lie, and has the node answer each."""

    def __init__(
        self, orders: Iterable[calls.MasterWipe], said: Callable[[calls.MasterWipe, bool], None]
    ) -> None:
        """``said``: called after each order: whether the node has answered it."""
        self._orders = iter(orders)
        self._said = said
        self._session = asyncio.Lock()
        """A node joins again before the end of its last session is seen."""
        self.joins: list[calls.NodeJoin] = []
        self.done = asyncio.Event()

    async def script(
        self, incoming: AsyncIterator[calls.NodeMessage]
    ) -> AsyncIterator[calls.MasterMessage]:
        join = await anext(incoming)
        assert isinstance(join, calls.NodeJoin)
        async with self._session:
            self.joins.append(join)
            yield calls.MasterAccepted(7, 500, 6_000, [1])
            for order in self._orders:
                yield order
                is_answered = False
                async for message in incoming:
                    if message == calls.NodeWiped(order.order):
                        is_answered = True
                        break
                self._said(order, is_answered)
                if not is_answered:
                    return  # the node has ended the session, and joins again
            self.done.set()
            async for _ in incoming:
                pass


def zeroed(memory: bytes, order: calls.MasterWipe) -> bytes:
    """The memory after an order that is believed: it has every right in its segment, and none
    elsewhere."""
    left = bytearray(memory)
    for offset, length in zip(order.offsets, order.lengths, strict=False):
        if SUPERBLOCK_BYTES <= offset and offset + length <= len(memory):
            left[offset : offset + length] = bytes(length)
    return bytes(left)


def test_a_master_that_lies_in_its_orders() -> None:
    """Each is refused, and ends the session, or changes what it names within the segment and
    nothing else. The node goes on, and obeys the next true one."""
    size = 1 << 20
    with (
        contextlib.closing(NodeSegment.create("orders", size)) as segment,
        contextlib.closing(NodeSegment.create("neighbour", size)) as neighbour,
        Server(ScriptedService()) as server,
    ):
        true = true_order(segment.uuid, size)
        theirs = Theirs(numbers=[size, segment.seed], blobs=[neighbour.uuid, segment.token])
        told = [lie.message for lie in (*lies(true, theirs), *false_ranges(true, size))]
        orders = [*itertools.chain.from_iterable((lie, true) for lie in told)]
        filled = os.urandom(size - SUPERBLOCK_BYTES)
        for each in (segment, neighbour):
            each.memory[SUPERBLOCK_BYTES:] = filled
        beside = bytes(neighbour.memory)
        refused: list[calls.MasterWipe] = []

        def said(order: calls.MasterWipe, is_answered: bool) -> None:
            expected = bytes(SUPERBLOCK_BYTES) + filled
            if not is_answered:
                refused.append(order)
            elif order.uuid == segment.uuid:
                expected = zeroed(expected, order)
            assert bytes(segment.memory[SUPERBLOCK_BYTES:]) == expected[SUPERBLOCK_BYTES:], order
            segment.memory[SUPERBLOCK_BYTES:] = filled

        master = FalseMaster(orders, said)
        server.service.script = master.script
        data_server = DataServer([segment], "127.0.0.1", 0, capabilities=True)

        async def serve() -> None:
            data_server.start()
            agent = NodeAgent(
                name="n", host="h", master=server.address, segment=segment, server=data_server,
                address="h:1",
            )  # fmt: skip
            running = asyncio.create_task(agent.run())
            try:
                async with asyncio.timeout(60):
                    await master.done.wait()
                agent.stop()
                await running
            finally:
                running.cancel()
                data_server.stop()

        asyncio.run_coroutine_threadsafe(serve(), server._loop).result(70)
        assert bytes(neighbour.memory) == beside
    assert true not in refused
    odd = [order for order in refused if len(order.lengths) not in (0, len(order.offsets))]
    assert len(odd) >= 6, "columns of other lengths"
    offers = {(o.uuid, o.size, o.seed, o.token) for join in master.joins for o in join.segments}
    assert offers == {(segment.uuid, size, segment.seed, segment.token)}


def test_a_client_of_the_data_port_that_lies(cluster: Cluster, honest: Honest) -> None:
    """Ranges outside the segment, of other segments, generations and tokens; counts that do not
    fit. What a client may write within the segment is not asked here: it may write everywhere."""
    node = cluster.status().nodes[0]
    (segment,) = describe(cluster, [node.segments[0].segment_id])
    hello = data.Hello(segment.uuid, segment.token, segment.generation, 7, 1)
    numbers = (*NUMBERS, segment.size - 1, segment.size, segment.size + 1)
    hellos = [
        hello._replace(uuid=b"u" * 16),
        hello._replace(token=b"t" * 16),
        *(hello._replace(generation=number) for number in NUMBERS if number != hello.generation),
    ]
    greeting = data.pack_hello(hello)
    others = [greeting[:4] + struct.pack("<H", number) + greeting[6:] for number in (0, 2, 65_535)]
    requests = [
        data.pack_request(op, [(offset, length)])
        for op in data.Op
        for offset in numbers
        for length in numbers
        if offset + length > segment.size
    ]
    requests += [
        struct.pack("<4sHHI", b"KVdt", op, reserved, count)
        for op, reserved, count in itertools.product((0, 1, 2, 3, 9), (0, 1), (0, 4097, 1 << 31))
    ]
    place, ok = split_address(node.address), data.pack_status(data.TransferStatus.OK)
    for said in [*others, *map(data.pack_hello, hellos)]:
        assert not shout(place, said).startswith(ok)
    for said in requests:
        heard = shout(place, greeting + said)
        assert heard[len(ok) :] != ok or said[4] == data.Op.READ, said
    honest.check("the data port")


def shout(place: tuple[str, int], said: bytes, *, ends: bool = True) -> bytes:
    """What comes back within half a second of silence. ``ends``: nothing more will be sent."""
    heard = b""
    with socket.create_connection(place, 5) as sock:
        sock.settimeout(0.5)
        with contextlib.suppress(OSError):
            sock.sendall(said)
            if ends:
                sock.shutdown(socket.SHUT_WR)
            while len(heard) < 1 << 16 and (got := sock.recv(1 << 16)):
                heard += got
    return heard


def test_http_that_lies(cluster: Cluster, honest: Honest) -> None:
    """Each parameter of each path of the document, with values of each kind."""
    port = cluster.settings["http_port"]
    document = until(lambda: request(port, "GET", "/api/v1/openapi.json")).json
    values = [*map(str, NUMBERS), "-1", "1.5", "1e400", "true", "null", "[]", *TEXTS, HONEST, "00"]
    values = [each for each in values if each.isascii() and each.isprintable() and " " not in each]
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            if path.endswith(("/events", "/drain", "/undrain")) or method == "delete":
                continue
            for parameter in described.get("parameters", []):
                for value in values:
                    at = f"{path}?{parameter['name']}={value}"
                    body = b"x" if method == "put" else None
                    found = request(port, method.upper(), at, body, timeout_s=HANGS_S)
                    assert found.status != 500, (method, at, found.text)
            schema = described.get("requestBody", {}).get("content", {}).get("application/json")
            for body in bodies(schema["schema"], document) if schema else ():
                found = request(port, method.upper(), path, body, timeout_s=HANGS_S)
                assert found.status != 500, (method, path, body, found.text)
    honest.check("HTTP")


def bodies(schema: Any, document: Any) -> Iterator[Any]:
    """Bodies that are wrong in one member each."""
    yield from ([], "text", 5, None, {}, {"unknown": 1})
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    true = {name: ["00"] if "keys" in name else "00" for name in schema.get("required", [])}
    for name in schema.get("properties", {}):
        value: Any
        for value in (None, "", "00", "zz", 0, -1, 1 << 64, 1.5, True, [], [None], ["00"], [0], {}):
            yield true | {name: value}


def test_subscribers_that_lie(cluster: Cluster) -> None:
    """Places in the order of events that never were; requests for a replay in every form."""
    http_port, published, replayed = free_port(), free_port(), free_port()
    ports = (published, replayed)
    cluster.settings |= {
        "http_port": http_port,
        "events": ",".join(f"tcp://127.0.0.1:{port}" for port in ports),
    }
    cluster.start(nodes=1)
    honest = Honest(cluster)
    until(lambda: request(http_port, "GET", "/healthz").status == 200)
    places = [f"{epoch}-{number}" for epoch in NUMBERS for number in NUMBERS[:4]]
    for place in [*places, "-", "1", "1-", "-1", "x-y", "1-1-1", "9" * 400 + "-1", "1:1", "\u00e9"]:
        head = f"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\nLast-Event-ID: {place}\r\n\r\n"
        heard = shout(("127.0.0.1", http_port), head.encode(), ends=False)
        assert heard.split(b" ")[1:2] in ([b"200"], [b"400"], [b"409"], [b"410"]), (place, heard)
    context = zmq.Context()
    try:
        for frames in (
            [b""], [b"", b""], [b"", b"\0" * 8], [b"", b"\xff" * 8], [b"", b"\0" * 7],
            [b"", b"\0" * 9], [b"\0" * 8], [b"", b"\0" * 8, b"more"], [b"x" * (1 << 16)],
        ):  # fmt: skip
            liar = context.socket(zmq.DEALER)
            liar.connect(f"tcp://127.0.0.1:{replayed}")
            liar.send_multipart(frames)
            liar.close(100)
        asker = context.socket(zmq.DEALER)
        asker.connect(f"tcp://127.0.0.1:{replayed}")
        asker.send_multipart([b"", b"\0" * 8])
        assert asker.poll(10_000), "an honest request is answered"
        asker.close(0)
    finally:
        context.destroy(0)
    honest.check("subscribers")
    assert request(http_port, "GET", "/healthz").status == 200
