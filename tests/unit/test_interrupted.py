"""What waits and works in the threads of callers, cut short everywhere
(``tests.support.signal_injection``)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvstore.errors import ClosedError
from kvstore.runtime.tasks import Job, ThreadPool, uninterrupted
from tests.support.leaks import leaked, snapshot
from tests.support.signal_injection import cut

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def each_place(work: Callable[[], object]) -> int:
    """Cuts the work at each of its places, once; their number."""
    place = 0
    while cut(work, place):
        place += 1
    assert place > 2
    return place


def elsewhere(work: Callable[[], object], seconds: float = 10.0) -> None:
    """In another thread, where it must end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"


def test_work_in_one_piece_ends_although_its_caller_is_cut() -> None:
    done: list[int] = []
    begun: list[int] = []

    def work() -> int:
        begun.append(1)
        time.sleep(0.002)
        done.append(1)
        return 7

    each_place(lambda: uninterrupted(work))
    assert uninterrupted(work) == 7
    deadline = time.monotonic() + 10
    while len(done) < len(begun) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(done) == len(begun)

    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        uninterrupted(fails)


def test_workers_go_on_after_their_caller_was_cut() -> None:
    before = snapshot()
    workers = ThreadPool("cut", 2)
    jobs: list[Job[int]] = []

    def use() -> None:
        jobs.append(Job(lambda: 5))
        workers.begin(jobs[-1])
        assert jobs[-1].result() == 5

    each_place(use)
    for job in jobs:
        job.cancel()

    def check() -> None:
        mine = [Job(lambda: 6) for _ in range(8)]
        for each in mine:
            workers.begin(each)
        assert [each.result() for each in mine] == [6] * 8

    elsewhere(check)
    workers.close(10)
    assert not leaked(before)  # soon: one may be starting, whose caller was cut
    with pytest.raises(ClosedError):
        workers.begin(Job(lambda: 5))
