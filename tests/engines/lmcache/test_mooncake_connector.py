"""LMCache's own ``MooncakestoreConnector``, with this store in Mooncake's place."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from lmcache.v1.memory_management import MemoryObj

import kvstore.connectors.mooncake_shim
from tests.engines.lmcache.inside import TOKENS, Inside
from tests.support.cluster import Cluster


def same(one: MemoryObj, other: MemoryObj | None) -> bool:
    return (
        other is not None
        and one.get_shape() == other.get_shape()
        and one.get_dtype() == other.get_dtype()
        and one.get_memory_format() == other.get_memory_format()
        and bytes(one.byte_array) == bytes(other.byte_array)
    )


@pytest.fixture
def in_mooncakes_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = {name for name in sys.modules if name.partition(".")[0] == "mooncake"}
    assert "mooncake.store" not in before
    monkeypatch.setenv("PYTHONPATH", kvstore.connectors.mooncake_shim.python_path({}))
    monkeypatch.setattr(sys, "path", list(sys.path))
    kvstore.connectors.mooncake_shim.install()
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mooncake"]:
        if name not in before:
            del sys.modules[name]


@pytest.mark.usefixtures("in_mooncakes_place")
@pytest.mark.parametrize("save_chunk_meta", [True, False])
def test_chunks_come_back_byte_for_byte(store: Cluster, save_chunk_meta: bool) -> None:
    extra = {
        "save_chunk_meta": save_chunk_meta,
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": store.address,
        "local_hostname": "127.0.0.1",
        "protocol": "tcp",
        "global_segment_size": 0,
        "transfer_timeout": 30,
    }
    engine = Inside(extra)
    try:
        assert kvstore.connectors.mooncake_shim.is_ours(sys.modules["mooncake.store"].__file__)
        lengths = [TOKENS, TOKENS, TOKENS, 17]
        keys = [engine.key(number) for number in range(4)]
        chunks = [engine.chunk(number, tokens) for number, tokens in enumerate(lengths)]
        engine.put(keys, chunks)
        assert engine.backend.batched_contains([*keys, engine.key(99)]) == 4
        found = engine.get([*keys, engine.key(99)])
        assert found[4] is None
        assert all(map(same, chunks, found))
        assert [each.objects for each in store.status().namespaces] == [4], "in this store"
    finally:
        engine.close()
