"""What is told of blocks that came and went."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvstore.connectors.vllm import events as module
from kvstore.connectors.vllm.events import AUDIT_EVERY_S, MEDIUM, Events, audit
from kvstore.connectors.vllm.messages import Run
from tests.unit.connectors.engine import HYBRID, Request

START_S = 100.0


def told(*keys: bytes, group: int = 0) -> Events:
    events = Events(HYBRID, wanted=True)
    events.stored([Run(group, list(keys), [1] * len(keys), 0, None)], {}, None)
    events.take()
    return events


def test_what_is_stored_is_told_with_all_that_a_router_needs() -> None:
    events = Events(HYBRID, wanted=True)
    request = Request("r", list(range(20)), 20)
    runs = [Run(0, [b"c", b"d"], [7, 8], 2, b"b"), Run(1, [b"d"], [9], 1, b"b")]
    events.stored(runs, events.tokens_of(request, runs), "adapter")
    first, second = events.take()
    assert (first.block_hashes, first.parent_block_hash) == ([b"c", b"d"], b"b")
    assert (first.token_ids, first.block_size, first.group_idx) == (list(range(8, 16)), 4, 0)
    assert (first.medium, first.lora_name) == (MEDIUM, "adapter")
    assert (second.token_ids, second.block_size, second.group_idx) == (list(range(8, 16)), 8, 1)
    assert events.take() == []


def test_what_is_gone_is_told_once_and_by_group() -> None:
    events = told(b"a", b"b")
    events.stored([Run(1, [b"b"], [1], 0, None)], {}, None)
    events.take()
    events.gone([(0, b"a"), (1, b"b"), (0, b"never told")])
    removed = events.take()
    assert [(each.group_idx, each.block_hashes, each.medium) for each in removed] == [
        (0, [b"a"], MEDIUM), (1, [b"b"], MEDIUM),
    ]  # fmt: skip
    events.gone([(0, b"a"), (1, b"b")])
    assert events.take() == []


def test_clearing_removes_all_that_was_told() -> None:
    events = told(b"a", b"b", b"c")
    events.cleared()
    (removed,) = events.take()
    assert removed.block_hashes == [b"a", b"b", b"c"]
    assert events.to_audit(START_S) == []


def test_nothing_is_told_or_kept_where_nobody_listens() -> None:
    events = Events(HYBRID, wanted=False)
    events.stored([Run(0, [b"a"], [1], 0, None)], {}, None)
    assert events.take() == []
    assert events.to_audit(START_S) == []
    events.cleared()
    assert events.take() == []


def test_blocks_are_asked_about_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AUDIT_KEYS", 2)
    events = told(b"a", b"b", b"c")
    assert events.to_audit(START_S) == [(0, b"a"), (0, b"b")]
    assert events.to_audit(START_S + AUDIT_EVERY_S - 0.5) == []
    assert events.to_audit(START_S + AUDIT_EVERY_S) == [(0, b"c"), (0, b"a")]
    events.gone([(0, b"b")])
    assert events.to_audit(START_S + 2 * AUDIT_EVERY_S) == [(0, b"c"), (0, b"a")]


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOLD_MAX", 3)
    events = told(*(b"%d" % number for number in range(10)))
    assert events.to_audit(START_S) == [(0, b"7"), (0, b"8"), (0, b"9")]


def test_an_audit_finds_what_any_worker_lacks() -> None:
    there = {"a0": b"xyz", "a1": b"xz", "b0": b"y"}
    asked: list[tuple[str, int]] = []

    def exists(keys: Sequence[bytes], namespace: str) -> list[bool]:
        asked.append((namespace, len(keys)))
        return [key in there[namespace] for key in keys]

    blocks = [(0, b"x"), (1, b"y"), (0, b"y"), (0, b"w"), (1, b"z")]
    gone = audit(blocks, {0: ["a0", "a1"], 1: ["b0"]}, exists)
    assert sorted(gone) == [(0, b"w"), (0, b"y"), (1, b"z")]
    assert sorted(asked) == [("a0", 3), ("a1", 3), ("b0", 2)]
    assert audit([], {}, exists) == []
