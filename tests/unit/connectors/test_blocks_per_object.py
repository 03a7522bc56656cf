"""Several blocks are one object, and the end of a prompt has single ones."""

from __future__ import annotations

from kvstore.config import ConnectorConfig
from kvstore.config.clients import choose_blocks_per_object
from kvstore.connectors.vllm.groups import NULL_BLOCK, Groups
from kvstore.connectors.vllm.messages import LoadCommand, Run
from kvstore.connectors.vllm.scheduler.scheduler_logic import EVICT_FIRST
from tests.unit.connectors.engine import FOURS, Engine

HASHES = [b"h%d" % index for index in range(11)]
TABLE = [list(range(101, 112))]


def test_the_blocks_between_two_positions() -> None:
    whole = Run(0, [b"h3", b"h7"], TABLE[0][:8], 0, None, 4)
    tail = Run(0, [b"h8", b"h9"], TABLE[0][8:10], 8, b"h7")
    assert list(FOURS.objects(HASHES, TABLE, 0, 40, 40)) == [whole, tail]
    assert list(FOURS.objects(HASHES, TABLE, 32, 40, 32)) == [tail]
    partly = [NULL_BLOCK, NULL_BLOCK, *TABLE[0][2:6], NULL_BLOCK, NULL_BLOCK]
    assert list(FOURS.objects(HASHES, TABLE, 8, 24, 40)) == [whole._replace(block_ids=partly)]
    assert list(FOURS.objects(HASHES, TABLE, 36, 40, 40)) == [
        Run(0, [b"h9"], TABLE[0][9:10], 9, b"h8")
    ]
    assert FOURS.chain_keys(0, HASHES, 40) == [b"h3", b"h7", b"h8", b"h9"]


def test_full_objects_are_saved_as_they_are_computed_and_the_rest_with_the_prompt() -> None:
    engine = Engine(FOURS)
    request = engine.add("r", 42)
    hashes = request.block_hashes
    assert engine.matched(request) == 0
    assert engine.step({"r": 12}).saves == []
    (save,) = engine.step({"r": 12}).saves
    table = engine.tables["r"].tables[0]
    assert save.runs == [Run(0, hashes[3:4], table[:4], 0, None, 4)]
    (save,) = engine.step({"r": 18}).saves
    assert save.runs == [
        Run(0, hashes[7:8], table[4:8], 1, hashes[3], 4),
        Run(0, hashes[8:10], table[8:10], 8, hashes[7]),
    ]
    assert engine.step({"r": 1}).saves == []
    engine.report_all()
    assert engine.side.pinned_blocks == 0
    assert engine.finish(request) == {"stored_tokens": 40}


def test_a_generated_object_replaces_the_single_blocks() -> None:
    engine = Engine(FOURS, ConnectorConfig(save_decode=True))
    request = engine.add("r", 26)
    saves = [*engine.step({"r": 26}).saves]
    for _ in range(8):
        saves += engine.step({"r": 1}).saves
    whole, tail, rest = [run for save in saves for run in save.runs]
    assert (whole.each, whole.first, tail.each, tail.first, len(tail.keys)) == (4, 0, 1, 4, 2)
    assert (rest.first, rest.each, rest.keys) == (1, 4, [request.block_hashes[7]])
    hinted: list[object] = []
    engine.side.hint = lambda hints, tips: hinted.append((hints, tips))
    engine.report_all()
    assert hinted == [([EVICT_FIRST], {0: [request.block_hashes[5]]})]
    assert engine.finish(request) == {"stored_tokens": 32}


def test_the_end_of_an_answer_is_saved_when_the_request_has_finished() -> None:
    engine = Engine(FOURS, ConnectorConfig(save_decode=True))
    request = engine.add("r", 22)
    engine.step({"r": 22})
    for _ in range(7):
        engine.step({"r": 1})
    hashes, table = request.block_hashes, engine.tables["r"].tables[0][:]
    assert engine.finish(request) == {"stored_tokens": 28}
    (save,) = engine.step().saves
    assert save.runs == [Run(0, hashes[5:7], table[5:7], 5, hashes[4])]
    engine.report_all()
    assert engine.side.pinned_blocks == 0


def test_the_number_of_blocks_follows_from_their_size() -> None:
    sizes = (1, 512 << 10, 768 << 10, 1 << 20, 33 << 15, 3 << 19, 2 << 20, 64 << 20)
    assert [choose_blocks_per_object(16, size) for size in sizes] == [4, 4, 4, 2, 2, 2, 1, 1]
    assert [choose_blocks_per_object(tokens, 1) for tokens in (8, 32, 64, 128)] == [8, 2, 1, 1]


def test_a_load_fills_only_what_is_not_here() -> None:
    engine = Engine(FOURS)
    request = engine.add("r", 42, there=40)
    engine.allocate(request, 8)
    assert engine.load(request, 8) == 32
    table, hashes = engine.tables["r"].tables[0], request.block_hashes
    nulls = [NULL_BLOCK] * 2
    assert engine.step().loads == [
        LoadCommand("r", [
            Run(0, [hashes[3], hashes[7]], [*nulls, *table[2:8]], 0, None, 4),
            Run(0, hashes[8:10], table[8:10], 8, hashes[7]),
        ])
    ]  # fmt: skip


def test_a_prompt_that_ends_within_an_object_loads_its_beginning() -> None:
    engine = Engine(FOURS)
    request = engine.add("r", 32, there=32)
    assert engine.load(request) == 28, "one token is computed"
    table, hashes = engine.tables["r"].tables[0], request.block_hashes
    (load,) = engine.step().loads
    assert load.runs == [Run(0, [hashes[3], hashes[7]], [*table[:7], NULL_BLOCK], 0, None, 4)]


def test_a_model_of_recurrent_layers_alone_has_no_full_objects() -> None:
    states = Groups(
        hash_block_tokens=4, scheduler_block_tokens=4, block_tokens={0: 4}, recurrent=frozenset({0})
    )
    engine = Engine(states)
    request = engine.add("r", 9)
    engine.step({"r": 9})
    assert engine.finish(request) is None


def test_what_failed_is_saved_again() -> None:
    engine = Engine(FOURS)
    request = engine.add("r", 42)
    (save,) = engine.step({"r": 42}).saves
    engine.report(save.number, stored=False)
    (again,) = engine.step({"r": 1}).saves
    assert [(run.first, run.each, len(run.keys)) for run in again.runs] == [(0, 4, 2), (8, 1, 2)]
    engine.report_all()
    engine.finish(request)
