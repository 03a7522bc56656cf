"""The client's end of a data connection, with servers that break the rules."""

from __future__ import annotations

import contextlib
import socket
import threading

import pytest

from kvstore.clocks import uptime
from kvstore.errors import NodeUnreachableError
from kvstore.native.kinds import ReadRow
from kvstore.transport.tcp_client import ClientConnection
from tests.unit.client.world import segment


def test_a_server_that_speaks_unasked_is_connected_to_twice_at_most() -> None:
    accepted: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted.append(listener.accept()[0])
                accepted[-1].recv(200)
                accepted[-1].sendall(b"KVdt" + bytes(4) + b"!")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        place = segment(1)._replace(address=address)
        connection = ClientConnection(place, 1)
        row: ReadRow = (4096, 3, 1, 1, b"k", [memoryview(bytearray(3))], b"")
        with pytest.raises(NodeUnreachableError):
            connection.read_objects("ns", [row], True, uptime() + 5)
        connection.close()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
    for each in accepted:
        each.close()
    assert len(accepted) == 2
