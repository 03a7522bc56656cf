"""The places at which ``tests.support.cuts`` raises."""

from __future__ import annotations

import threading

from tests.support.cuts import cut


def places(work: object) -> int:
    count = 0
    while cut(work, count):  # type: ignore[arg-type]
        count += 1
    return count


def test_a_lock_of_c_is_never_left_taken_and_a_condition_of_python_is() -> None:
    lock, condition = threading.Lock(), threading.Condition(threading.Lock())
    taken: list[int] = []

    def plainly() -> None:
        with lock:
            taken.append(1)

    def by_condition() -> None:
        with condition:
            taken.append(1)

    for place in range(places(plainly)):
        cut(plainly, place)
        assert not lock.locked()
    left = 0
    count = places_of_condition = 0
    while True:
        condition = threading.Condition(threading.Lock())
        if not cut(by_condition, count):
            break
        places_of_condition += 1
        left += condition._lock.locked()  # type: ignore[attr-defined]
        count += 1
    assert places_of_condition > 3
    assert left


def test_an_error_of_the_work_is_raised() -> None:
    def fails() -> None:
        raise KeyError("x")

    assert cut(fails, 0)
    try:
        cut(fails, 100)
    except KeyError:
        pass
    else:
        raise AssertionError
