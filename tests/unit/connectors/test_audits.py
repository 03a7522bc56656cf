"""Which reported blocks the scheduler side asks the store about, and what it reports then."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.messages import Run
from kvstore.connectors.vllm.scheduler import events as events_module
from kvstore.connectors.vllm.scheduler.events import AUDIT_EVERY_S, AUDIT_SOON_S, BlockEvents, audit

GROUPS = Groups(hash_block_tokens=16, scheduler_block_tokens=16, block_tokens={0: 16})


@pytest.fixture
def events() -> BlockEvents:
    return BlockEvents(GROUPS, wanted=True)


def store(events: BlockEvents, *keys: bytes) -> None:
    events.stored([Run(0, list(keys), [], 0, None)], {}, None)


def removed(events: BlockEvents) -> list[bytes]:
    """Those that were reported as removed since the last time."""
    return [
        bytes(each)
        for event in events.take()
        if isinstance(event, BlockRemoved)
        for each in event.block_hashes
    ]


def keys(blocks: list[tuple[int, bytes]]) -> list[bytes]:
    return [key for _, key in blocks]


def test_without_events_all_blocks_are_audited_again_and_again(events: BlockEvents) -> None:
    store(events, b"a", b"b")
    assert keys(events.to_audit(100.0)) == [b"a", b"b"]
    assert events.to_audit(100.0 + AUDIT_EVERY_S / 2) == []
    store(events, b"c")
    assert keys(events.to_audit(100.0 + AUDIT_EVERY_S)) == [b"c", b"a", b"b"]
    events.removed([(0, b"b")])
    assert removed(events) == [b"b"]
    assert keys(events.to_audit(100.0 + 2 * AUDIT_EVERY_S)) == [b"c", b"a"]


def test_while_events_are_heard_only_what_may_have_gone_is_audited(events: BlockEvents) -> None:
    store(events, b"a", b"b")
    now = 100.0
    assert keys(events.to_audit(now, listening=True)) == [b"a", b"b"]
    store(events, b"c")
    assert events.to_audit(now + AUDIT_SOON_S / 2, listening=True) == []
    now += 2 * AUDIT_SOON_S
    assert keys(events.to_audit(now, listening=True)) == [b"c"]
    assert events.to_audit(now + 1_000, listening=True) == []
    events.suspect([(0, b"b"), (0, b"never reported"), (1, b"a")])
    assert keys(events.to_audit(now + 1_000, listening=True)) == [b"b"]
    events.removed([(0, b"b")])
    assert removed(events) == [b"b"]
    events.suspect_all()
    assert sorted(keys(events.to_audit(now + 2_000, listening=True))) == [b"a", b"c"]
    assert events.to_audit(now + 3_000, listening=True) == []


def test_a_block_that_was_stored_again_during_its_audit_is_not_reported_as_removed(
    events: BlockEvents,
) -> None:
    store(events, b"a")
    chosen = events.to_audit(100.0, listening=True)
    store(events, b"a")
    events.removed(chosen)
    assert removed(events) == []
    assert events.to_audit(200.0, listening=True) == chosen
    events.suspect(chosen)  # an event about it came during the audit: one more
    events.removed(chosen)
    assert removed(events) == []
    assert events.to_audit(300.0, listening=True) == chosen


def test_an_audit_without_an_answer_is_repeated(events: BlockEvents) -> None:
    store(events, b"a")
    chosen = events.to_audit(100.0, listening=True)
    events.suspect(chosen)
    assert events.to_audit(200.0, listening=True) == chosen


def test_a_bounded_number_of_blocks_is_remembered(
    events: BlockEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "REPORTED_MAX", 3)
    store(events, b"a", b"b")
    events.to_audit(100.0, listening=True)
    store(events, b"c", b"d")
    events.cleared()
    assert sorted(removed(events)) == [b"b", b"c", b"d"]
    assert events.to_audit(200.0) == []


def test_a_bounded_number_of_blocks_is_reported_again_each_with_its_ancestors_before_it(
    events: BlockEvents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_module, "REPEATED_MAX", 4)
    monkeypatch.setattr(events_module, "REPEATED_PER_STEP", 2)
    pool = SimpleNamespace(cached_block_hash_to_block={})
    events.bind_block_pool(cast(Any, pool))
    store(events, b"forgotten", b"orphan")
    events.stored([Run(0, [b"d"], [], 1, b"c")], {0: [4] * 16}, None)
    events.stored([Run(0, [b"c"], [], 0, None)], {0: [3] * 16}, None)
    store(events, b"lost")
    events.removed(events.to_audit(100.0)[-1:])
    events.take()
    assert events.take() == []
    pool.cached_block_hash_to_block = {}  # AllBlocksCleared
    repeated = [each for each in events.take() if isinstance(each, BlockStored)]
    assert [each.block_hashes for each in repeated] == [[b"c"], [b"d"]]
    assert [each.parent_block_hash for each in repeated] == [None, b"c"]
    assert [each.token_ids for each in repeated] == [[3] * 16, [4] * 16]
    assert events.take() == []


@pytest.mark.parametrize("lacking", ["a", "b", "c"])
def test_a_block_of_which_one_worker_has_no_part_is_gone(lacking: str) -> None:
    def exists(keys: Sequence[bytes], namespace: str) -> list[bool]:
        return [key != b"k1" or namespace != lacking for key in keys]

    blocks = [(0, b"k0"), (0, b"k1"), (1, b"k1")]
    assert audit(blocks, {0: ["a", "b", "c"], 1: ["d"]}, exists) == [(0, b"k1")]
