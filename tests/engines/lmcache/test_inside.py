"""``KVStoreConnector`` behind LMCache's own ``RemoteBackend``, as in an engine's process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryObj

from kvstore.connectors.engine import guard
from kvstore.connectors.lmcache.chunks import _description
from kvstore.connectors.lmcache.identity import ChunkNamespaces
from kvstore.connectors.lmcache.remote import KVStoreConnector
from kvstore.errors import UnavailableError
from kvstore.limits import BATCH_KEYS_MAX
from tests.engines.lmcache.inside import TOKENS, Inside
from tests.engines.lmcache.tasks import DEADLINE_S, timed
from tests.support.cluster import SHORT, Cluster
from tests.support.waiting import until

StartInside = Callable[..., Inside]


def same(one: MemoryObj, other: MemoryObj | None) -> bool:
    return (
        other is not None
        and one.get_shape() == other.get_shape()
        and one.get_dtype() == other.get_dtype()
        and one.get_memory_format() == other.get_memory_format()
        and bytes(one.byte_array) == bytes(other.byte_array)
    )


def kept(monkeypatch: pytest.MonkeyPatch, engine: Inside) -> list[MemoryObj]:
    """What gets allocate from now on. LMCache takes back what nobody refers to any more, and warns;
    what is in this list, somebody must give back."""
    allocated: list[MemoryObj] = []
    chunks = engine.backend.connection.getWrappedConnector()._chunks
    allocate = chunks._allocate

    def keeping(*arguments: Any) -> Any:
        memory = allocate(*arguments)
        allocated.append(memory)
        return memory

    monkeypatch.setattr(chunks, "_allocate", keeping)
    return allocated


@pytest.mark.parametrize("save_chunk_meta", [True, False])
def test_chunks_come_back_byte_for_byte_also_in_another_engine(
    inside: StartInside, save_chunk_meta: bool
) -> None:
    first, second = (inside(extra={"save_chunk_meta": save_chunk_meta}) for _ in range(2))
    keys = [first.key(number) for number in range(5)]
    lengths = [TOKENS, TOKENS, TOKENS, 17, 1]
    chunks = [first.chunk(number, tokens) for number, tokens in enumerate(lengths)]
    first.put(keys, chunks)
    assert [each.get_ref_count() for each in chunks] == [1] * 5, "the puts hold nothing any more"
    for each in (first, second):
        assert each.backend.batched_contains([*keys, each.key(99)]) == 5
        assert each.backend.contains(keys[4])
        found = each.get([*keys, each.key(99)])
        assert found[5] is None
        assert all(map(same, chunks, found))
        assert [got.get_ref_count() for got in found[:5] if got is not None] == [1] * 5
        for got in found[:5]:
            assert got is not None
            got.ref_count_down()
    assert second.in_use() == 0


def test_asynchronous_calls_stop_at_the_first_miss(
    inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = inside()
    allocated = kept(monkeypatch, first)
    keys = [first.key(number) for number in range(4)]
    chunks = [first.chunk(number) for number in range(4)]
    first.put([keys[0], keys[1], keys[3]], [chunks[0], chunks[1], chunks[3]])
    held = first.in_use()
    assert first.run(first.backend.batched_async_contains("request", keys)) == 2
    found = first.run(first.backend.batched_get_non_blocking("request", keys))
    assert len(found) == 2
    assert all(map(same, chunks, found))
    assert [each.get_ref_count() for each in allocated] == [1, 1, 0]
    for each in found:
        each.ref_count_down()
    assert first.in_use() == held


def test_what_a_serializer_has_made_comes_back(inside: StartInside) -> None:
    first = inside()
    connection = first.backend.connection
    sent = BytesBufferMemoryObj(bytes(range(256)) * 5)
    first.run(connection.put(first.key(1), sent))
    [found] = first.run(connection.batched_get([first.key(1)]))
    assert bytes(found.byte_array) == bytes(sent.byte_array)
    assert found.get_memory_format() == sent.get_memory_format()


def test_more_chunks_than_a_call_may_have(inside: StartInside) -> None:
    """Of a serializer, so that their descriptions are read, too."""
    first = inside()
    connection = first.backend.connection
    keys = [first.key(number) for number in range(BATCH_KEYS_MAX + 3)]
    sent = [BytesBufferMemoryObj(number.to_bytes(4, "big")) for number in range(len(keys))]
    first.run(connection.batched_put(keys, sent))
    assert first.backend.batched_contains(keys) == len(keys)
    found = first.run(connection.batched_get(keys))
    assert [bytes(each.byte_array) for each in found if each] == [
        bytes(each.byte_array) for each in sent
    ]


def test_what_was_read_before_an_error_is_kept(
    inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = inside()
    keys = [first.key(number) for number in range(4)]
    chunks = [first.chunk(number) for number in range(4)]
    first.put(keys, chunks)
    held = first.in_use()
    monkeypatch.setattr(guard, "BATCH_KEYS_MAX", 2)
    client = first.backend.connection.getWrappedConnector()._chunks._client
    get_into = client.get_into

    def once(*arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(client, "get_into", fails)
        return get_into(*arguments, **more)

    def fails(*_: Any, **__: Any) -> Any:
        raise UnavailableError("gone")

    monkeypatch.setattr(client, "get_into", once)
    found = first.get(keys)
    assert [each is not None for each in found] == [True, True, False, False]
    assert all(map(same, chunks[:2], found))
    for each in found[:2]:
        assert each is not None
        each.ref_count_down()
    assert first.in_use() == held


@pytest.mark.parametrize("other", ["model", "weights", "dtype", "heads", "tags"])
def test_what_means_something_else_is_a_miss(inside: StartInside, other: str) -> None:
    first = inside()
    first.put([first.key(1)], [first.chunk(1)])
    different: dict[str, Any] = {
        "model": {"model": "tests/other"},
        "weights": {"settings": {"model_id": "others"}},
        "dtype": {"dtype": torch.float16},
        "heads": {"heads": 4},
        "tags": {},
    }
    second = inside(**different[other])
    wanted = second.key(1, **({"user": "x"} if other == "tags" else {}))
    assert not second.backend.contains(wanted)
    assert second.get([wanted]) == [None]
    chunk = second.chunk(2)
    second.put([wanted], [chunk])
    assert same(chunk, second.get([wanted])[0])
    assert not same(chunk, first.get([first.key(1)])[0])


def test_what_the_bytes_depend_on_besides_is_part_of_the_namespace(store: Cluster) -> None:
    client, layout = store.client(), (((2, 3), "torch.float16"),)

    def namespace(**more: object) -> str | None:
        namespaces = ChunkNamespaces(client, logging.getLogger("test"), model_id="m", more=more)
        try:
            return namespaces.of("model", layout, announce=False)
        finally:
            namespaces.stop()
            namespaces.join()

    assert namespace(door="daemon") is not None
    assert namespace(door="daemon") == namespace(door="daemon")
    assert namespace(door="daemon") != namespace(door="in-process")
    assert namespace(hashes="builtin") != namespace(hashes="sha256_cbor")


def test_a_chunk_that_was_replaced_before_it_was_read(
    inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one of the same size that means something else: after the size was known."""
    first = inside()
    chunk = first.chunk(1)
    first.put([first.key(1)], [chunk])
    held = first.in_use()
    connector = first.backend.connection.getWrappedConnector()
    read_into = connector._chunks._read_into

    def late(*arguments: Any) -> Any:
        assert first.backend.remove(first.key(1))
        other = BytesBufferMemoryObj(bytes(chunk.get_size()))
        first.run(first.backend.connection.put(first.key(1), other))
        return read_into(*arguments)

    monkeypatch.setattr(connector._chunks, "_read_into", late)
    allocated = kept(monkeypatch, first)
    assert first.get([first.key(1)]) == [None]
    assert [each.get_ref_count() for each in allocated] == [0]
    assert first.in_use() == held


def test_what_is_no_chunk_spoils_no_other_one(inside: StartInside, store: Cluster) -> None:
    """Bytes of a stranger under the name of a chunk, with a description or without."""
    first = inside()
    chunk = first.chunk(1)
    keys = [first.key(number) for number in range(4)]
    first.put([keys[0]], [chunk])
    held = first.in_use()
    chunks = first.backend.connection.getWrappedConnector()._chunks
    own, namespace, client = chunks._description_bytes, chunks._namespace(), store.client()
    description = bytes(_description(first.chunk(2, 17)))
    for key, data in (
        (keys[1], bytes(20_000) + description),
        (keys[2], bytes(100) + b"\xff" * own),
        (keys[3], bytes(own - 1)),
    ):
        client.put(key.to_string(), data, namespace=namespace)
    found = first.get(keys)
    assert same(chunk, found[0])
    assert found[1:] == [None] * 3
    assert found[0] is not None
    found[0].ref_count_down()
    assert first.in_use() == held


def test_long_keys_are_hashed_and_not_cut(inside: StartInside) -> None:
    path = "/models/" + "x" * 300
    first = inside(model=path)
    keys = [first.key(number) for number in range(3)]
    assert all(len(key.to_string()) > 256 for key in keys)
    chunks = [first.chunk(number) for number in range(3)]
    first.put(keys, chunks)
    assert all(map(same, chunks, first.get(keys)))
    assert inside(model=path + "x").backend.batched_contains(keys) == 0


def test_list_and_remove(inside: StartInside) -> None:
    first = inside()
    keys = [first.key(number, user="x") for number in range(3)]
    first.put(keys, [first.chunk(1)] * 3)
    connection = first.backend.connection
    assert set(first.run(connection.list())) == {key.to_string() for key in keys}
    assert first.backend.remove(keys[0])
    assert not first.backend.remove(keys[0])
    assert first.backend.batched_contains(keys) == 0
    assert first.backend.batched_contains(keys[1:]) == 2


def test_no_memory_of_lmcache_is_a_miss_at_once(inside: StartInside) -> None:
    first = inside()
    chunk = first.chunk(1)
    first.put([first.key(1)], [chunk])
    shapes, dtypes = first.metadata.get_shapes(), first.metadata.get_dtypes()
    held = []
    while (memory := first.memory.allocate(shapes, dtypes, busy_loop=False)) is not None:
        held.append(memory)
    assert timed(lambda: first.get([first.key(1)])) == [None]
    held.pop().ref_count_down()
    assert same(chunk, first.get([first.key(1)])[0])


def test_lmcache_goes_on_without_a_connector_that_is_set_up_wrongly(store: Cluster) -> None:
    with pytest.raises(AssertionError, match="has not made the connector"):
        Inside(store.address, settings={"no_such": 1})


def test_a_second_store_by_another_name(
    inside: StartInside, store: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    other = Cluster(tmp_path / "second", settings=SHORT)
    try:
        other.start(memory="32MiB")
        settings = {"remote_storage_plugin.kvstore.second.master": other.address}
        first = inside(extra=settings)
        second = inside(plugin="kvstore.second", settings={"master": other.address})
        first.put([first.key(1)], [first.chunk(1)])
        assert first.backend.contains(first.key(1))
        assert not second.backend.contains(second.key(1))
        second.close()
    finally:
        other.close()


class Slow:
    """Holds up what a thread of the connector does, until it is told to go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connector: KVStoreConnector, name: str):
        self.entered, self.go_on = threading.Event(), threading.Event()
        original = getattr(connector._chunks, name)

        def slow(*args: Any) -> Any:
            result = original(*args)
            self.entered.set()
            assert self.go_on.wait(30)
            return result

        monkeypatch.setattr(connector._chunks, name, slow)


def test_a_get_that_is_given_up_gives_its_memory_back(
    inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = inside()
    chunk = first.chunk(1)
    first.put([first.key(1)], [chunk])
    held = first.in_use()
    connector = first.backend.connection.getWrappedConnector()
    slow = Slow(monkeypatch, connector, "get")
    task = asyncio.run_coroutine_threadsafe(connector.batched_get([first.key(1)]), first.loop)
    assert slow.entered.wait(30)
    assert first.in_use() > held
    task.cancel()
    slow.go_on.set()
    until(lambda: first.in_use() == held)


def test_a_put_that_is_given_up_keeps_its_memory_until_it_was_read(
    inside: StartInside, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = inside()
    chunk = first.chunk(1)
    connector = first.backend.connection.getWrappedConnector()
    slow = Slow(monkeypatch, connector, "put")
    task = asyncio.run_coroutine_threadsafe(
        connector.batched_put([first.key(1)], [chunk]), first.loop
    )
    assert slow.entered.wait(30)
    task.cancel()
    assert chunk.get_ref_count() == 2
    slow.go_on.set()
    until(lambda: chunk.get_ref_count() == 1)


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_a_master_that_is_gone_makes_misses_in_time_and_comes_back(
    inside: StartInside, store: Cluster, how: str
) -> None:
    first = inside()
    chunk = first.chunk(1)
    first.put([first.key(1)], [chunk])
    held = first.in_use()
    master = store.master_server
    master.kill() if how == "killed" else master.freeze()
    for _ in range(4):
        assert not timed(lambda: first.backend.contains(first.key(2)))
        assert timed(lambda: first.backend.batched_contains([first.key(2)])) == 0
        timed(lambda: first.put([first.key(3)], [chunk]))
        assert timed(lambda: first.get([first.key(4)])) == [None]
    assert first.in_use() == held
    assert chunk.get_ref_count() == 1
    store.master() if how == "killed" else master.resume()
    until(lambda: first.backend.contains(first.key(1)), within_s=40)
    assert same(chunk, first.get([first.key(1)])[0])


def test_a_node_that_is_killed_makes_misses(inside: StartInside, store: Cluster) -> None:
    first = inside(settings={"transports": "tcp"})
    chunk = first.chunk(1)
    first.put([first.key(1)], [chunk])
    assert first.backend.contains(first.key(1))
    [node] = store.nodes
    node.kill()
    assert timed(lambda: first.get([first.key(1)])) == [None]
    node.entry.unlink()
    store.node(memory="64MiB")

    def again() -> bool:
        first.put([first.key(2)], [chunk])
        return bool(first.backend.contains(first.key(2)))

    until(again, within_s=40)
    assert same(chunk, first.get([first.key(2)])[0])


def test_an_engine_starts_without_a_store(inside: StartInside, store: Cluster) -> None:
    master = store.master_server
    master.kill()
    first = timed(inside)
    assert not timed(lambda: first.backend.contains(first.key(1)))
    store.master()
    until(lambda: first.run(first.backend.connection.list()) == [], within_s=40)


def test_close_with_calls_under_way(inside: StartInside, store: Cluster) -> None:
    first = inside()
    master = store.master_server
    master.freeze()
    try:
        chunk = first.chunk(1)
        connection = first.backend.connection
        calls = [
            asyncio.run_coroutine_threadsafe(call, first.loop)
            for call in (
                connection.batched_get([first.key(1)]),
                connection.batched_put([first.key(2)], [chunk]),
                connection.exists(first.key(3)),
            )
        ]
        chunk.ref_count_up()  # RemoteBackend does, for a put
        timed(first.backend.close)
        assert [call.result(DEADLINE_S) for call in calls] == [[None], None, False]
        assert chunk.get_ref_count() == 1
    finally:
        master.resume()
