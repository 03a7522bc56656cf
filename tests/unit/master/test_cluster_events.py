"""The notices that a master keeps for its dashboard."""

from __future__ import annotations

import itertools
import json
from typing import Any

from kvstore.master.cluster_events import NOTICES_MAX, PAGE, TEXT_MAX, ClusterEventLog


def kept(count: int) -> ClusterEventLog:
    clock = itertools.count(1_000)
    notices = ClusterEventLog(lambda: next(clock))
    for number in range(count):
        notices.add("node_joined", {"node": f"n{number}", "bytes": number})
    return notices


def read_all(notices: ClusterEventLog, after: int = 0) -> list[Any]:
    found: list[Any] = []
    for _ in range(100):
        answer: Any = notices.after(after)
        assert len(answer["notices"]) <= PAGE
        found += answer["notices"]
        after = answer["last"]
        if answer["is_all"]:
            return found
    raise AssertionError("never the last page")


def test_each_notice_is_told_once_in_order() -> None:
    notices = kept(250)
    found = read_all(notices)
    assert [number for number, *_ in found] == list(range(1, 251))
    assert found[0] == (1, 1_001, "node_joined", {"node": "n0", "bytes": 0})
    assert read_all(notices, 250) == []
    notices.add("node_left", {"node": "n0"})
    assert [each[2] for each in read_all(notices, 250)] == ["node_left"]


def test_the_last_ones_are_kept() -> None:
    found = read_all(kept(NOTICES_MAX + 30))
    assert [number for number, *_ in found] == list(range(31, NOTICES_MAX + 31))


def test_a_reader_of_an_earlier_run_learns_that_it_is_another_one() -> None:
    answer = kept(2).after(500)
    assert (answer["run"], answer["last"], answer["notices"]) == (1_000, 2, [])
    assert kept(0).after(0)["is_all"]


def test_an_answer_is_small_whatever_the_fields_say() -> None:
    notices = kept(0)
    for _ in range(PAGE):
        notices.add("corrupt_object", dict.fromkeys("abc", "\u202e" * 5000))
    answer: Any = notices.after(0)
    assert len(answer["notices"][0][3]["a"]) == TEXT_MAX
    assert len(json.dumps(answer)) < 1 << 20
