"""Bytes on our ports that are not ours, and a lane that cannot be reached."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore import PutOutcome, calls
from kvstore.network.addresses import split_address
from kvstore.wire.messages import CALLS, decode_reply, encode_reply
from tests.integration.conftest import either_client
from tests.support.cluster import Cluster
from tests.support.processes import free_port
from tests.support.traffic import at_work, content, getter, putter

STORED = PutOutcome.STORED
GIB_4 = 0xFFFF_FFFF

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def noises() -> Iterator[bytes]:
    """What a stranger may send."""
    source = random.Random(7)
    yield b""
    yield b"\0" * 100_000
    yield b"GET / HTTP/1.1\r\nHost: kvstore\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + source.randbytes(500)  # TLS hello
    yield from (source.randbytes(length) for length in (1, 7, 64, 1_000, 1 << 20))
    yield struct.pack("<IQBB", GIB_4, 1, 1, 0) + b"x" * 1_000  # a frame of 4 GiB on the lane
    yield struct.pack("<IQBB", 1 << 20, 1, 2, 200)  # a frame that never comes
    yield struct.pack("<IQBB", 5, 1, 9, 0)  # shorter than itself
    yield struct.pack("<4sI16s16sQ", b"KVdt", 1, source.randbytes(16), source.randbytes(16), 1)
    yield struct.pack("<4sI16s16sQ", b"KVdt", 99, b"", b"", GIB_4)
    yield HTTP2_PREFACE + source.randbytes(2_000)
    settings = b"\0\0\0\x04\0\0\0\0\0"
    yield HTTP2_PREFACE + settings + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + b"y" * 5_000


def shout(port: int, noise: bytes) -> bytes:
    """Send it, and read what comes until the other end closes or is silent."""
    heard = b""
    with socket.create_connection(("127.0.0.1", port), 5) as sock:
        sock.settimeout(0.2)
        with contextlib.suppress(OSError):
            sock.sendall(noise)
            while data := sock.recv(1 << 16):
                heard += data
    return heard


def rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) << 10
    raise AssertionError("no VmRSS")


def ports_of(cluster: Cluster) -> dict[str, int]:
    (node,) = cluster.status().nodes
    return {
        "grpc": cluster.settings["port"],
        "lane": cluster.lane_port,
        "data": split_address(node.address)[1],
    }


def test_noise_on_every_port_while_a_client_works(store: Cluster) -> None:
    keys = [f"key-{number}" for number in range(20)]
    client = store.client()
    client.put_many([(key, content(key)) for key in keys])
    ports = ports_of(store)
    servers = [store.master_server, store.nodes[0]]
    before = [rss_bytes(server.pid) for server in servers]
    with (
        at_work(getter(store.client(placements_max=0), keys), longest_s=3) as reader,
        at_work(getter(store.client(transports=("tcp",)), keys), longest_s=3) as far_reader,
        at_work(
            lambda number: putter(client, "new", overwrite=True)(number % 10), longest_s=3
        ) as writer,
        ThreadPoolExecutor(8) as strangers,
    ):
        heard = [
            strangers.submit(shout, port, noise) for port in ports.values() for noise in noises()
        ]
        for each in heard:
            each.result(30)
        for worker in (reader, far_reader, writer):
            worker.wait_for("stored" if worker is writer else "right", more=5)
    assert set(reader.counts) == set(far_reader.counts) == {"right"}
    assert set(writer.counts) <= {"stored", "no_space"}
    for server, bytes_before in zip(servers, before, strict=True):
        assert rss_bytes(server.pid) < bytes_before + (64 << 20)


def test_a_frame_of_4_gib_is_refused_at_its_length(store: Cluster) -> None:
    """Also from somebody who knows the token."""
    client = store.client()
    client.put("k", b"x")
    joined = client._stub.joined
    assert joined is not None
    from kvstore.wire.frames import hello

    with socket.create_connection(("127.0.0.1", store.lane_port), 5) as sock:
        sock.settimeout(5)
        sock.sendall(hello(joined.lane_token))
        assert sock.recv(1 << 16)
        sock.sendall(struct.pack("<IQBB", GIB_4, 1, 2, 6) + b"Lookup")
        heard = b""
        with contextlib.suppress(ConnectionError):
            while data := sock.recv(1 << 16):  # it says why, and closes at once
                heard += data
    assert b"protocol" in heard
    assert client.get("k") == b"x"


def test_idle_strangers_are_shown_out(store: Cluster) -> None:
    """Connections that say nothing do not keep clients from their work."""
    ports = ports_of(store)
    with contextlib.ExitStack() as stack:
        for port in ports.values():
            for _ in range(100):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        for transport in ("shm", "tcp"):
            for lane in (True, False):
                with either_client(
                    "sync", store.address, transports=(transport,), lane=lane
                ) as client:
                    key = f"{transport} {lane}"
                    assert client.put(key, b"x" * 1000) is STORED
                    assert client.get(key) == b"x" * 1000


# --- a lane that cannot be reached -------------------------------------------------------------


class Gateway:
    """Forwards gRPC to a master, and announces another lane than the master's."""

    def __init__(self, target: str, lane_port: int) -> None:
        self._lane_port = lane_port
        self._target = grpc.insecure_channel(target)
        self._server = grpc.server(ThreadPoolExecutor(4))
        for service in {call.service for call in CALLS.values()}:
            handlers: dict[str, Any] = {
                call.name: grpc.unary_unary_rpc_method_handler(self._forward(call))
                for call in CALLS.values()
                if call.service == service
            }
            generic = grpc.method_handlers_generic_handler(service, handlers)
            self._server.add_generic_rpc_handlers((generic,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        self._server.stop(None).wait()
        self._target.close()

    def _forward(self, call: Any) -> Any:
        send: Any = self._target.unary_unary(call.path)

        def forward(data: bytes, context: Any) -> bytes:
            metadata = [
                (key, value)
                for key, value in context.invocation_metadata()
                if key.startswith("kvstore")
            ]
            reply: bytes = send(data, timeout=10, metadata=metadata)
            if call.request is calls.Join:
                joined: Any = decode_reply(call, reply)
                joined = joined._replace(lane_port=self._lane_port, lane_unix="")
                return encode_reply(call, joined)
            return reply

        return forward


@pytest.fixture(params=["closed", "silent", "somebody else's"])
def lane_port(request: pytest.FixtureRequest) -> Iterator[int]:
    """Of something that is no lane."""
    if request.param == "closed":
        yield free_port()
        return
    stop = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepted: list[socket.socket] = []

        def serve() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    sock, _ = listener.accept()
                    accepted.append(sock)
                    if request.param != "silent":
                        sock.sendall(b"220 mail.example ESMTP\r\n" * 100)

        thread = threading.Thread(target=serve, name="no-lane", daemon=True)
        thread.start()
        yield int(listener.getsockname()[1])
        stop.set()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for sock in accepted:
            sock.close()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_without_a_lane_a_client_works_and_says_so_once(
    store: Cluster, lane_port: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(Gateway(store.address, lane_port)) as gateway:
        caplog.set_level(logging.WARNING, "kvstore.client")
        with either_client(kind, gateway.address) as client:
            for number in range(20):
                assert client.put(f"k{number}", b"x" * number) is STORED
                assert client.get(f"k{number}") == b"x" * number
            assert client.match_prefix(["k1"]) == 1
        warnings = [record.getMessage() for record in caplog.records]
        (told,) = [each for each in warnings if "lane unreachable" in each]
        assert f"open TCP port {lane_port}" in told
