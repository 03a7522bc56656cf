"""A real node, and a master of the test's own that looks at its memory when it hears that the node
leaves: removals and overwriting puts do not wait for readers of such memory."""

from __future__ import annotations

import queue
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import grpc
import pytest

from kvstore.calls import MasterAccepted, MasterBeat, NodeBeat, NodeJoin, NodeLeave
from kvstore.memory import header as layout
from kvstore.wire.node_messages import (
    SESSION_PATH,
    decode_node_message,
    encode_master_message,
)
from tests.support.cluster import Cluster, entry

GENERATION: Final = struct.Struct("<Q")


class Master:
    """Takes one node after the other. Notes each join, and the generation of its memory then and
    when it leaves."""

    def __init__(self) -> None:
        self.joined: queue.SimpleQueue[NodeJoin] = queue.SimpleQueue()
        self.left: queue.SimpleQueue[int] = queue.SimpleQueue()
        handler: Any = grpc.stream_stream_rpc_method_handler(self._session)
        service, method = SESSION_PATH.strip("/").split("/")
        handlers = grpc.method_handlers_generic_handler(service, {method: handler})
        self._threads = ThreadPoolExecutor(2)
        self._server = grpc.server(self._threads, handlers=[handlers])
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def _session(self, messages: Iterator[bytes], _: Any) -> Iterator[bytes]:
        name = ""
        for data in messages:
            match decode_node_message(data):
                case NodeJoin() as join:
                    name = join.name
                    self.joined.put(join)
                    yield encode_master_message(MasterAccepted(1, 50, 5_000, [1]))
                case NodeBeat(number):
                    yield encode_master_message(MasterBeat(number))
                case NodeLeave():
                    self.left.put(generation_of(name))
                    return

    def stop(self) -> None:
        self._server.stop(None).wait()
        self._threads.shutdown()


def generation_of(node: str) -> int:
    with entry(node).open("rb") as memory:
        memory.seek(layout.GENERATION_OFFSET)
        (generation,) = GENERATION.unpack(memory.read(GENERATION.size))
    return int(generation)


@pytest.fixture
def master() -> Iterator[Master]:
    master = Master()
    yield master
    master.stop()


def test_a_node_ends_its_readers_before_it_says_that_it_leaves(
    cluster: Cluster, master: Master
) -> None:
    node = cluster.launch_node(master=f"127.0.0.1:{master.port}")
    offer = master.joined.get(timeout=30).segments[0]
    cluster.ready(node)
    host, _, port = offer.address.rpartition(":")
    with socket.create_connection((host, int(port))) as reader:
        assert generation_of(node.name) == offer.generation
        assert node.terminate() == 0
        assert master.left.get(timeout=1) > offer.generation
        reader.settimeout(5)
        assert reader.recv(1) == b"", "its connections are over, too"
