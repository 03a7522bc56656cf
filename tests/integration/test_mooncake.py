"""A store whose bytes the transfer engine moves: real processes, the engine's tcp protocol."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore import Client, PutOutcome
from kvstore.clocks import uptime
from kvstore.errors import ConfigError, DeadlineExceededError, KVStoreError
from kvstore.transport.mooncake.transport import MooncakeTransport
from tests.support.cluster import Cluster
from tests.support.metadata_servers import metadata_server
from tests.support.processes import run_python
from tests.support.programs import need_engine
from tests.support.traffic import at_work, content, getter, putter

STORED = PutOutcome.STORED
ENGINE = {"transports": ("mooncake",), "protocol": "tcp"}
KEYS = [f"key-{number}" for number in range(60)]


@pytest.fixture(scope="module", autouse=True)
def there_is_an_engine() -> None:
    need_engine()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """In place of the common one: its node has an engine."""
    with Cluster(tmp_path_factory.mktemp("store")) as cluster:
        cluster.start(memory="256MiB", protocol="tcp")
        yield cluster


def test_what_is_put_is_got(store: Cluster) -> None:
    client = store.client(**ENGINE, placements_max=0)
    values = {f"size-{size}": content(f"size-{size}", size) for size in (0, 1, 4096, 9_999_999)}
    assert client.put_many(values.items()) == [STORED] * len(values)
    for key, value in values.items():
        assert client.get(key) == value
    buffers = [bytearray(len(value)) for value in values.values()]
    assert client.get_into(list(values), buffers) == [len(value) for value in values.values()]
    assert buffers == list(values.values())
    others = store.client(transports=("shm",)), store.client(transports=("tcp",))
    for other in others:
        assert other.get_many(list(values)) == list(values.values())
    hashes = [f"block-{number}" for number in range(300)]
    client.put_chain(hashes, [content(each, 5000) for each in hashes])
    assert client.match_prefix(hashes) == len(hashes)
    assert client.get_many(hashes) == [content(each, 5000) for each in hashes]


def test_registered_memory(store: Cluster) -> None:
    client = store.client(**ENGINE)
    source = np.random.default_rng(0).integers(0, 255, 8 << 20, dtype=np.uint8)
    target = np.zeros_like(source)
    for memory in (source, target):
        client.register(memory)
    client.put_many([(f"part-{i}", source[i << 20 : (i + 1) << 20]) for i in range(8)])
    parts = [target[i << 20 : (i + 1) << 20] for i in range(8)]
    assert client.get_into([f"part-{i}" for i in range(8)], parts) == [1 << 20] * 8
    assert (target == source).all()
    for memory in (source, target):
        client.unregister(memory)


def test_the_table_decides(store: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same host: shm. Both ends on an engine: it. Else: tcp."""
    moved: set[str] = set()
    real = MooncakeTransport.write

    def write(self: MooncakeTransport, *arguments: object) -> None:
        moved.add("mooncake")
        real(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(MooncakeTransport, "write", write)
    near = store.client(protocol="tcp")
    far = store.client(protocol="tcp", transports=("mooncake", "tcp"))
    without = store.client(transports=("mooncake", "tcp"))
    other = store.client(
        protocol="tcp", transports=("mooncake", "tcp"), metadata_server="etcd://10.0.0.1:2379"
    )
    for client, wanted in ((near, set()), (far, {"mooncake"}), (without, set()), (other, set())):
        moved.clear()
        assert client.put(f"by-{id(client)}", b"x" * 5000) is STORED
        assert moved == wanted
        assert near.get(f"by-{id(client)}") == b"x" * 5000


def test_a_client_contributes_memory_of_the_same_kind(cluster: Cluster) -> None:
    cluster.master()
    client = cluster.client(**ENGINE, memory="32MiB")
    assert client.put("k", content("k")) is STORED
    assert cluster.client(**ENGINE).get("k") == content("k")


@pytest.mark.parametrize("kind", ["etcd", "http"])
def test_a_store_with_a_metadata_server(cluster: Cluster, kind: str, tmp_path: Path) -> None:
    with metadata_server(kind, tmp_path) as url:
        cluster.start(protocol="tcp", metadata_server=url)
        code = (
            "import sys\n"
            "from kvstore import Client\n"
            "with Client(sys.argv[1], transports=('mooncake',), protocol='tcp',"
            " metadata_server=sys.argv[2]) as client:\n"
            "    client.put('k', b'x' * 5_000_000)\n"
            "    print(client.get('k') == b'x' * 5_000_000)\n"
        )
        said = run_python("-c", code, cluster.address, url)
        assert said.stdout.strip() == "True", said
        cluster.nodes[0].terminate()


# --- failures -------------------------------------------------------------------------------------


def test_a_node_is_killed_while_it_is_read(cluster: Cluster) -> None:
    cluster.start(protocol="tcp")
    client = cluster.client(**ENGINE, timeout_ms=3_000)
    client.put_many([(key, content(key)) for key in KEYS])
    with at_work(getter(client, KEYS), longest_s=4) as reader:
        reader.wait_for("right", more=50)
        cluster.nodes[0].kill()
        reader.wait_for("miss", more=20)
    cluster.node(protocol="tcp")
    assert client.put("k", b"x") is STORED
    assert client.get("k") == b"x"


def test_a_node_is_killed_while_it_is_written(cluster: Cluster) -> None:
    cluster.start(memory="64MiB", protocol="tcp")
    client = cluster.client(**ENGINE, timeout_ms=3_000)
    with at_work(putter(client, "new", wait_ms=200), longest_s=4) as writer:
        writer.wait_for("stored", more=20)
        cluster.nodes[0].kill()
        writer.wait_for("no_space", more=2)
        cluster.node(memory="64MiB", protocol="tcp")
        writer.wait_for("stored", more=20)


def test_a_transfer_under_way_when_its_node_dies_ends_by_the_deadline(cluster: Cluster) -> None:
    cluster.start(memory="512MiB", protocol="tcp")
    client = cluster.client(**ENGINE, timeout_ms=3_000)
    value = np.zeros(200 << 20, np.uint8)
    ended = threading.Event()
    outcome: list[object] = []

    def put() -> None:
        try:
            outcome.append(client.put("large", value, wait_ms=0))
        except KVStoreError as error:
            outcome.append(error)
        ended.set()

    threading.Thread(target=put).start()
    while not cluster.used_bytes():
        assert not ended.is_set()
    start = uptime()
    cluster.nodes[0].kill()
    assert ended.wait(6)
    assert uptime() - start < 4
    assert isinstance(outcome[0], KVStoreError)


def test_a_frozen_node_costs_the_deadline_and_no_more(cluster: Cluster) -> None:
    cluster.start(protocol="tcp")
    client = cluster.client(**ENGINE, timeout_ms=1_000, placements_max=0)
    client.put("k", content("k"))
    cluster.nodes[0].freeze()
    start = uptime()
    try:
        assert client.get("k") is None
    except DeadlineExceededError:
        pass
    assert uptime() - start < 2
    cluster.nodes[0].resume()
    until = uptime() + 20
    while client.get("k") != content("k") and client.put("k", content("k")) is not STORED:
        assert uptime() < until


def test_a_node_that_fences_is_met_at_its_new_address(cluster: Cluster) -> None:
    """The master forgets: the node joins the next one, its segment at another address."""
    cluster.start(protocol="tcp")
    client = cluster.client(**ENGINE)
    client.put("k", content("k"))
    cluster.master_server.kill()
    cluster.master()
    deadline = uptime() + 30
    while True:
        try:
            if client.put("again", content("again")) is STORED:
                break
        except KVStoreError:
            assert uptime() < deadline
    assert client.get("again") == content("again")
    assert "node_fenced" in cluster.nodes[0].errors


# --- settings -------------------------------------------------------------------------------------


def test_an_engine_that_cannot_be_had_is_said_once_and_tcp_goes_on(
    store: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    impossible = {"protocol": "rdma", "device_name": "mlx9_0"}
    code = f"""
import sys
from kvstore import Client
from kvstore.errors import TransferEngineError
try:
    Client(sys.argv[1], transports=("mooncake",), **{impossible})
except TransferEngineError as error:
    print(error.fields["device_name"])
"""
    said = run_python("-c", code, store.address)
    assert said.stdout.strip() == "mlx9_0", said
    with caplog.at_level(logging.ERROR, "kvstore.mooncake"):
        client = store.client(transports=("mooncake", "tcp"), **impossible)
        assert client.put("k", b"x" * 5000) is STORED
        assert client.get("k") == b"x" * 5000


def test_mooncake_alone_wants_a_protocol(store: Cluster) -> None:
    with pytest.raises(ConfigError, match="protocol"):
        Client(store.address, transports=("mooncake",))


def test_a_node_that_cannot_have_its_engine_does_not_start(cluster: Cluster) -> None:
    cluster.master()
    node = cluster.launch_node(protocol="tcp", metadata_server="http://127.0.0.1:9/metadata")
    assert node.wait() != 0
    assert "cannot be reached" in node.errors
    assert not node.entry.exists()
