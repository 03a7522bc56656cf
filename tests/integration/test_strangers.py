"""Bytes on our ports that are not ours."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from kvstore import PutOutcome
from kvstore.runtime.addresses import split_address
from tests.support.cluster import Cluster
from tests.support.workload import at_work, content, getter, putter

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
