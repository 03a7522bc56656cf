"""What users of an engine see when the store stops, dies, is too small or not meant for them."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import StartEngine, prompt
from tests.e2e.engines.engine import Engine, transfer_config
from tests.e2e.engines.test_shapes import THREADS
from tests.support.cluster import Cluster
from tests.support.wait import until

WHOLE = 4 * BLOCK_TOKENS
NOTICED_S = 0.05
GOOD_RUNS = 3
RUNS_MAX = 15


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_master_that_stops_or_dies_does_not_hold_up_a_running_stream(
    store: Cluster, llama: Path, plain: Engine, engine: StartEngine, how: signal.Signals
) -> None:
    """Neither the longest gap between two tokens of a stream nor the longest wait of new requests
    is longer than without a store, three times: a busy machine delays either at times, what holds
    up a stream does it each time."""
    with_store = engine(llama, transfer_config(store.address, lookup_deadline_ms=20))
    plain.reset()
    good, bad = 0, []
    for run in range(-1, RUNS_MAX):  # the first one warms up
        master = store.master_server
        new = [prompt(1_000 + 10 * run + number) for number in range(8)]
        without_it = plain.stream(prompt(run + 1), new)
        with_it = with_store.stream(prompt(run + 1), new, pid=master.pid, signal=how)
        if how is signal.SIGSTOP:
            master.resume()
        else:
            master.process.wait()
            store.master()
        until(lambda: store.status().epoch)
        if run < 0:
            continue
        assert with_it.cached == [0] * 8
        longer_s = (
            with_it.worst_gap_s - without_it.worst_gap_s,
            max(with_it.first_token_s) - max(without_it.first_token_s),
        )
        if max(longer_s) >= NOTICED_S:
            bad.append((without_it, with_it))
            continue
        good += 1
        if good == GOOD_RUNS:
            break
    else:
        pytest.fail(f"{good} of {RUNS_MAX} runs were not held up: {bad}")

    def hit() -> bool:
        with_store.reset()
        (found,) = with_store.generate([prompt(7)])
        with_store.saved()
        return found.cached == WHOLE

    until(hit, within_s=60)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_node_that_dies_between_lookup_and_load(
    store: Cluster, llama: Path, engine: StartEngine, policy: str
) -> None:
    settings: dict[str, Any] = {"transports": ["tcp"]}
    one = engine(llama, transfer_config(store.address, policy=policy, **settings))
    first = one.generate([prompt(1)])
    one.saved()
    one.reset()
    one.kill_before_load(store.nodes[0].pid)
    (again,) = one.generate([prompt(1)])
    store.nodes[0].process.wait()

    if policy == "recompute":
        assert again.tokens == first[0].tokens
    else:
        assert again.reason == "error"
    metrics = one.metrics()
    assert metrics["load_failures"] == metrics["loaded_requests"] == 1
    warned = any("kv_load_failure_policy is 'fail'" in line for line in one.log)
    assert warned == (policy == "fail")
    assert one.generate([prompt(2)])[0].reason == "length"


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ({"dtype": "bfloat16"}, "dtype: 'torch.bfloat16' here, 'torch.float32' there"),
        ({"block_size": 64}, "must be equal: groups.0.block_tokens: 64 here, 128 there"),
        ({"tensor_parallel_size": 2, "environ": THREADS}, ": can be reconciled: tensor-parallel"),
        ({"environ": {"PYTHONHASHSEED": "7"}}, "must be equal: none_hash"),
    ],
    ids=["dtypes", "block-sizes", "ranks", "hash-seeds"],
)
def test_engines_that_differ_share_no_block_and_are_told_so(
    store: Cluster, llama: Path, engine: StartEngine, what: dict[str, Any], told: str
) -> None:
    one = engine(llama, transfer_config(store.address))
    one.generate([prompt(1)])
    one.saved()
    other: Engine = engine(llama, transfer_config(store.address), **what)
    assert other.generate([prompt(1)])[0].cached == 0
    other.saved()
    until(lambda: any("FLEET" in line and told in line for line in other.log))
    one.reset()
    assert one.generate([prompt(1)])[0].cached == WHOLE


def test_a_pool_far_too_small_costs_hits_and_nothing_else(
    tmp_path: Path, llama: Path, plain: Engine, engine: StartEngine
) -> None:
    """Of 80 blocks 15 fit."""
    small = Cluster(tmp_path)
    try:
        small.start(memory="8MiB")
        prompts = [prompt(seed) for seed in range(20)]
        right = [each.tokens for each in plain.generate(prompts)]
        one = engine(llama, transfer_config(small.address))
        for _ in range(2):
            found = one.generate(prompts)
            assert [each.tokens for each in found] == right
            one.saved()
            one.reset()
        metrics = one.metrics()
        assert metrics["pinned_blocks"] == 0
        assert metrics["breaker_open"] == 0
        small.finish()
    finally:
        small.close()
