"""Each rule of the soak's checker, by short stories: what it finds, and what it lets pass."""

from __future__ import annotations

from typing import Any

import pytest

from tests.soak.checker import COPIES_WAIT_S, Checker

KEY = "6b"


def put(version: int, at: float, *, overwrite: bool = False) -> list[Any]:
    return ["put", version, "ns", KEY, at, overwrite]


def done(version: int, at: float, outcome: str = "stored") -> list[Any]:
    return ["done", version, at, outcome]


def gone(began: float, ended: float, key: str | None = KEY) -> list[Any]:
    return ["gone", "ns", key, began, ended, "removed"]


def got(version: int, began: float, key: str = KEY) -> list[Any]:
    return ["got", "ns", key, version, began, began + 0.1, "get"]


def there(began: float) -> list[Any]:
    return ["there", "ns", KEY, began, began + 0.1, "exists"]


def rules(*lines: list[Any], checker: Checker | None = None) -> list[str]:
    checker = checker or Checker()
    checker.take([(1, line) for line in lines])
    checker.finish()
    return [violation.rule for violation in checker.violations]


def test_what_was_put_may_be_read() -> None:
    assert rules(put(1, 0), done(1, 1), got(1, 2), there(2)) == []


def test_a_put_that_is_under_way_may_be_read() -> None:
    assert rules(put(1, 0), got(1, 0.5), there(0.5)) == []


def test_what_nobody_put_is_found() -> None:
    assert rules(got(9, 1)) == ["unknown_version"]
    assert rules(put(1, 0), got(1, 1, key="6c")) == ["unknown_version"]
    assert rules(there(1)) == ["unknown_there"]


def test_a_version_from_the_future_is_found() -> None:
    assert rules(put(1, 5), got(1, 1)) == ["too_early"]
    assert rules(put(1, 5), there(1)) == ["unknown_there"]


@pytest.mark.parametrize("end", [gone(2, 3), gone(2, 3, None)])
def test_what_was_removed_is_not_read(end: list[Any]) -> None:
    before = [put(1, 0), done(1, 1), end]
    assert rules(*before, got(1, 4)) == ["removed_read"]
    assert rules(*before, there(4)) == ["gone_there"]
    assert rules(*before, got(1, 2.5), there(2.5)) == []  # the removal was under way


def test_a_removal_that_began_before_the_put_had_ended_says_nothing() -> None:
    assert rules(put(1, 0), done(1, 2.5), gone(2, 3), got(1, 4), there(4)) == []


def test_what_was_overwritten_is_not_read() -> None:
    before = [put(1, 0), done(1, 1), put(2, 2, overwrite=True), done(2, 3)]
    assert rules(*before, got(1, 4)) == ["replaced_read"]
    assert rules(*before, got(2, 4), there(4)) == []


@pytest.mark.parametrize("outcome", ["error", "found", "being_written"])
def test_a_put_without_a_good_end_may_happen_at_any_time(outcome: str) -> None:
    checker = Checker()
    story = [put(1, 0), done(1, 1, outcome), gone(2, 3), got(1, 4), there(4)]
    assert rules(*story, checker=checker) == []
    assert sum(checker.notes.values()) > 0
    unanswered = [put(1, 0), gone(2, 3), got(1, 4)]
    assert rules(*unanswered) == []


def test_a_removed_version_does_not_hide_behind_a_new_one() -> None:
    story = [put(1, 0), done(1, 1), gone(2, 3), put(2, 4), done(2, 5), got(1, 6)]
    assert rules(*story) == ["removed_read"]
    assert rules(*story[:-1], there(6), got(2, 6)) == []


def test_an_end_that_is_told_late_is_judged_in_the_end() -> None:
    checker = Checker()
    checker.take([(1, put(1, 0)), (1, done(1, 1)), (1, got(1, 4))])
    assert not checker.violations
    assert rules(gone(2, 3), checker=checker) == ["removed_read"]


def test_a_get_whose_journal_is_read_before_that_of_its_put_is_judged_with_it() -> None:
    checker = Checker()
    checker.take([(1, got(1, 2)), (1, there(2))])
    assert rules(put(1, 0), done(1, 1), checker=checker) == []


def test_memory_that_was_away_may_show_what_was_removed_for_a_moment() -> None:
    def story(read: float, *, away: bool = True, led: bool = True) -> list[str]:
        checker = Checker()
        if away:
            checker.away(1.5, 5)
        if led:
            checker.led(4)
        return rules(put(1, 0), done(1, 1), gone(2, 3), got(1, read), checker=checker)

    assert story(5.5) == []
    assert story(5 + COPIES_WAIT_S + 0.1) == ["removed_read"]
    assert story(5.5, away=False) == ["removed_read"]
    assert story(5.5, led=False) == ["removed_read"]
