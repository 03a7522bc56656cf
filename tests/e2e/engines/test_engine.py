"""What the connector promises, on real vLLM engines, each in its process, and a real store."""

from __future__ import annotations

import json
import re
from pathlib import Path

from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import MakeModel, StartEngine, prompt
from tests.e2e.engines.engine import Engine, Result, transfer_config
from tests.support.cluster import Cluster
from tests.support.wait import until

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
    assert [each.stored_tokens for each in first] == [WHOLE] * 3
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
        assert any(f"key_ignored key={key} see=" in line for line in one.log)
    assert any("key_missing key=global_segment_size" in line for line in one.log)


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
    retain = {"action_id": "a", "action_type": "tool_wait", "action_version": "1.0", "payload": {}}
    hint = {"protocol_version": "0.1", "message_id": "m", "actions": [retain]}
    kept = producer.generate([prompt(4)], params={"pin_ms": 60_000, "kv_hint": hint})
    assert kept[0].stored_tokens == WHOLE
    producer.saved()
    until(lambda: objects("pinned_objects") == blocks)
    until(lambda: dict(store.status().counters).get("hints.retain.accepted") == 1)
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
    for each in store.client().status().namespaces:
        store.client().clear(each.name)
    one.generate(prompts)  # from its own cache, which has no blocks before the window
    one.saved()
    one.reset()
    last = one.generate(prompts)
    assert cached(last) == [8 * BLOCK_TOKENS] * 3
    assert tokens(plain) == tokens(last)


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
