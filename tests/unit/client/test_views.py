"""Leases under views: they follow the memory, are renewed in time, and never lie."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore import calls
from kvstore.client.views import Granted, Lease, Named, Views
from kvstore.errors import KVStoreError, MasterUnreachableError
from kvstore.limits import Key, Namespace
from tests.unit.client.world import segment

NAMED = Named(Namespace("default"), Key(b"a"), 7, 1)
GRANTED = Granted(7, 3, segment(1), 4096, 100)


class Master:
    """Answers renewals as the test says, and lets it wait for them."""

    def __init__(self) -> None:
        self.reply: Callable[[calls.Request], calls.Reply | KVStoreError] = self.renew
        self.asked: list[calls.Request] = []
        self.called = threading.Condition()

    def ask(self, request: calls.Request, seconds: float) -> calls.Reply:
        assert seconds > 0
        with self.called:
            self.asked.append(request)
            self.called.notify_all()
        reply = self.reply(request)
        if isinstance(reply, KVStoreError):
            raise reply
        return reply

    def renew(self, request: calls.Request) -> calls.Reply:
        if isinstance(request, calls.Renew):
            held = bytes([1])
            return calls.Renewed(600, 600, held * len(request.keys), held * len(request.tokens))
        return calls.Revoked(1)

    def wait_for(self, kind: type, count: int = 1) -> list[calls.Request]:
        def found() -> list[calls.Request]:
            return [each for each in self.asked if isinstance(each, kind)]

        with self.called:
            assert self.called.wait_for(lambda: len(found()) >= count, timeout=10)
            return found()


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def views(master: Master) -> Iterator[Views]:
    made = Views(master.ask, lease_margin_s=0.05)
    yield made
    made.close()


def soon(seconds: float = 0.4) -> float:
    return time.monotonic() + seconds


def test_a_live_view_is_renewed_before_its_lease_ends(master: Master, views: Views) -> None:
    array = np.zeros(64, np.uint8)
    lease = views.add(array, NAMED, soon())
    first = master.wait_for(calls.Renew, 3)[0]
    assert isinstance(first, calls.Renew)
    assert (list(first.keys), list(first.counters)) == ([b"a"], [1])
    assert lease.held


def test_slices_and_views_of_it_have_the_same_lease_and_keep_it(
    master: Master, views: Views
) -> None:
    array = np.zeros(64, np.uint8)
    lease = views.add(array, NAMED, soon(60))
    part = array.view(np.float32).reshape(4, 4)[2:]
    del array
    gc.collect()
    assert views.of(part) is lease
    assert len(views) == 1
    del part
    gc.collect()
    assert len(views) == 0


def test_two_views_of_one_object_share_a_lease_until_both_are_gone(
    master: Master, views: Views
) -> None:
    memory = bytearray(64)
    first, second = np.frombuffer(memory, np.uint8), np.frombuffer(memory, np.uint8)
    lease = views.add(first, NAMED, soon(60))
    assert views.add(second, NAMED, soon(60)) is lease
    del first
    gc.collect()
    assert views.of(second) is lease
    del second
    gc.collect()
    assert len(views) == 0


@pytest.mark.parametrize("how", ["silent", "refused"])
def test_a_promise_that_was_not_renewed_is_lost_for_good(
    master: Master, views: Views, how: str
) -> None:
    if how == "silent":
        master.reply = lambda request: MasterUnreachableError("gone")
    else:
        master.reply = lambda request: calls.Renewed(600, 600, bytes(1), bytes(0))
    array = np.zeros(64, np.uint8)
    lease = views.add(array, NAMED, soon(0.3))
    end = time.monotonic() + 10
    while lease.held:
        assert time.monotonic() < end
        time.sleep(0.01)  # there is no event for time that passes
    master.reply = master.renew
    lease.extend(soon(60))
    assert not lease.held
    assert lease.seconds_left == 0
    assert array.size


def test_a_dropped_allocation_is_given_back(master: Master, views: Views) -> None:
    array = np.zeros(64, np.uint8)
    lease = views.add(array, GRANTED, soon(60))
    assert views.allocation(array.data) is lease
    del array
    gc.collect()
    revoke = master.wait_for(calls.PutRevoke)[0]
    assert isinstance(revoke, calls.PutRevoke)
    assert (revoke.epoch, list(revoke.tokens), revoke.settled) == (7, [3], True)


def test_an_allocation_is_renewed_by_its_token_until_it_is_put(
    master: Master, views: Views
) -> None:
    array = np.zeros(64, np.uint8)
    lease = views.add(array, GRANTED, soon())
    renew = master.wait_for(calls.Renew)[0]
    assert isinstance(renew, calls.Renew)
    assert (renew.epoch, list(renew.tokens), list(renew.keys)) == (7, [3], [])
    lease.become(NAMED, soon(60))
    assert views.allocation(array.data) is None
    del array
    gc.collect()
    assert not [each for each in master.asked if isinstance(each, calls.PutRevoke)]


def test_memory_that_is_not_of_the_pool_has_no_lease(views: Views) -> None:
    memory = np.zeros(300, np.uint8)
    array = memory[100:200].view()
    views.add(array, NAMED, soon(60))
    assert views.of(array[99:]) is not None
    assert views.of(memory[200:]) is None
    assert views.of(memory[:100]) is None
    assert views.of(b"bytes") is None
    assert views.allocation(memoryview(b"abc")) is None


def test_closing_stops_the_renewing_thread(master: Master) -> None:
    made = Views(master.ask, lease_margin_s=0.05)
    lease: Lease = made.add(np.zeros(8, np.uint8), NAMED, soon(60))
    made.close()
    assert not [each for each in threading.enumerate() if each.name == "kvstore-renew"]
    assert isinstance(lease, Lease)
