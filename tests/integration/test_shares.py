"""One identity takes all that it gets of each door, and a member of another tenant joins and works
all the same. The metrics say whose the refusals are."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self
from urllib.parse import urlencode

import pytest

from kvstore import Client, PutOutcome
from kvstore.auth.credentials import MASTER_NAME, Credentials
from kvstore.auth.holders import shown
from kvstore.calls import SegmentInfo
from kvstore.network import tcp_protocol as protocol
from kvstore.network.handover import HELLO_BYTES
from kvstore.network.tcp_protocol import Hello, TransferStatus
from kvstore.wire.frames import ERROR, FrameReader, hello
from tests.integration.test_capabilities import segment_of
from tests.support.cluster import Cluster, Node
from tests.support.http import request
from tests.support.issuing import Identities
from tests.support.processes import free_port
from tests.support.traffic import at_work, content, getter, putter
from tests.support.waiting import until
from tests.unit.transport.test_tcp_server import status

BOUND = 20
"""Connections of the lane, and of the data port."""
SPACE = "{}/kv"


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def node_port() -> int:
    return free_port()


@pytest.fixture
def cluster(tmp_path: Path, identities: Identities, port: int, node_port: int) -> Iterator[Cluster]:
    settings = {"master_connections_max": BOUND, "http_port": port, "events": "on"}
    with Cluster(tmp_path, settings=settings, identities=identities) as cluster:
        cluster.start(node_connections_max=BOUND, http_port=node_port)
        yield cluster


def member(cluster: Cluster, identities: Identities, name: str) -> Client:
    auth = identities.engine(name, f"{name}/*")
    return cluster.client(auth=auth, namespace=SPACE.format(name), transports=("tcp",), name=name)


class Attacker:
    """What a member can hold, with the rights that it has."""

    def __init__(self, stack: contextlib.ExitStack, client: Client, auth: str) -> None:
        assert client.put("mine", b"x") is PutOutcome.STORED
        self._stack = stack
        self._client = client
        self._tls = Credentials(auth).client()

    def lane(self) -> bool:
        """Whether it got one connection more."""
        joined = self._client._stub._link.joined
        assert joined is not None
        sock = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        sock.settimeout(10)
        sock.connect(b"\0" + joined.lane_unix.encode())
        sock.sendall(hello(joined.lane_token))
        reader = FrameReader()
        while (answer := reader.next()) is None:
            count = sock.recv_into(reader.space())
            assert count, "an end without an answer"
            reader.received(count)
        return answer[1] != ERROR

    def segment(self) -> SegmentInfo:
        return segment_of(self._client, "mine")[0]

    def data(self) -> bool:
        segment = self.segment()
        host, _, port = segment.address.rpartition(":")
        sock = self._stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        number = 1 + secrets.randbits(62)
        place = segment.uuid, segment.token, segment.generation, 1, number
        said = protocol.pack_hello(Hello(*place, segment.holder))
        sock.sendall(said)
        if status(sock) is TransferStatus.BUSY:
            return False
        nonce = sock.recv(protocol.NONCE_BYTES, socket.MSG_WAITALL)
        sock.sendall(protocol.prove(segment.token, nonce, said))
        return status(sock) is TransferStatus.OK

    def http(self, port: int) -> None:
        """One request whose body does not come."""
        sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        tls = self._stack.enter_context(self._tls.wrap_socket(sock, server_hostname=MASTER_NAME))
        head = "POST /api/v1/exists HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
        tls.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode())

    def events(self, port: int) -> None:
        sock = socket.create_connection(("127.0.0.1", port), timeout=10)
        tls = self._stack.enter_context(self._tls.wrap_socket(sock, server_hostname=MASTER_NAME))
        query = urlencode({"namespace": SPACE.format("evil")})
        tls.sendall(f"GET /api/v1/events?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

    def handover(self, node: Node) -> None:
        """A peer that reads the greeting, and says a hello that is too short."""
        with contextlib.suppress(OSError):  # the oldest makes room
            sock = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            sock.settimeout(10)
            sock.connect(str(node.socket))
            assert sock.recv(HELLO_BYTES)


def as_many_as_it_gets(take: Callable[[], bool], most: int = 3 * BOUND) -> int:
    got = 0
    for _ in range(most):
        got += take()
    return got


def refused(text: str, door: str, identity: str) -> float:
    wanted = f'share_refused_total{{door="{door}",identity="{identity}"}} '
    return next((float(line.split()[-1]) for line in text.splitlines() if wanted in line), 0.0)


def test_one_identity_holds_all_that_it_gets_of_each_door(
    cluster: Cluster, identities: Identities, port: int, node_port: int
) -> None:
    evil_auth = identities.engine("evil", "evil/*")
    (node,) = cluster.nodes
    with contextlib.ExitStack() as stack:
        attacker = Attacker(stack, member(cluster, identities, "evil"), evil_auth)
        assert BOUND // 2 - 4 <= as_many_as_it_gets(attacker.lane) <= BOUND // 2
        assert BOUND // 2 - 4 <= as_many_as_it_gets(attacker.data) <= BOUND // 2
        for _ in range(150):
            attacker.http(port)
        for _ in range(70):
            attacker.events(port)
        for _ in range(100):
            attacker.handover(node)

        good = member(cluster, identities, "good")
        keys = [f"key-{number}" for number in range(20)]
        for key in keys:
            assert good.put(key, content(key, 20_000)) is PutOutcome.STORED
        read = getter(good, keys)
        write = putter(good, "new")
        with at_work(read) as reader, at_work(write) as writer:
            reader.wait_for("right", more=200)
            writer.wait_for("stored", more=50)
        assert good.stats().transports.keys() == {"tcp"}
        assert good.stats().counters.get("failed_transfers", 0) == 0

        tls = Credentials(identities.engine("good", "good/*")).client()
        own = urlencode({"namespace": SPACE.format("good")})
        assert request(port, "GET", f"/api/v1/chains?{own}", tls=tls).status == 200
        assert request(port, "GET", f"/api/v1/events/snapshot?{own}", tls=tls).status == 200

        admin = Credentials(identities.file("admin")).client()
        told = request(port, "GET", "/metrics", tls=admin).text
        assert refused(told, "lane", "evil") >= 2 * BOUND
        assert refused(told, "http", "evil") >= 1
        assert 'identity="good"' not in told
        admin.check_hostname = False  # a node's certificate names no address
        of_node = request(node_port, "GET", "/metrics", tls=admin).text
        assert refused(of_node, "data", shown(attacker.segment().holder)) >= 2 * BOUND


class Strangers:
    """Connections that begin a handshake of TLS and say no more; an ended one is replaced. For each
    place of the port one comes in a second: as 1,000 a second at a port of the usual bound."""

    HALF = bytes.fromhex("16030100c8010000c40303")

    def __init__(self, port: int) -> None:
        self.made = 0
        self._port = port
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="strangers", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _run(self) -> None:
        with contextlib.ExitStack() as stack:
            while not self._stop.wait(1 / BOUND):
                with contextlib.suppress(OSError):
                    sock = socket.create_connection(("127.0.0.1", self._port), timeout=1)
                    stack.enter_context(sock).sendall(self.HALF)
                    self.made += 1


@pytest.mark.slow
def test_strangers_that_fill_the_port_of_grpc_slow_newcomers_and_nobody_else(
    cluster: Cluster, identities: Identities
) -> None:
    good = member(cluster, identities, "good")
    keys = [f"key-{number}" for number in range(20)]
    assert set(good.put_many([(key, content(key)) for key in keys])) == {PutOutcome.STORED}
    with Strangers(int(cluster.settings["port"])) as strangers:
        until(lambda: strangers.made > 3 * BOUND)
        until(lambda: "grpc_port_full" in cluster.master_server.errors)
        with at_work(getter(good, keys), longest_s=2.0) as reader:
            reader.wait_for("right", more=500)
            for name in ("first", "second"):
                auth = identities.engine(name, f"{name}/*")
                newcomer = cluster.client(
                    auth=auth, namespace=SPACE.format(name), timeout_ms=30_000
                )
                assert not newcomer.exists("nothing")
            reader.wait_for("right", more=500)
    assert [cluster.state_of(node) for node in cluster.nodes] == ["alive"]
