"""What is loaded and what is saved, decided beside a scheduler that keeps its own books."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.config import ConnectorConfig
from kvstore.connectors.vllm.groups import NULL_BLOCK, Groups
from kvstore.connectors.vllm.messages import (
    LoadCommand,
    Run,
    SaveCommand,
    SaveResult,
    TransferCommands,
    TransferReport,
)
from kvstore.connectors.vllm.scheduler import scheduler_logic
from kvstore.connectors.vllm.scheduler.scheduler_logic import HashCache
from kvstore.limits import TTL_MS_MAX
from tests.unit.connectors.engine import HYBRID, PLAIN, Engine, Request, saved

# --- offers ---------------------------------------------------------------------------------------


def test_an_offer_is_what_the_store_has_beyond_what_is_here() -> None:
    engine = Engine()
    request = engine.add("r", 21, there=12)
    assert engine.matched(request) == 12
    assert engine.matched(request, 8) == 4
    assert engine.matched(request, 12) == 0
    assert engine.matched(request, 16) == 0


def test_one_token_is_left_to_compute() -> None:
    engine = Engine()
    assert engine.matched(engine.add("whole", 16, there=16)) == 12
    assert engine.matched(engine.add("more", 17, there=16)) == 16
    assert engine.matched(engine.add("one block", 4, there=4)) == 0
    hybrid = Engine(HYBRID)
    assert hybrid.matched(hybrid.add("hybrid", 16, there=16)) == 8


@pytest.mark.parametrize(
    ("params", "offered"),
    [
        ({"max_load_tokens": 11}, 8), ({"max_load_tokens": -3}, 0), ({"max_load_tokens": "4"}, 16),
        ({"no_load": True}, 0), ({"no_load": False}, 16), ({"stored_tokens": "many"}, 16),
    ],
)  # fmt: skip
def test_a_request_may_limit_what_is_loaded(params: dict[str, Any], offered: int) -> None:
    engine = Engine()
    assert engine.matched(engine.add("r", 21, there=16, **params)) == offered


def test_what_is_not_to_be_loaded_is_not_asked() -> None:
    engine = Engine()
    engine.matched(engine.add("r", 21, no_load=True))
    assert engine.asked.wanted == []
    producer = Engine(loads=False)
    assert producer.matched(producer.add("r", 21, there=16)) == 0
    assert producer.asked.wanted == []


# --- loads ----------------------------------------------------------------------------------------


def test_a_load_names_the_blocks_after_those_that_are_here() -> None:
    engine = Engine(HYBRID)
    request = engine.add("r", 40, there=32)
    engine.allocate(request, 16)
    assert engine.load(request, 16) == 16
    tables = engine.tables["r"].tables
    hashes = request.block_hashes
    assert engine.step().loads == [
        LoadCommand("r", [
            Run(0, hashes[4:8], tables[0][4:8], 4, hashes[3]),
            Run(1, [hashes[5], hashes[7]], tables[1][2:4], 2, hashes[3]),
        ])
    ]  # fmt: skip
    assert engine.step().loads == []
    assert engine.side.take_counters() == {"loaded_requests": 1, "hit_tokens": 16}


def test_orders_carry_the_fingerprint_and_the_draft_model() -> None:
    engine = Engine()
    engine.identity.fingerprint, engine.identity.draft = "abc", "def"
    orders = engine.step()
    assert (orders.fingerprint, orders.draft) == ("abc", "def")


def test_tokens_on_a_slow_disk_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule learns from what the engine sees of its own requests."""
    now = [0.0]
    monkeypatch.setattr(scheduler_logic, "time", SimpleNamespace(monotonic=lambda: now[0]))
    engine = Engine(blocks=2_000)
    for number in range(8):
        request = engine.add(f"computed-{number}", 400, seed=number)
        assert engine.matched(request) == 0
        for _ in range(2):  # in two steps of half a second
            engine.step({request.request_id: 200})
            engine.report_all()
            now[0] += 0.5
        engine.finish(request)
    request = engine.add("loaded", 401, there=400, seed=1)
    engine.asked.on_disk["loaded"] = 300
    assert engine.load(request) == 400
    engine.step()
    now[0] += 5.0
    engine.side.arrived(["loaded"])
    request = engine.add("slow", 401, there=400, seed=1)
    engine.asked.on_disk["slow"] = 300
    assert engine.matched(request) == 100, "asked again while it waits for blocks"
    assert engine.load(request) == 100, "what is in memory"
    request = engine.add("all in memory", 401, there=400, seed=1)
    assert engine.load(request) == 400
    assert engine.side.take_counters()["computed_stored_tokens"] == 300
    assert not engine.side.load_rule.loads_disks


# --- saves ----------------------------------------------------------------------------------------


def test_blocks_of_a_prompt_are_saved_as_they_become_full() -> None:
    engine = Engine(HYBRID)
    request = engine.add("r", 30)
    assert engine.matched(request) == 0
    assert saved(engine.step({"r": 3})) == {}
    assert saved(engine.step({"r": 4})) == {0: [0]}
    assert saved(engine.step({"r": 10})) == {0: [1, 2, 3], 1: [0, 1]}
    assert saved(engine.step({"r": 13})) == {0: [4, 5, 6], 1: [2]}
    assert saved(engine.step({"r": 1})) == {}
    engine.report_all()
    assert engine.side.pinned_blocks == 0


def test_a_save_names_blocks_keys_and_parent() -> None:
    engine = Engine()
    request = engine.add("r", 12)
    engine.step({"r": 4})
    (save,) = engine.step({"r": 8}).saves
    hashes = request.block_hashes
    assert save.runs == [Run(0, hashes[1:3], engine.tables["r"].tables[0][1:3], 1, hashes[0])]


def test_what_is_here_and_in_the_store_is_not_saved_and_what_is_only_here_is() -> None:
    engine = Engine()
    request = engine.add("r", 20, there=8)
    engine.allocate(request, 12)
    engine.fill(request, 12)
    assert engine.matched(request, 12) == 0
    request.num_computed_tokens = 12
    assert saved(engine.step({"r": 8})) == {0: [2, 3, 4]}


@pytest.mark.parametrize("save_decode", [False, True])
def test_blocks_of_generated_tokens_are_saved_only_where_wanted(save_decode: bool) -> None:
    engine = Engine(config=ConnectorConfig(save_decode=save_decode))
    engine.add("r", 6)
    blocks = [saved(engine.step({"r": tokens})).get(0, []) for tokens in (6, *[1] * 8)]
    expected = [[0], [], [1], [], [], [], [2], [], []]
    assert blocks == (expected if save_decode else [[0], *[[]] * 8])


def test_who_does_not_save_or_must_not_saves_nothing() -> None:
    engine = Engine()
    engine.add("r", 12, no_store=True)
    assert saved(engine.step({"r": 12})) == {}
    consumer = Engine(saves=False)
    request = consumer.add("r", 12)
    assert saved(consumer.step({"r": 12})) == {}
    assert consumer.finish(request) is None


def test_blocks_are_pinned_until_every_worker_has_reported() -> None:
    engine = Engine(workers=3)
    request = engine.add("r", 12)
    (save,) = engine.step({"r": 12}).saves
    assert engine.side.pinned_blocks == 3
    engine.finish(request)
    assert engine.pool.used == 3
    engine.report(save.number)
    engine.report(save.number)
    assert engine.pool.used == 3
    engine.report(save.number)
    assert engine.pool.used == 0
    assert engine.pool.freed[-3:] == save.runs[0].block_ids[::-1], "the prefix is evicted last"
    engine.side.reported(TransferReport({save.number: SaveResult(3, 3)}))
    engine.check()
    assert engine.side.take_counters() == {}


def test_a_save_that_failed_is_made_again_with_what_comes_next_and_then_given_up() -> None:
    """A chain with a hole is found by nobody."""
    engine = Engine()
    request = engine.add("r", 24)
    (save,) = engine.step({"r": 8}).saves
    engine.report(save.number, stored=False)
    (again,) = engine.step({"r": 8}).saves
    assert [(run.first, len(run.keys), run.parent) for run in again.runs] == [(0, 4, None)]
    engine.report(again.number, stored=False)
    assert engine.step({"r": 8}).saves == []
    assert engine.finish(request) is None


def test_a_save_is_told_when_the_last_worker_has_stored_it() -> None:
    engine = Engine(workers=2, events_wanted=True)
    request = engine.add("r", 12)
    engine.step({"r": 4})
    (save,) = engine.step({"r": 8}).saves
    engine.report(save.number)
    assert engine.events.take() == []
    engine.report(save.number)
    (event,) = engine.events.take()
    assert event.block_hashes == request.block_hashes[1:3]
    assert event.parent_block_hash == request.block_hashes[0]
    assert event.token_ids == list(range(4, 12))


def test_too_many_pinned_blocks_are_refused_and_saved_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_logic, "PINNED_MAX", 0.25)
    engine = Engine(blocks=20)
    engine.add("first", 20)
    engine.add("second", 8, seed=1)
    (save,) = engine.step({"first": 20}).saves
    assert saved(engine.step({"second": 8})) == {}
    assert engine.side.take_counters() == {"saves_refused": 1}
    assert saved(engine.step({"second": 1})) == {}
    engine.report(save.number)
    assert saved(engine.step({"second": 1})) == {0: [0, 1]}


def test_a_prompt_longer_than_may_be_pinned_is_saved_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_logic, "PINNED_MAX", 0.2)
    engine = Engine(HYBRID, blocks=60)
    engine.add("r", 64)  # 24 blocks, 12 may be pinned
    parts = [saved(engine.step({"r": 64}))]
    while engine.saving:
        engine.report_all()
        parts.append(saved(engine.step({"r": 1})))
    assert [index for part in parts for index in part.get(0, [])] == list(range(16))
    assert [index for part in parts for index in part.get(1, [])] == list(range(8))


# --- failures -------------------------------------------------------------------------------------


def test_what_could_not_be_loaded_is_not_offered_again() -> None:
    engine = Engine()
    request = engine.add("r", 40, there=32)
    assert engine.load(request) == 32
    engine.step()
    engine.fail_load(request, 13)
    assert "r" not in engine.asked.known
    assert engine.matched(request) == 12
    assert engine.matched(request, 12) == 0
    counted = {"loaded_requests": 1, "hit_tokens": 32, "missed_tokens": 4, "loads_failed": 1}
    assert engine.side.take_counters() == counted


def test_after_a_second_failure_all_is_computed() -> None:
    engine = Engine()
    request = engine.add("r", 40, there=32)
    engine.load(request)
    engine.step()
    engine.fail_load(request, 16)
    engine.preempt(request)
    assert engine.load(request) == 16
    engine.step()
    engine.fail_load(request, 12)
    assert engine.matched(request) == 0


def test_what_is_gone_is_saved_anew() -> None:
    engine = Engine()
    request = engine.add("r", 40, there=32)
    engine.load(request)
    engine.step()
    engine.fail_load(request, 8)
    engine.fill(request, 8)
    request.num_computed_tokens = 8
    assert saved(engine.step({"r": 32})) == {0: [2, 3, 4, 5, 6, 7, 8, 9]}


# --- the end --------------------------------------------------------------------------------------


def test_a_finished_request_says_how_much_of_it_is_stored_and_is_forgotten() -> None:
    engine = Engine(HYBRID)
    request = engine.add("r", 30, there=8)
    engine.load(request)
    engine.step()
    engine.fill(request, 8)
    request.num_computed_tokens = 8
    engine.step({"r": 22})
    assert engine.finish(request) == {"stored_tokens": 24}
    engine.step()
    assert "r" not in engine.asked.known
    assert engine.side._tracked == {}
    engine.report_all()
    assert engine.pool.used == 0


def test_a_reset_forgets_what_is_stored() -> None:
    engine = Engine()
    request = engine.add("r", 20, there=8)
    assert engine.load(request) == 8
    engine.step()
    engine.fill(request, 8)
    request.num_computed_tokens = 8
    engine.side.reset()
    assert saved(engine.step({"r": 12})) == {0: [0, 1, 2, 3, 4]}
    assert engine.asked.known == set()


@pytest.mark.parametrize(
    ("params", "ttl_ms"),
    [
        ({"ttl_ms": 5_000}, 5_000), ({"ttl_ms": TTL_MS_MAX + 1}, TTL_MS_MAX), ({"ttl_ms": -1}, 0),
        ({"ttl_ms": "5"}, 0), ({"ttl_ms": True}, 0), ({}, 0),
        ({"ttl_ms": 4_999.5}, 5_000), ({"ttl_ms": float("nan")}, 0),
    ],
)  # fmt: skip
def test_a_request_may_say_how_long_its_blocks_are_kept_at_most(
    params: dict[str, Any], ttl_ms: int
) -> None:
    engine = Engine()
    engine.add("r", 9, **params)
    assert [save.ttl_ms for save in engine.step({"r": 9}).saves] == [ttl_ms]


def kept(engine: Engine) -> list[tuple[dict[int, Sequence[bytes]], int]]:
    told: list[tuple[dict[int, Sequence[bytes]], int]] = []
    engine.side.keep = lambda tips, milliseconds: told.append((tips, milliseconds))
    return told


def test_what_a_request_wants_pinned_is_pinned_as_it_is_stored_and_when_it_has_finished() -> None:
    engine = Engine(HYBRID)
    told = kept(engine)
    request = engine.add("r", 17, pin_ms=7_000)
    engine.step({"r": 17})
    assert told == []
    engine.report_all()
    tips = {0: request.block_hashes[3:4], 1: request.block_hashes[3:4]}
    assert told == [(tips, 7_000)]
    engine.finish(request)
    assert told == [(tips, 7_000)] * 2


def test_what_was_found_is_pinned_although_this_engine_saves_nothing() -> None:
    engine = Engine(saves=False)
    told = kept(engine)
    request = engine.add("r", 9, there=8, pin_ms=7_000)
    engine.load(request)
    assert engine.finish(request) is None
    assert told == [({0: request.block_hashes[1:2]}, 7_000)]


@pytest.mark.parametrize("stored", [False, True])
def test_what_is_not_stored_or_of_other_weights_is_not_pinned(stored: bool) -> None:
    engine = Engine()
    told = kept(engine)
    request = engine.add("r", 9, pin_ms=7_000)
    (save,) = engine.step({"r": 9}).saves
    if stored:
        engine.move("g")
    engine.report(save.number, stored=stored)
    engine.finish(request)
    assert told == []


def test_a_request_pins_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_logic, "REQUEST_PIN_MS_MAX", 1_000)
    engine = Engine()
    told = kept(engine)
    engine.finish(engine.add("r", 9, there=8, pin_ms=7_000))
    engine.load(asked := engine.add("s", 9, there=8, pin_ms=7_000))
    engine.finish(asked)
    assert [milliseconds for _, milliseconds in told] == [1_000]


# --- other weights --------------------------------------------------------------------------------


def test_until_it_is_known_what_blocks_mean_nothing_is_loaded_or_saved() -> None:
    engine = Engine()
    engine.identity.fingerprint = ""
    request = engine.add("r", 20, there=16)
    assert engine.asked.wanted == []
    assert engine.matched(request) == 0
    assert saved(engine.step({"r": 20})) == {}
    engine.identity.fingerprint = "known"
    orders = engine.step({"r": 1})
    assert saved(orders) == {0: [0, 1, 2, 3, 4]}
    assert orders.fingerprint == "known"


def test_blocks_that_were_computed_with_other_weights_are_not_saved_nor_found_here() -> None:
    engine = Engine()
    running, waiting = engine.add("running", 40), engine.add("waiting", 20, seed=1)
    assert saved(engine.step({"running": 20})) == {0: [0, 1, 2, 3, 4]}
    engine.move("other")
    assert engine.pool.evicted == set(range(engine.pool.num_gpu_blocks))
    assert engine.asked.known == set()
    orders = engine.step({"running": 20, "waiting": 20})
    assert saved(orders) == {0: [0, 1, 2, 3, 4]}
    assert [save.runs[0].keys for save in orders.saves] == [waiting.block_hashes]
    assert orders.fingerprint == "other"
    engine.report_all()
    assert engine.finish(running) is None, "nobody is told to wait for its blocks"


def test_a_request_that_starts_with_blocks_of_other_weights_is_not_saved() -> None:
    """They were in vLLM's prefix cache when the workers said who they are now."""
    engine = Engine()
    request = engine.add("r", 20)
    engine.move("other")
    engine.side.on_stale_prefix_cache(request)
    assert saved(engine.step({"r": 20})) == {}


def test_a_save_under_the_old_weights_is_no_event() -> None:
    engine = Engine(events_wanted=True)
    engine.add("r", 20)
    engine.step({"r": 20})
    engine.move("other")
    engine.report_all()
    assert engine.events.take() == []


def envelope(**payloads: dict[str, Any]) -> dict[str, Any]:
    """A hint envelope with these actions: ``retain={...}`` is ``kv.retain``."""
    actions = [
        {"action_id": name, "action_type": f"kv.{name}", "action_version": "1.0", "payload": more}
        for name, more in payloads.items()
    ]
    return {"protocol_version": "0.1", "message_id": "m", "actions": actions}


def hinted(engine: Engine) -> list[tuple[list[str], dict[int, list[bytes]]]]:
    told: list[tuple[list[str], dict[int, list[bytes]]]] = []
    engine.side.hint = lambda hints, tips: told.append(
        ([each.action_id for each in hints], {group: [*keys] for group, keys in tips.items()})
    )
    return told


def test_hints_are_sent_at_the_arrival_and_once_the_last_blocks_are_saved() -> None:
    engine = Engine()
    told = hinted(engine)
    hints = envelope(retain={"ttl_ms": 5_000}, prefetch={}, fetch={}, pin={"ttl_ms": 5_000})
    request = engine.add("r", 17, there=8, kv_hint=hints)
    engine.load(request)
    hashes = request.block_hashes
    assert told == [(["prefetch"], {0: [hashes[1]]})]
    request.num_computed_tokens = 8
    for _ in range(2):
        engine.step({"r": 4})
    engine.finish(request)
    first, last = engine.saving
    engine.report(first)
    assert told[1:] == []
    engine.report(last)
    assert told[1:] == [(["pin", "retain"], {0: [hashes[3]]})]


def test_hints_of_vllms_own_field_are_sent_at_the_end_if_all_is_saved() -> None:
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    engine = Engine()
    told = hinted(engine)
    request = engine.add("r", 9)
    request.kv_hints = KvHintsEnvelope("0.1", "m", [KvHintAction("end", "session_end", "1.0", {})])
    engine.side.new_request(request)
    engine.step({"r": 9})
    engine.report_all()
    engine.finish(request)
    assert told == [(["end"], {0: [request.block_hashes[1]]})]


def test_hints_of_a_window_name_all_its_blocks() -> None:
    groups = replace(PLAIN, block_tokens={0: 4, 1: 4}, windows={1: 9})
    engine = Engine(groups)
    told = hinted(engine)
    request = engine.add("r", 17, kv_hint=envelope(release={}))
    engine.step({"r": 17})
    engine.report_all()
    engine.finish(request)
    hashes = request.block_hashes
    assert told == [(["release"], {0: [hashes[3]], 1: hashes[2:4]})]


@pytest.mark.parametrize("hint", [7, [], {"actions": 3}, envelope(retain={"ttl_ms": "long"})])
def test_malformed_hints_are_counted_and_cost_the_request_nothing(hint: Any) -> None:
    engine = Engine()
    told = hinted(engine)
    engine.add("s", 9, kv_hint=envelope(release={}))
    request = engine.add("r", 9, kv_hint=hint)
    assert saved(engine.step({"r": 9})) == {0: [0, 1]}
    engine.report_all()
    assert engine.finish(request) == {"stored_tokens": 8}
    assert told == []
    assert engine.side.take_counters()["hints_failed"] == 1


# --- adapters -------------------------------------------------------------------------------------


def test_saves_wait_until_it_is_certain_with_which_weights_their_blocks_were_computed() -> None:
    engine = Engine()
    request = engine.add("r", 13)
    engine.identity.is_verified = False
    assert engine.step({"r": 8}).saves == []
    assert engine.side.pinned_blocks == 2
    promised = engine.side.finished(request, [*engine.tables["r"].tables.values()])
    assert promised is not None
    assert promised["stored_tokens"] == 8, "as it will be stored"
    engine.identity.is_verified = True
    orders = engine.step({"r": 5})
    assert saved(orders) == {0: [0, 1, 2]}
    assert len(orders.saves) == 2
    engine.report_all()
    assert not engine.side.has_pinned


@pytest.mark.parametrize("fingerprint", ["g", ""], ids=["others", "unknown"])
def test_saves_that_wait_are_dropped_when_the_weights_are_others(fingerprint: str) -> None:
    engine = Engine()
    engine.add("r", 13)
    engine.identity.is_verified = False
    engine.step({"r": 8})
    engine.identity.is_verified = bool(fingerprint)
    engine.move(fingerprint)
    assert engine.step().saves == []
    assert not engine.side.has_pinned


def test_saves_that_wait_are_dropped_when_blocks_have_to_be_free() -> None:
    engine = Engine()
    request = engine.add("r", 13)
    engine.identity.is_verified = False
    engine.step({"r": 8})
    engine.side.drained(set())
    assert not engine.side.has_pinned
    assert engine.side.finished(request, [*engine.tables["r"].tables.values()]) is None
    engine.identity.is_verified = True
    assert saved(engine.step({"r": 5})) == {0: [0, 1, 2]}, "made again"


def lora(number: int = 1) -> Any:
    return SimpleNamespace(lora_int_id=number, lora_name="adapter")


def test_keys_of_a_request_with_an_adapter_have_it_in_them() -> None:
    engine = Engine(events_wanted=True)
    engine.side.salt = lambda request: b"adapter"
    request = engine.add("r", 20, lora=lora())
    (save,) = engine.side.transfer_commands(engine.scheduled({"r": 20})).saves
    expected = [sha256(b"adapter" + each).digest() for each in request.block_hashes]
    assert save.runs[0].keys == expected
    engine.side.reported(TransferReport({save.number: SaveResult(1, 1)}))
    (told,) = engine.events.take()
    assert told.block_hashes == request.block_hashes, "routers know vLLM's hashes"
    assert told.lora_name == "adapter"
    assert (0, expected[0]) in engine.events.to_audit(100.0)
    engine.events.removed([(0, expected[0])])
    (gone,) = engine.events.take()
    assert gone.block_hashes == request.block_hashes[:1]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5)), max_size=6))
def test_keys_follow_a_session_that_replaces_its_last_tokens(inputs: list[tuple[int, int]]) -> None:
    hashes, known = list[bytes](), HashCache()
    for number, (dropped, added) in enumerate(inputs):
        del hashes[max(0, len(hashes) - dropped) :]
        hashes += [b"%d %d" % (number, index) for index in range(added)]
        known.keep(hashes)
        assert len(known.made) == len(known.source)
        news = hashes[len(known.source) :]
        known.made += (b"key " + each for each in news)
        known.source += news
        assert known.source == hashes
        assert known.made == [b"key " + each for each in hashes]


def test_an_adapter_that_is_not_known_is_neither_loaded_nor_saved() -> None:
    engine = Engine()
    engine.side.salt = lambda request: None
    request = engine.add("r", 20, there=16, lora=lora())
    assert engine.asked.wanted == []
    assert engine.matched(request) == 0
    assert saved(engine.step({"r": 20})) == {}


def test_a_request_whose_adapter_was_replaced_saves_nothing_more() -> None:
    engine = Engine()
    salts = {1: b"first", 2: b"second"}
    engine.side.salt = lambda request: salts[request.lora_request.lora_int_id]
    for number in (1, 2):
        request = engine.add(f"r{number}", 40, lora=lora(number), seed=number)
        engine.allocate(request, 20)
        assert len(engine.side.transfer_commands(engine.scheduled({f"r{number}": 20})).saves) == 1
        request.num_computed_tokens = 20
    salts[1] = b"other"
    before = [list(engine.requests[each].block_hashes) for each in ("r1", "r2")]
    engine.side.adapters_changed({1})
    assert engine.pool.evicted
    hashes = [engine.requests[each].block_hashes for each in ("r1", "r2")]
    assert not set(hashes[0]) & set(before[0]), "vLLM finds what it computes now for no other"
    assert hashes[1] == before[1]
    for number, saves in ((1, 0), (2, 1)):
        engine.allocate(engine.requests[f"r{number}"], 40)
        assert (
            len(engine.side.transfer_commands(engine.scheduled({f"r{number}": 20})).saves) == saves
        )


def test_an_adapter_that_changes_under_a_request_is_neither_loaded_nor_saved() -> None:
    """Its first keys have the salt of the one before."""
    engine = Engine()
    salts = [b"first"]
    engine.side.salt = lambda request: salts[-1]
    request = engine.add("r", 40, there=32, lora=lora())
    assert engine.matched(request) == 32
    salts.append(b"second")
    assert engine.matched(request) == 0
    engine.allocate(request, 20)
    assert engine.side.transfer_commands(engine.scheduled({"r": 20})).saves == []


# --- requests whose hashes do not cover what they depend on ---------------------------------------


def media(name: str) -> Any:
    return SimpleNamespace(mm_hash=None, identifier=name)


PRIVATE: list[dict[str, Any]] = [
    {"prompt_embeds": object(), "prompt_is_token_ids": [True, False]},
    {"mm_features": [media("0f" * 32), media("a-cat.png")]},
    {"mm_features": [media("0F" * 32)]},
    {"mm_features": [SimpleNamespace(mm_hash="0f" * 32, identifier="0x" + "0f" * 32)]},
]
SHARED: list[dict[str, Any]] = [
    {"prompt_embeds": object()},
    {"mm_features": [media("0f" * 32)]},
    {"mm_features": [media("0f" * 64)]},
    {"mm_features": [SimpleNamespace(mm_hash="0f" * 32, identifier=f"adapter:{'0f' * 32}")]},
]


@pytest.mark.parametrize("what", PRIVATE)
def test_what_the_hash_does_not_see_is_neither_loaded_nor_saved(what: dict[str, Any]) -> None:
    engine = Engine()
    request = engine.add("r", 20, there=16)
    vars(request).update(what)
    assert engine.matched(request) == 0
    assert saved(engine.step({"r": 20})) == {}


@pytest.mark.parametrize("what", SHARED)
def test_what_the_hash_sees_is_shared(what: dict[str, Any]) -> None:
    engine = Engine()
    request = engine.add("r", 20, there=16)
    vars(request).update(what)
    assert engine.matched(request) == 16
    other = engine.add("s", 20, seed=1)
    vars(other).update(what)
    assert saved(engine.step({"s": 20})) == {0: [0, 1, 2, 3, 4]}


@pytest.mark.parametrize(("says_so", "offered"), [(True, 16), (False, 0)])
def test_named_media_are_shared_by_those_who_say_so(says_so: bool, offered: int) -> None:
    engine = Engine(config=ConnectorConfig(shares_named_media=says_so))
    engine.side.are_names_marked = says_so
    request = engine.add("r", 20, there=16)
    vars(request).update((PRIVATE if says_so else SHARED)[1])
    assert engine.matched(request) == offered


# --- recurrent layers -----------------------------------------------------------------------------

STATES = Groups(
    hash_block_tokens=4, scheduler_block_tokens=8, block_tokens={0: 4, 1: 8, 2: 8},
    recurrent=frozenset({1, 2}),
)  # fmt: skip


def computed(engine: Engine, tokens: int, *offers: tuple[int, int, int]) -> list[SaveCommand]:
    """The saves of a step that computes so many tokens of "r", in which vLLM offers these states:
    group, block, and tokens before the state."""
    for _, block_id, _ in offers:
        engine.pool.blocks[block_id].references += 1  # the request holds it
    output = engine.scheduled({"r": tokens})
    output.kv_connector_block_state.boundary_state_offloads = {"r": list(offers)}
    saves = list(engine.side.transfer_commands(output).saves)
    engine.requests["r"].num_computed_tokens += tokens
    return saves


def states(save: SaveCommand) -> list[tuple[int, int, int]]:
    """Group, block, and index of the block, of the states in a save."""
    assert all(run.parent is None for run in save.runs if run.group in STATES.recurrent)
    return [
        (run.group, run.block_ids[0], run.first)
        for run in save.runs
        if run.group in STATES.recurrent
    ]


def test_a_state_that_vllm_offers_is_saved_under_the_hash_at_its_end() -> None:
    engine = Engine(groups=STATES, events_wanted=True)
    request = engine.add("r", 21)
    (save,) = computed(engine, 21, (1, 101, 16), (2, 102, 16))
    assert states(save) == [(1, 101, 1), (2, 102, 1)]
    assert [run.keys for run in save.runs[-2:]] == [[request.block_hashes[3]]] * 2
    assert [len(run.keys) for run in save.runs if run.group == 0] == [5]
    assert engine.side.take_counters()["saved_states"] == 1
    engine.side.reported(TransferReport({save.number: SaveResult(1, 1)}))
    assert [event.group_idx for event in engine.events.take()] == [0], "a state is no block"
    assert engine.finish(request) == {"stored_tokens": 16}


def test_a_state_is_saved_once_and_only_where_a_hit_may_end() -> None:
    engine = Engine(groups=STATES)
    engine.add("r", 21)
    both = (1, 101, 8), (2, 102, 8)
    assert states(computed(engine, 8, *both)[0]) == [(1, 101, 0), (2, 102, 0)]
    assert computed(engine, 2, *both) == []
    assert states(computed(engine, 2, (1, 103, 12), (2, 104, 12))[0]) == [], "within a block"
    assert states(computed(engine, 4, (1, 105, 16))[0]) == [], "one of two groups"
    assert states(computed(engine, 4, (1, 105, 16), (2, NULL_BLOCK, 16))[0]) == []
    assert computed(engine, 1, (1, 106, 24), (2, 107, 24)) == [], "beyond the prompt"


def test_a_state_whose_save_failed_is_promised_to_nobody() -> None:
    engine = Engine(groups=STATES)
    request = engine.add("r", 21)
    (save,) = computed(engine, 21, (1, 101, 16), (2, 102, 16))
    engine.side.reported(TransferReport({save.number: SaveResult(1, 0)}))
    assert engine.finish(request) is None


def test_states_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_logic, "PINNED_MAX", 0.03)  # of 200 blocks
    engine = Engine(groups=STATES)
    engine.add("r", 21)
    (save,) = computed(engine, 21, (1, 101, 16), (2, 102, 16))
    assert states(save) == []
    assert engine.side.take_counters()["saves_refused"] >= 1


def test_a_load_has_the_last_state_and_none_before_it() -> None:
    engine = Engine(groups=STATES)
    request = engine.add("r", 21, there=16)
    assert engine.matched(request) == 16
    tables = engine.allocate(request, 16)
    engine.side.allocated(request, tables, 16)
    (load,) = engine.side.transfer_commands(engine.scheduled({})).loads
    assert [(run.group, run.first, len(run.keys)) for run in load.runs] == [
        (0, 0, 4), (1, 1, 1), (2, 1, 1),
    ]  # fmt: skip
    assert [run.keys[0] for run in load.runs[1:]] == [request.block_hashes[3]] * 2
    assert [run.block_ids[0] for run in load.runs[1:]] == [tables.tables[g][1] for g in (1, 2)]
    assert engine.side.take_counters()["hit_states"] == 1


def test_what_may_not_be_loaded_is_not_asked_for() -> None:
    """A state beyond the limit would hide the one before it."""
    engine = Engine(groups=STATES)
    request = engine.add("r", 24, there=16)  # at least one token is computed
    assert engine.asked.wanted == [("r", 4, 0)]
    assert engine.matched(request) == 16
    engine.allocate(request, 16)
    engine.side.allocated(request, engine.tables["r"], 16)
    engine.fail_load(request, 12)
    engine.asked.there["r"] = 8
    assert engine.matched(request) == 8
    assert engine.asked.wanted[-1] == ("r", 2, 0)


# --- saves that hang ------------------------------------------------------------------------------


def test_a_save_that_hangs_does_not_keep_an_idle_engine_stepping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = Engine()
    engine.add("r", 20)
    engine.step({"r": 20})
    assert engine.side.needs_more_steps(5.0)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 6.0)
    assert not engine.side.needs_more_steps(5.0)
    assert engine.side.has_pinned, "its blocks are still being read"
    monkeypatch.undo()
    engine.report_all()
    assert not engine.side.needs_more_steps(5.0)


def test_blocks_of_guessed_tokens_are_saved_when_these_are_confirmed() -> None:
    engine = Engine(config=ConnectorConfig(save_decode=True))
    request = engine.add("r", 11)
    assert saved(engine.step({"r": 11})) == {0: [0, 1]}
    guessing = engine.side.transfer_commands(
        engine.scheduled({"r": 5})
    )  # a token, and four that are guessed
    assert saved(guessing) == {0: [2]}
    request.num_computed_tokens = 12
    request.all_token_ids += [7] * 4
    assert saved(engine.side.transfer_commands(engine.scheduled({"r": 4}))) == {0: [3]}


def test_blocks_of_a_drained_save_are_free_although_its_report_is_on_its_way() -> None:
    engine = Engine()
    first, second = engine.add("first", 8), engine.add("second", 8, seed=1)
    saves = [engine.step({each: 8}).saves[0].number for each in ("first", "second")]
    engine.finish(first)
    engine.finish(second)
    engine.side.drained({saves[1]})
    assert engine.side.pinned_blocks == engine.pool.used == 2, "one worker still reads the second"
    engine.side.reported(TransferReport(dict.fromkeys(saves, SaveResult(1, 1))))
    assert engine.side.pinned_blocks == engine.pool.used == 0
    assert not engine.side.has_pinned


def test_a_load_is_under_way_until_all_workers_have_reported_it() -> None:
    engine = Engine()
    request = engine.add("r", 20, there=16)
    engine.load(request)
    assert engine.side.loading == {"r"}
    engine.step()
    engine.finish(request)
    engine.step()
    assert engine.side.loading == {"r"}, "also when it was aborted"
    engine.side.arrived({"r", "another connector's"})
    assert engine.side.loading == set()


class Scheduling(RuleBasedStateMachine):
    """Requests come, run, are preempted, fail and go; workers report when they like."""

    groups = HYBRID

    def __init__(self) -> None:
        super().__init__()
        self.patched = pytest.MonkeyPatch()
        self.patched.setattr(scheduler_logic, "PINNED_MAX", 0.2)
        self.engine = Engine(self.groups, blocks=120, workers=2, events_wanted=True)
        self.waiting: list[Request] = []
        self.loading: dict[str, int] = {}
        self.running: list[Request] = []
        self.number = 0
        self.loads = 0

    @precondition(lambda self: len(self.engine.requests) < 4)
    @rule(
        tokens=st.integers(1, 40),
        there=st.integers(0, 6),
        seed=st.integers(0, 2),
        params=st.sampled_from([{}, {}, {}, {"no_store": True}, {"max_load_tokens": 9}]),
    )
    def new_request(self, tokens: int, there: int, seed: int, params: dict[str, Any]) -> None:
        self.number += 1
        there = self.groups.aligned(min(there * 8, tokens))
        name = f"r{self.number}"
        self.waiting.append(self.engine.add(name, tokens, there=there, seed=seed, **params))

    @rule(chunk=st.integers(1, 20), slow=st.booleans())
    def step(self, chunk: int, slow: bool) -> None:
        engine, ordered = self.engine, {}
        for request in self.waiting[:]:
            there = engine.asked.there[request.request_id]
            if slow:
                engine.asked.there[request.request_id] = None
            tokens = engine.matched(request)
            engine.asked.there[request.request_id] = there
            if tokens is None:
                continue
            self.waiting.remove(request)
            tables = engine.allocate(request, tokens)
            engine.side.allocated(request, tables, tokens)
            if tokens:
                assert tokens < request.num_tokens
                self.loading[request.request_id] = ordered[request.request_id] = tokens
            else:
                self.running.append(request)
        scheduled = {
            each.request_id: min(chunk, each.num_tokens - each.num_computed_tokens)
            for each in self.running
        }
        orders = engine.step(scheduled)
        self.check_loads(orders, ordered)

    def check_loads(self, orders: TransferCommands, ordered: dict[str, int]) -> None:
        assert [load.request_id for load in orders.loads] == list(ordered)
        for load in orders.loads:
            request = self.engine.requests[load.request_id]
            hashes = request.block_hashes
            for run in load.runs:
                count = ordered[load.request_id] // self.groups.tokens_of(run.group)
                assert run.first == 0
                assert run.keys == self.groups.keys(run.group, hashes)[:count]
                table = self.engine.tables[load.request_id].tables[run.group]
                assert run.block_ids == table

    @precondition(lambda self: self.engine.saving)
    @rule(which=st.integers(0, 100), workers=st.integers(1, 2), stored=st.booleans())
    def report(self, which: int, workers: int, stored: bool) -> None:
        number = sorted(self.engine.saving)[which % len(self.engine.saving)]
        left = self.engine.saving[number].workers_left
        self.engine.report(number, workers=min(workers, left), stored=stored)

    @precondition(lambda self: self.loading)
    @rule(which=st.integers(0, 100))
    def arrive(self, which: int) -> None:
        request, tokens = self._loaded(which)
        self.engine.fill(request, tokens)
        request.num_computed_tokens = tokens
        self.running.append(request)

    @precondition(lambda self: self.loading)
    @rule(which=st.integers(0, 100), good=st.integers(0, 40))
    def fail(self, which: int, good: int) -> None:
        request, tokens = self._loaded(which)
        good = min(good, tokens - 1) // 8 * 8
        self.engine.fail_load(request, good)
        if good:
            self.engine.fill(request, good)
            request.num_computed_tokens = good
            self.running.append(request)
        else:
            assert self.engine.matched(request) == 0
            self.engine.preempt(request)
            self.waiting.append(request)

    def _loaded(self, which: int) -> tuple[Request, int]:
        name = sorted(self.loading)[which % len(self.loading)]
        return self.engine.requests[name], self.loading.pop(name)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100))
    def preempt(self, which: int) -> None:
        request = self.running.pop(which % len(self.running))
        self.engine.preempt(request)
        self.waiting.append(request)

    @precondition(lambda self: self.waiting or self.running)
    @rule(which=st.integers(0, 100))
    def finish(self, which: int) -> None:
        request = (self.waiting + self.running)[which % len(self.waiting + self.running)]
        for each in (self.waiting, self.running):
            if request in each:
                each.remove(request)
        said = self.engine.finish(request)
        if said is not None:
            assert 0 < said["stored_tokens"] <= request.num_tokens

    @rule()
    def reset(self) -> None:
        self.engine.side.reset()

    @rule(certain=st.booleans())
    def doubt(self, certain: bool) -> None:
        self.engine.identity.is_verified = certain

    @invariant()
    def the_books_agree(self) -> None:
        self.engine.check()
        assert self.engine.side.pinned_blocks <= 0.2 * 120

    def teardown(self) -> None:
        self.engine.identity.is_verified = True
        self.engine.step()
        for request in list(self.engine.requests.values()):
            self.engine.finish(request)
        self.engine.report_all()
        self.engine.step()
        self.patched.undo()
        assert self.engine.pool.used == 0
        assert not self.engine.side.has_pinned
        assert self.engine.side._tracked == {}
        assert self.engine.asked.known == set()


TestScheduling = Scheduling.TestCase
