"""What the connector promises, on real vLLM engines, each in its process, and a real store."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import MakeModel, StartEngine, prompt
from tests.e2e.engines.engine import Engine, Result, transfer_config
from tests.support.cluster import Cluster
from tests.support.processes import free_port
from tests.support.waiting import until

WHOLE = 4 * BLOCK_TOKENS
"""Of a prompt of 600 tokens: its full blocks."""


def tokens(results: list[Result]) -> list[list[int]]:
    return [each.tokens for each in results]


def cached(results: list[Result]) -> list[int]:
    return [each.cached for each in results]


def test_one_engine_finds_every_full_block_again(
    store: Cluster, llama: Path, plain: Engine, engine: StartEngine
) -> None:
    prompts = [prompt(seed) for seed in range(3)]
    right = tokens(plain.generate(prompts))
    one = engine(llama, transfer_config(store.address))

    first = one.generate(prompts)
    assert cached(first) == [0, 0, 0]
    assert [each.params for each in first] == [{"stored_tokens": WHOLE}] * 3
    one.saved()
    assert one.reset()
    again = one.generate(prompts)

    assert cached(again) == [WHOLE] * 3
    assert tokens(first) == tokens(again) == right
    metrics = one.metrics()
    assert metrics["hit_tokens"] == 3 * WHOLE
    assert metrics["save_blocks"] == metrics["load_blocks"] == 12
    assert metrics["load_bytes"] == metrics["save_bytes"] > 0
    assert metrics["pinned_blocks"] == metrics["breaker_open"] == 0


def test_the_file_and_the_options_of_a_guide(
    store: Cluster, llama: Path, engine: StartEngine, tmp_path: Path
) -> None:
    """As in the guide for vLLM 0.6.4, with a line for the master, and options of today."""
    guide = {
        "prefill_url": "127.0.0.1:13003", "decode_url": "127.0.0.1:13103", "protocol": "tcp",
        "metadata_server": "127.0.0.1:2379", "metadata_backend": "etcd", "device_name": "",
        "master_server_address": store.address,
    }  # fmt: skip
    config = tmp_path / "mooncake.json"
    config.write_text(json.dumps(guide))
    transfer = transfer_config("", num_workers=10, load_async=True, save_decode_cache=True)
    options = dict(transfer["kv_connector_extra_config"])  # type: ignore[call-overload]
    del options["master"]
    environ = {"MOONCAKE_CONFIG_PATH": str(config)}
    one = engine(llama, transfer | {"kv_connector_extra_config": options}, environ=environ)
    first = one.generate([prompt(1)])
    one.saved()
    one.reset()
    again = one.generate([prompt(1)])
    assert cached(again) == [WHOLE]
    assert tokens(again) == tokens(first)
    for key in ("prefill_url", "num_workers"):
        assert any(f"key_ignored key={key} reason=" in line for line in one.log)
    assert any("key_missing key=global_segment_size" in line for line in one.log)


def test_a_prompt_of_whole_blocks_leaves_one_to_compute(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    """At least one token must be computed, so the last block cannot be loaded."""
    one = engine(llama, transfer_config(store.address))
    first = one.generate([prompt(1, WHOLE)])
    one.saved()
    one.reset()
    again = one.generate([prompt(1, WHOLE)])
    assert cached(again) == [WHOLE - BLOCK_TOKENS]
    assert tokens(again) == tokens(first)


def test_roles_and_what_a_request_may_ask_for(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    producer = engine(llama, transfer_config(store.address, "kv_producer"))
    quiet = transfer_config(store.address, "kv_consumer", save_decode=False)
    consumer = engine(llama, quiet)
    first, second, third = prompt(1), prompt(2), prompt(3)

    put = producer.generate([first])
    unstored = producer.generate([second], params={"no_store": True})
    producer.saved()
    producer.reset()
    assert cached(producer.generate([first])) == [0], "a producer only puts"

    got = consumer.generate([first])
    assert cached(got) == [WHOLE]
    assert tokens(got) == tokens(put)
    missed = consumer.generate([second])
    assert cached(missed) == [0]
    assert tokens(missed) == tokens(unstored)
    assert missed[0].params is None, "a consumer only gets"
    consumer.reset()
    assert cached(consumer.generate([first], params={"no_load": True})) == [0]
    consumer.reset()
    most = {"max_load_tokens": 2 * BLOCK_TOKENS + 5}
    assert cached(consumer.generate([first], params=most)) == [2 * BLOCK_TOKENS]

    consumer.generate([third])
    assert cached(producer.generate([third])) == [0]
    assert consumer.metrics()["save_blocks"] == 0

    def objects(field: str = "objects") -> int:
        return sum(getattr(each, field) for each in store.status().namespaces)

    blocks = WHOLE // BLOCK_TOKENS
    kept = producer.generate([prompt(4)], params={"pin_ms": 60_000})
    assert kept[0].params == {"stored_tokens": WHOLE}
    producer.saved()
    until(lambda: objects("pinned_objects") == blocks)
    before, saved = objects(), producer.metrics()["save_blocks"]
    producer.generate([prompt(5)], params={"ttl_ms": 500})
    producer.saved()
    assert producer.metrics()["save_blocks"] == saved + blocks
    until(lambda: objects() == before)


def test_what_was_generated_is_found_on_another_engine(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    """The next turn of a conversation."""
    one = engine(llama, transfer_config(store.address))
    other = engine(llama, transfer_config(store.address))
    turn = prompt(1, BLOCK_TOKENS + 60)
    (said,) = one.generate([turn], tokens=2 * BLOCK_TOKENS)
    one.saved()
    longer = turn + said.tokens + prompt(2, 30)
    (there,) = other.generate([longer])
    assert there.cached == 3 * BLOCK_TOKENS
    one.reset()
    (here,) = one.generate([longer], params={"no_load": True})
    assert here.tokens == there.tokens


def test_another_model_in_a_directory_of_the_same_name_is_another_model(
    store: Cluster, make_model: MakeModel, engine: StartEngine
) -> None:
    """Equal configuration, equal path but for its beginning, other weights; and it is told so."""
    ours, theirs = make_model("--seed", "1"), make_model("--seed", "2")
    assert ours.name == theirs.name
    one = engine(ours, transfer_config(store.address))
    one.generate([prompt(1)])
    one.saved()
    assert not any("FLEET" in line for line in one.log)
    other = engine(theirs, transfer_config(store.address))
    plain = engine(theirs, None)
    found = other.generate([prompt(1)])
    assert cached(found) == [0]
    assert tokens(found) == tokens(plain.generate([prompt(1)]))
    other.saved()
    assert any("FLEET" in line and "weights" in line for line in other.log)


def test_a_reset_of_one_model_leaves_the_others(
    store: Cluster, make_model: MakeModel, engine: StartEngine
) -> None:
    one = engine(make_model("--seed", "1"), transfer_config(store.address))
    other = engine(make_model("--seed", "2"), transfer_config(store.address))
    for each in (one, other):
        each.generate([prompt(1)])
        each.saved()
    assert one.reset(store=True)
    other.reset()
    assert cached(other.generate([prompt(1)])) == [WHOLE]
    assert cached(one.generate([prompt(1)])) == [0]


def test_events_tell_what_the_store_has_and_has_no_more(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    one = engine(llama, transfer_config(store.address), kv_events_config=events)
    one.generate([prompt(1)])
    one.saved()
    assert one.events() == [{"kind": "BlockStored", "keys": 4}]
    one.reset(store=True)
    one.generate([prompt(2, BLOCK_TOKENS + 1)])
    one.saved()
    assert one.events() == [
        {"kind": "BlockRemoved", "keys": 4},
        {"kind": "BlockStored", "keys": 1},
    ]


def test_an_engine_that_hears_events_reports_what_the_store_has_lost(
    tmp_path: Path, llama: Path, engine: StartEngine
) -> None:
    """While it hears them it asks about nothing else, so each report comes from an event."""
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with Cluster(tmp_path, settings={"http_port": free_port(), "events": "on"}) as store:
        store.start(memory="256MiB")
        one = engine(llama, transfer_config(store.address), kv_events_config=events)
        one.generate([prompt(1)])
        one.saved()
        assert one.events() == [{"kind": "BlockStored", "keys": 4}]
        client = store.client()
        blocks = [row for row in client.list_objects() if row.namespace.startswith("vllm/")]

        def times(what: str) -> int:
            return sum(what in line for line in one.log)

        def removed(number: int) -> None:
            """Removes the last block that is left, and waits until that was reported."""
            row = max(blocks, key=lambda each: each.depth)
            blocks.remove(row)
            assert client.remove(row.key, namespace=row.namespace)
            found: list[dict[str, object]] = []

            def reported() -> bool:
                one.generate([prompt(2, 5)])  # a step
                found.extend(one.events())
                return bool(found)

            until(reported, within_s=60)
            assert found == [{"kind": "BlockRemoved", "keys": 1}]
            assert times("events_heard") == number
            assert times("events_not_heard") == number - 1

        until(lambda: times("events_heard") == 1, within_s=60)
        removed(1)
        store.master_server.kill()
        until(lambda: times("events_not_heard") == 1, within_s=60)
        store.master()
        until(lambda: times("events_heard") == 2, within_s=60)
        removed(2)


def test_an_engine_works_without_a_store_and_uses_it_when_it_comes(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    store.master_server.kill()
    one = engine(llama, transfer_config(store.address))
    without = one.generate([prompt(seed) for seed in range(8)])
    assert cached(without) == [0] * 8
    one.saved()
    store.master()

    def hit() -> Result | None:
        one.reset()
        (found,) = one.generate([prompt(0)])
        one.saved()
        return found if found.cached else None

    # Until a breaker has let a lookup and a save through, and the node's memory is free again.
    found = until(hit, within_s=60)
    assert found is not None
    assert found.cached == WHOLE
    assert found.tokens == without[0].tokens


def test_a_master_that_is_stopped_costs_requests_nothing_they_would_notice(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    one = engine(llama, transfer_config(store.address, lookup_deadline_ms=20))
    one.generate([prompt(100)])
    one.saved()
    store.master_server.freeze()
    try:
        # One at a time: if each waited for the store until a time-out, this would take minutes.
        results = [one.generate([prompt(seed)])[0] for seed in range(30)]
        metrics = one.metrics()
    finally:
        store.master_server.resume()
    assert all(len(each.tokens) == 8 for each in results)
    late, failed = metrics["lookups_late"], metrics["lookups_failed"]
    assert late + failed >= 3  # one lookup can be both
    assert late < len(results), "a breaker keeps it from asking every time"


def test_blocks_that_cannot_be_loaded_are_computed_and_not_tried_for_ever(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    """The node is stopped, and the master does not know yet: it still says where the blocks are."""
    settings: dict[str, Any] = {"transports": ["tcp"]}
    settings["lookup_deadline_ms"] = 10_000  # a late answer would be a miss, with nothing to load
    one = engine(llama, transfer_config(store.address, **settings))
    first = one.generate([prompt(1)])
    one.saved()
    one.reset()
    (node,) = store.nodes
    node.freeze()
    try:
        again = one.generate([prompt(1)])
        metrics = one.metrics()
    finally:
        node.resume()
    assert tokens(again) == tokens(first)
    assert 1 <= metrics["load_failures"] <= 2


def test_a_sliding_window_model_hits_and_is_right(
    store: Cluster, make_model: MakeModel, engine: StartEngine
) -> None:
    """Two cache groups, of which one keeps a window of two blocks."""
    model = make_model("--sliding")
    prompts = [prompt(seed, 1_100) for seed in range(3)]
    plain = engine(model, None).generate(prompts)
    one = engine(model, transfer_config(store.address))
    first = one.generate(prompts)
    one.saved()
    before = one.metrics()
    one.reset()
    again = one.generate(prompts)
    assert cached(again) == [8 * BLOCK_TOKENS] * 3
    assert tokens(plain) == tokens(first) == tokens(again)
    loaded = one.metrics()["load_blocks"] - before["load_blocks"]
    groups = {
        int(found[1])
        for each in store.client().status().namespaces
        if (found := re.search(r"/g(\d+)/", each.name))
    }
    assert len(groups) > 1
    assert loaded < 3 * 8 * len(groups), "blocks before the window are not loaded"


HOLE = """
    import threading
    from vllm import SamplingParams
    from vllm.distributed.kv_transfer import get_kv_transfer_group
    from kvstore.errors import NoSpaceError

    client = get_kv_transfer_group()._worker._client
    put, passed = client.put_chain, threading.Event()

    def full(*arguments, **more):
        client.put_chain = put
        assert passed.wait(60)
        raise NoSpaceError("everything is leased")

    client.put_chain = full
    engine, steps = llm.llm_engine, 0
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine.add_request("r", {"prompt_token_ids": PROMPT}, sampling)
    while engine.has_unfinished_requests():
        for done in engine.step():
            result = list(done.outputs[0].token_ids)
        steps += 1
        if steps == 4:
            passed.set()
            while get_kv_transfer_group()._worker._saves_left:
                passed.wait(0.01)
                threading.Event().wait(0.01)
"""


def test_a_block_that_left_the_window_unsaved_is_saved_by_the_next_that_computes_it(
    store: Cluster, make_model: MakeModel, engine: StartEngine
) -> None:
    """The first save of a long prompt finds no room, and is told so when the window of two blocks
    has passed its blocks. What comes after the hole is not found until that is filled: whoever
    needs it computes it, and saves it."""
    model, whole = make_model("--sliding"), prompt(1, 1_100)
    one = engine(model, transfer_config(store.address), max_num_batched_tokens=256)
    first = one.run(HOLE.replace("PROMPT", str(whole)))
    one.saved()

    def objects() -> list[int]:
        status = store.client().status()
        return sorted(each.objects for each in status.namespaces if "/g" in each.name)

    assert objects() == [6, 8]

    other = engine(model, transfer_config(store.address))
    (missed,) = other.generate([whole])
    assert (missed.cached, missed.tokens) == (0, first)
    other.saved()
    assert objects() == [8, 8]
    one.reset()
    (found,) = one.generate([whole])
    assert (found.cached, found.tokens) == (8 * BLOCK_TOKENS, first)
    beginning = whole[: 3 * BLOCK_TOKENS]
    one.reset()
    assert cached(one.generate([beginning + prompt(3, 40)])) == [3 * BLOCK_TOKENS]


def test_two_ranks_each_have_their_part(
    store: Cluster, llama: Path, plain: Engine, engine: StartEngine
) -> None:
    """Tensor parallel 2: every block is two objects."""
    prompts = [prompt(seed) for seed in range(2)]
    right = tokens(plain.generate(prompts))
    environ = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    two = engine(llama, transfer_config(store.address), tensor_parallel_size=2, environ=environ)
    first = two.generate(prompts)
    two.saved()
    two.reset()
    again = two.generate(prompts)
    assert cached(again) == [WHOLE] * 2, two.metrics()
    assert tokens(first) == tokens(again) == right
    parts = [each for each in store.client().status().namespaces if each.name.startswith("vllm/")]
    assert sorted(each.name.rpartition("/")[2] for each in parts) == ["p0t0", "p0t1"]
    assert [each.objects for each in parts] == [8, 8]
