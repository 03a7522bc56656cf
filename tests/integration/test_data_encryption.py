"""A store whose nodes encrypt their data ports: what travels, what breaks, what is replaced."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvstore import PutOutcome
from kvstore.auth.certificates import Wanted
from kvstore.auth.credentials import NODE_NAME, Credentials
from kvstore.errors import PutRefusedError
from kvstore.network.addresses import split_address
from tests.integration.test_drain import drain
from tests.integration.test_repairing import nodes_of
from tests.integration.test_strangers import noises, shout
from tests.support.cluster import OVER_TCP_NODE, SHORT, Cluster
from tests.support.issuing import Identities
from tests.support.processes import free_port, run_python
from tests.support.traffic import at_work, content, getter, putter
from tests.support.waiting import until

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
    """A port before a node's data port. Sees what passes, and changes what it is told to."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.change: Callable[[bytes], bytes] = bytes
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
                other.sendall(self.change(some))
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


@pytest.mark.slow
def test_the_doctor_tries_the_port(store: Cluster, identities: Identities) -> None:
    store.node(**TLS)
    said = run_python(
        "-m", "kvstore.cli.main", "doctor", "--master", store.address,
        variables={"KVSTORE_AUTH": identities.engine("engine", "*")},
    ).stdout  # fmt: skip
    assert re.search(r"ok +node \S+ +data port \S+ answers", said), said


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


# --- who does not get in -------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["engine", "master"])
def test_who_is_no_node_does_not_start(store: Cluster, identities: Identities, role: str) -> None:
    auth = identities.engine("engine", "*") if role == "engine" else identities.file("master")
    node = store.launch_node(auth=auth, **TLS)
    assert node.wait() != 0
    assert "not one that clients accept from node.kvstore" in node.errors
    assert "--role node" in node.errors


def test_noise_while_a_client_works(store: Cluster) -> None:
    store.node(**TLS)
    keys = [f"key-{number}" for number in range(10)]
    client = store.client(transports=TCP)
    client.put_many([(key, content(key)) for key in keys])
    port = split_address(store.status().nodes[0].address)[1]
    with (
        at_work(getter(store.client(transports=TCP), keys), longest_s=3) as reader,
        ThreadPoolExecutor(8) as strangers,
    ):
        for heard in [strangers.submit(shout, port, noise) for noise in noises()]:
            assert heard.result(30)[:1] in (b"", b"\x15", b"K")
        reader.wait_for("right", more=5)
    assert set(reader.counts) == {"right"}


def test_changed_bytes_are_misses_and_never_wrong(store: Cluster, wire: Wire) -> None:
    """Somebody between client and node flips a bit in each large piece, for a while."""
    behind(store, wire, **TLS)
    keys = [f"k{number}" for number in range(5)]
    client = store.client(transports=TCP)
    client.put_many([(key, content(key)) for key in keys])
    wire.change = lambda some: (
        some[:-9] + bytes([some[-9] ^ 1]) + some[-8:] if len(some) > 9_000 else some
    )
    readers = [store.client(transports=TCP, name=f"r{number}") for number in range(3)]
    for reader in readers:
        for key in keys:
            assert reader.get(key) in (None, content(key))
    assert any("failed_transfers" in reader.stats().counters for reader in readers)
    wire.change = bytes
    until(lambda: readers[0].get_many(keys) == [content(key) for key in keys], within_s=20)


# --- what is replaced, and what dies -------------------------------------------------------------


@pytest.mark.slow
def test_files_are_replaced_under_traffic(store: Cluster, identities: Identities) -> None:
    node = store.node(**TLS)
    engine = Path(identities.engine("engine", "default"))
    keys = [f"key-{number}" for number in range(10)]
    client = store.client(transports=TCP, auth=str(engine))
    client.put_many([(key, content(key)) for key in keys])
    with (
        at_work(getter(client, keys), longest_s=5) as reader,
        at_work(putter(client, "new", overwrite=True), longest_s=5) as writer,
    ):
        for _ in range(3):
            identities.replace(Path(identities.file("node")), Wanted("node", ("node",)))
            spaces = ("default",)
            identities.replace(engine, Wanted("engine", ("engine",), spaces, spaces))
            late = store.client(transports=TCP, auth=str(engine))
            assert late.get(keys[0]) == content(keys[0])
            reader.wait_for("right", more=5)
            writer.wait_for("stored", more=5)
    until(lambda: "file_loaded setting=auth" in node.errors)
    assert set(reader.counts) == {"right"}


@pytest.mark.slow
def test_a_node_that_is_killed_under_traffic_comes_back(store: Cluster) -> None:
    node, _ = store.node(**TLS), store.node(**TLS)
    keys = [f"key-{number}" for number in range(20)]
    client = store.client(transports=TCP)
    client.put_many([(key, content(key)) for key in keys], replicas=2)
    with at_work(getter(client, keys), longest_s=5) as reader:
        reader.wait_for("right", more=5)
        node.kill()
        reader.wait_for("right", more=20)
        store.node(name=node.name, **TLS)
        reader.wait_for("right", more=20)
    assert set(reader.counts) <= {"right", "miss"}
