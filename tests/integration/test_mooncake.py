"""A store whose bytes the transfer engine moves: real processes, the engine's tcp protocol."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvstore import Client, PutOutcome
from kvstore.errors import ConfigError
from tests.support.cluster import Cluster
from tests.support.programs import need_engine
from tests.support.workload import content

STORED = PutOutcome.STORED
ENGINE = {"transports": ("mooncake",), "protocol": "tcp"}


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


# --- settings -------------------------------------------------------------------------------------


def test_mooncake_alone_wants_a_protocol(store: Cluster) -> None:
    with pytest.raises(ConfigError, match="protocol"):
        Client(store.address, transports=("mooncake",))


def test_a_node_that_cannot_have_its_engine_does_not_start(cluster: Cluster) -> None:
    cluster.master()
    node = cluster.launch_node(protocol="tcp", metadata_server="http://127.0.0.1:9/metadata")
    assert node.wait() != 0
    assert "cannot be reached" in node.errors
    assert not node.entry.exists()
