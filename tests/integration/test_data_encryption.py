"""A store whose nodes encrypt their data ports: what travels, and who demands it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore import PutOutcome
from kvstore.errors import CapabilityRefusedError, PutRefusedError
from kvstore.runtime.addresses import split_address
from kvstore.runtime.clock import uptime
from kvstore.runtime.tcp_protocol import Extent
from kvstore.security.credentials import NODE_NAME, Credentials
from kvstore.security.data_port_tls import ClientTls
from kvstore.transport.common import RangeCopy
from kvstore.transport.tcp import TcpTransport
from tests.integration.test_capabilities import nodes_of, segment_of
from tests.integration.test_drain import drain
from tests.support.certificates import Identities
from tests.support.cluster import OVER_TCP_NODE, SHORT, Cluster
from tests.support.processes import free_port, run_python
from tests.support.wait import until
from tests.support.workload import content

STORED = PutOutcome.STORED
SIZE = 70_001
TCP = ("tcp",)
TLS = {"data_encryption": "tls"}


@pytest.fixture
def store(tmp_path: Path, identities: Identities) -> Iterator[Cluster]:
    settings = SHORT | {"put_deadline_ms": 20_000, "repair_after_ms": 500}
    with Cluster(tmp_path, settings=settings, identities=identities) as cluster:
        cluster.node_module = OVER_TCP_NODE
        cluster.master()
        yield cluster


class Wire:
    """A port before a node's data port. Sees what passes."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.to = 0
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.address = f"127.0.0.1:{self._sockets[0].getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                one = self._sockets[0].accept()[0]
                self._sockets.append(one)
                other = socket.create_connection(("127.0.0.1", self.to))
                self._sockets.append(other)
                for pair in ((one, other), (other, one)):
                    thread = threading.Thread(target=self._hand_on, args=pair)
                    self._threads.append(thread)
                    thread.start()

    def _hand_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while some := one.recv(1 << 20):
                self.seen += some
                other.sendall(some)
        for sock in (one, other):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for each in self._sockets:
            each.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def behind(store: Cluster, wire: Wire, **settings: Any) -> None:
    """A node that clients reach by ``wire``."""
    wire.to = free_port()
    store.node(port=wire.to, advertise=wire.address, **settings)


# --- what travels --------------------------------------------------------------------------------


@pytest.mark.parametrize("encryption", ["off", "tls"])
def test_bytes_of_blocks_are_not_on_the_wire(store: Cluster, wire: Wire, encryption: str) -> None:
    behind(store, wire, data_encryption=encryption)
    client = store.client(transports=TCP)
    secret = os.urandom(5_000)
    assert client.put("key-of-a-prompt", secret) is STORED
    reader = store.client(transports=TCP, name="reader")
    assert reader.get("key-of-a-prompt") == secret
    is_seen = encryption == "off"
    assert (secret[1000:1032] in wire.seen) == is_seen
    assert (b"key-of-a-prompt" in wire.seen) == is_seen


@pytest.mark.parametrize("device", ["", "fake:0"])
def test_objects_are_put_got_and_copied(
    store: Cluster, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    monkeypatch.setenv("KVSTORE_CLIENT_TRANSPORTS", "tcp")
    monkeypatch.setenv("KVSTORE_AUTH", store._auth("admin"))
    more = TLS | ({"device": device} if device else {})
    first = store.node(**more)
    client = store.client(transports=TCP)
    keys = [f"k{number}" for number in range(10)]
    assert set(client.put_many([(key, content(key, SIZE)) for key in keys])) == {STORED}
    assert client.get_many(keys) == [content(key, SIZE) for key in keys]
    second = store.node(**more)
    assert drain(store, first).told["moved"] == len(keys)
    until(lambda: all(nodes_of(client, key) == {second.name} for key in keys))
    assert client.get_many(keys) == [content(key, SIZE) for key in keys]
    assert set(client.stats().transports) == {"tcp"}
    assert "failed_transfers" not in client.stats().counters
    assert store.status().nodes[0].unreachable == "", "the master reaches it, too"


def test_a_capability_is_of_no_use_with_another_certificate(
    store: Cluster, identities: Identities
) -> None:
    store.node(**TLS)
    client = store.client(transports=TCP)
    client.put("k", content("k", SIZE))
    segment, at, capability = segment_of(client, "k")
    read = RangeCopy(at, memoryview(bytearray(SIZE)), extent=Extent(at, SIZE + 1024, capability))
    refused = pytest.raises(CapabilityRefusedError)
    for name, outcome in (("admin", contextlib.nullcontext()), ("other", refused)):
        tls = ClientTls(Credentials(identities.file(name, "admin")))
        with contextlib.closing(TcpTransport(tls=tls)) as transport, outcome:
            transport.read(segment, [read], uptime() + 5)


def test_the_memory_of_a_master_is_encrypted_as_it_says(
    tmp_path: Path, identities: Identities
) -> None:
    auth = identities.file("store", "master", "node")
    settings = SHORT | {"memory": "32MiB", "auth": auth} | TLS
    with Cluster(tmp_path, settings=settings, identities=identities) as store:
        store.master()
        until(lambda: store.status().nodes)
        client = store.client(transports=TCP)
        assert client.put("k", b"v") is STORED
        assert client.get("k") == b"v"
        (node,) = store.status().nodes
        context = Credentials(auth).client()
        with (
            socket.create_connection(split_address(node.address), 10) as sock,
            context.wrap_socket(sock, server_hostname=NODE_NAME) as secured,
        ):
            assert secured.version() == "TLSv1.3"


@pytest.mark.slow  # two commands
def test_a_client_that_demands_encryption_uses_no_plain_node_over_tcp(
    store: Cluster, identities: Identities
) -> None:
    plain = store.node()
    asks = store.client(transports=TCP)
    demands = store.client(transports=TCP, name="demands", **TLS)
    assert asks.put("k", b"v") is STORED
    with pytest.raises(PutRefusedError, match=rf"node {plain.name} .* does not encrypt") as error:
        demands.put("l", b"v")
    assert "--data-encryption tls" in error.value.advice
    assert demands.get("k") is None
    assert store.state_of(plain) == "alive", "the master is not told that it fails"
    here = store.client(name="here", **TLS)
    assert here.put("h", b"v") is STORED
    assert here.get("k") == b"v"
    assert set(here.stats().transports) == {"shm"}, "which leaves no host"
    encrypted = store.node(**TLS)
    for number in range(20):
        assert demands.put(f"k{number}", content(f"k{number}", SIZE)) is STORED
    assert demands.get("k7") == content("k7", SIZE)
    assert nodes_of(asks, "k7") == {encrypted.name}
    for encryption, says in (("off", "answers"), ("tls", "does not encrypt its data port")):
        said = run_python(
            "-m", "kvstore.cli.main", "doctor", "--master", store.address,
            variables={
                "KVSTORE_AUTH": identities.engine("engine", "*"),
                "KVSTORE_DATA_ENCRYPTION": encryption,
            },
        ).stdout  # fmt: skip
        assert re.search(rf"node {plain.name} .*{says}", " ".join(said.split())), said
