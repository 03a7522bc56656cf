"""Leases of memory in a program's hands: renewed by a script, ended by finalizers."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kvstore import calls
from kvstore.calls import PutRevoke, Renew, RenewReply
from kvstore.client.leases import lease_table as module
from kvstore.client.leases.lease_table import (
    AllocationLease,
    Lease,
    LeasedExtent,
    LeaseTable,
    Mounted,
    ObjectLease,
)
from kvstore.client.leases.read_leases import ReadLeases
from kvstore.client.leases.views import ViewManager
from kvstore.client.values import Bytes1D
from kvstore.errors import MasterUnreachableError
from kvstore.limits import Key
from kvstore.runtime.clock import uptime
from tests.unit.client.world import N, segment

GRANTED = AllocationLease(7, 9, segment(1), 4096, 64)
PLACE = LeasedExtent(bytes(16), 8192)


def always() -> bool:
    return True


def add(
    views: ViewManager,
    array: Bytes1D,
    held: ObjectLease | AllocationLease,
    until: float,
    mounted: Mounted = always,
) -> Lease:
    place = PLACE if isinstance(held, ObjectLease) else None
    (lease,) = views.add_many([(array, array.ctypes.data, held, until, place, None)], mounted)
    return lease


def named(number: int) -> ObjectLease:
    return ObjectLease(N, Key(b"key-%d" % number), 7, number)


class Master:
    """Answers renewals: promises so much more, to those that it holds."""

    def __init__(self) -> None:
        self.asked: list[calls.Request] = []
        self.lease_ms = 800
        self.held = True
        self.away = False
        self.answering: Callable[[], object] = lambda: None
        self._asked = threading.Condition()

    def __call__(self, request: calls.Request, seconds: float) -> calls.Reply:
        assert seconds > 0
        with self._asked:
            self.asked.append(request)
            self._asked.notify_all()
        if isinstance(request, Renew):
            self.answering()
        if self.away:
            raise MasterUnreachableError("away")
        if isinstance(request, PutRevoke):
            return calls.PutRevokeReply(1)
        assert isinstance(request, Renew)
        keys, tokens = bytes([self.held]) * len(request.keys), bytes([1]) * len(request.tokens)
        return RenewReply(self.lease_ms, 2 * self.lease_ms, keys, tokens)

    def wait(self, until: Callable[[list[calls.Request]], bool]) -> None:
        with self._asked:
            assert self._asked.wait_for(lambda: until(self.asked), 10), self.asked


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def views(master: Master) -> Iterator[ViewManager]:
    views = ViewManager(master, lease_margin_s=0.05, returnables=[ReadLeases(0)])
    yield views
    views.close()


def memory(size: int = 64) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.zeros(size, np.uint8)


def is_held(lease: Lease) -> bool:
    return lease.is_held


def soon() -> float:
    return uptime() + 0.8


def later() -> float:
    return uptime() + 100


def test_a_lease_is_renewed_while_its_memory_lives(views: ViewManager, master: Master) -> None:
    array = memory()
    lease = add(views, array, named(1), soon())
    master.wait(lambda asked: len(asked) >= 2)
    assert lease.is_held
    place = [PLACE.uuid], [PLACE.offset]
    assert master.asked[0] == Renew(N, [Key(b"key-1")], [7], [1], 0, (), *place)
    del array
    gc.collect()
    assert len(views) == 0
    count = len(master.asked)
    time.sleep(0.6)
    assert len(master.asked) <= count + 1


def test_an_allocation_that_became_an_object_is_not_revoked(
    views: ViewManager, master: Master
) -> None:
    array = memory()
    lease = add(views, array, GRANTED, soon())
    assert views.allocation(array.data) is lease
    lease.convert_to_object(named(1), soon())
    assert views.allocation(array.data) is None
    assert views.of(array) is lease
    master.wait(lambda asked: any(isinstance(each, Renew) and each.keys for each in asked))
    del array
    gc.collect()
    views.close()
    assert not any(isinstance(request, PutRevoke) for request in master.asked)


def test_what_the_master_does_not_know_ends_when_its_promise_does(
    views: ViewManager, master: Master
) -> None:
    master.held = False
    array = memory()
    until = soon()
    lease = add(views, array, named(1), until)
    master.wait(lambda asked: len(asked) >= 1)
    assert is_held(lease)
    while is_held(lease):
        assert uptime() < until + 0.1
        time.sleep(0.005)
    assert array.size


def test_the_lease_counts_from_before_the_question_less_the_margin(
    views: ViewManager, master: Master
) -> None:
    master.lease_ms = 60_000
    array = memory()
    lease = add(views, array, named(1), uptime() + 0.5)
    master.wait(lambda asked: len(asked) == 1)
    deadline = uptime() + 5
    while lease.remaining_s < 1 and uptime() < deadline:
        time.sleep(0.001)
    assert 59 < lease.remaining_s < 60 - 0.05
    assert array.size


def test_the_same_memory_twice_is_one_lease_until_both_are_gone(views: ViewManager) -> None:
    buffer = bytearray(64)
    first, second = np.frombuffer(buffer, np.uint8), np.frombuffer(buffer, np.uint8)
    lease = add(views, first, named(1), later())
    assert add(views, second, named(1), later()) is lease
    del first
    gc.collect()
    assert len(views) == 1
    assert lease.is_held
    del second
    gc.collect()
    assert len(views) == 0


def test_an_older_promise_of_the_same_memory_shortens_nothing(views: ViewManager) -> None:
    buffer = bytearray(64)
    first, second = np.frombuffer(buffer, np.uint8), np.frombuffer(buffer, np.uint8)
    lease = add(views, first, named(1), uptime() + 100)
    renew_at = lease.renew_at
    assert add(views, second, named(1), uptime() + 1) is lease
    assert lease.remaining_s > 99
    assert lease.renew_at == renew_at
    assert first.size + second.size == 128


def twice(size: int = 300) -> tuple[Bytes1D, Bytes1D]:
    """Two arrays over the same memory, each the first of its own promise."""
    buffer = bytearray(size)
    return np.frombuffer(buffer, np.uint8), np.frombuffer(buffer, np.uint8)


def test_a_lost_view_stays_lost_when_its_memory_is_leased_anew(views: ViewManager) -> None:
    lost, newer = twice()
    old = add(views, lost, named(1), uptime() - 1)
    new = add(views, newer, named(2), later())
    for part in (lost, lost[7:], lost[::-1], lost.view(np.uint16), lost.data, lost.data[5:9]):
        assert views.of(part) is old
    for part in (newer, newer[7:], newer[::-1], newer.view(np.uint16), newer.data, newer.data[5:9]):
        assert views.of(part) is new
    assert not old.is_held
    assert new.is_held
    del newer, part
    assert views.of(lost) is old
    assert len(views) == 1


def test_a_lost_view_stays_lost_when_a_newer_one_lies_around_it(views: ViewManager) -> None:
    whole = bytearray(300)
    lost = np.frombuffer(memoryview(whole)[100:200], np.uint8)
    newer = np.frombuffer(whole, np.uint8)
    old = add(views, lost, named(1), uptime() - 1)
    new = add(views, newer, named(2), later())
    assert views.of(lost) is old
    assert views.of(newer[100:]) is new


def test_tensors_have_the_lease_of_the_array_that_they_were_made_of(views: ViewManager) -> None:
    torch = pytest.importorskip("torch")
    arrays, tensors = list(twice()), []
    for number, until in enumerate((uptime() - 1, later())):
        tensors.append(torch.from_numpy(arrays[number]))
        what, address = named(number), arrays[number].ctypes.data
        views.add_many([(arrays[number], address, what, until, PLACE, tensors[-1])], always)
    arrays.clear()
    old, new = tensors
    for made in (
        old,
        old[3:],
        old.view(torch.int16),
        old.numpy(),
        old[9:].numpy()[3:],
        old.detach(),
    ):
        lease = views.of(made)
        assert lease is not None
        assert lease.what == named(0)
    for made in (
        new,
        new[3:],
        new.view(torch.int16),
        new.numpy(),
        new[9:].numpy()[3:],
        new.detach(),
    ):
        lease = views.of(made)
        assert lease is not None
        assert lease.what == named(1)
        assert lease.is_held
    del tensors, made, new
    gc.collect()
    assert len(views) == 1
    lease = views.of(old)
    assert lease is not None
    assert not lease.is_held


def test_where_the_trace_to_the_array_is_lost_the_promise_that_holds_least_counts(
    views: ViewManager,
) -> None:
    """Such as a tensor that a program makes of an array: it has a storage of its own."""
    torch = pytest.importorskip("torch")
    lost, newer = twice()
    new = add(views, newer, named(2), later())
    assert views.of(torch.from_numpy(newer)) is new
    old = add(views, lost, named(1), uptime() - 1)
    assert views.of(torch.from_numpy(newer)) is old
    del lost
    assert len(views) == 1
    assert views.of(torch.from_numpy(newer)) is new


def test_a_lost_allocation_is_not_the_newer_one_in_its_place(views: ViewManager) -> None:
    torch = pytest.importorskip("torch")
    lost, newer = twice()
    old = add(views, lost, GRANTED, uptime() - 1)
    new = add(views, newer, GRANTED._replace(token=10), later())
    assert views.allocation(lost.data) is old
    assert views.allocation(newer.data) is new
    assert views.allocation(newer.data[1:]) is None
    wrapped = torch.from_numpy(newer).numpy()
    assert views.allocation(wrapped.data) is old, "it cannot be told whose it is"


def test_the_memory_of_a_lost_view_is_not_taken_for_the_allocation_there(
    views: ViewManager,
) -> None:
    torch = pytest.importorskip("torch")
    lost, newer = twice()
    add(views, lost, named(1), uptime() - 1)
    add(views, newer, GRANTED, later())
    assert views.allocation(lost.data) is None
    assert views.allocation(torch.from_numpy(lost).numpy().data) is None


def test_only_memory_within_a_lease_is_found(views: ViewManager) -> None:
    whole = memory(300)
    array = np.frombuffer(whole.data[100:200], np.uint8)
    lease = add(views, array, named(1), later())
    assert views.of(array) is lease
    assert views.of(array[50:]) is lease
    assert views.of(array[::-1]) is lease
    assert views.of(array.data[7:]) is lease
    assert views.of(whole) is None
    assert views.of(whole[99:]) is None
    assert views.of(whole[200:]) is None
    assert views.of(memory()) is None
    assert views.of(memoryview(b"")) is None
    assert views.of(whole[199:]) is lease


def test_many_leases_are_renewed_in_batches(
    views: ViewManager, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RENEW_KEYS_MAX", 40)
    master.lease_ms = 60_000
    arrays = [memory() for _ in range(100)]
    until = soon()
    leases = [add(views, array, named(n), until) for n, array in enumerate(arrays)]
    master.wait(lambda _: all(lease.remaining_s > 10 for lease in leases))
    renewed = [request for request in master.asked if isinstance(request, Renew)]
    assert max(len(request.keys) for request in renewed) <= 40
    assert sum(len(request.keys) for request in renewed) >= 100


def test_a_lease_that_is_due_sooner_wakes_the_thread(views: ViewManager, master: Master) -> None:
    patient, hasty = memory(), memory()
    add(views, patient, named(1), uptime() + 3_600)
    time.sleep(0.05)
    add(views, hasty, named(2), soon())
    master.wait(lambda asked: any(isinstance(e, Renew) and b"key-2" in e.keys for e in asked))
    assert not any(isinstance(e, Renew) and b"key-1" in e.keys for e in master.asked)
    assert patient.size + hasty.size == 128


def test_closing_ends_the_thread_and_not_the_memory(master: Master) -> None:
    manager = ViewManager(master, lease_margin_s=0.05, returnables=[ReadLeases(0)])
    with contextlib.closing(manager) as views:
        array = memory()
        lease = add(views, array, named(1), soon())
        views.close()
        assert is_held(lease)
        views.close()
        late = memory()
        add(views, late, named(2), soon())
    while is_held(lease):
        time.sleep(0.01)
    assert array.size + late.size == 128
    assert not any(thread.name == "kvstore-renew" for thread in threading.enumerate())


def test_slices_and_reshapes_of_it_keep_the_lease(views: ViewManager) -> None:
    array = memory()
    lease = add(views, array, named(1), later())
    part = array.view(np.float32).reshape(4, 4)[2:]
    del array
    gc.collect()
    assert views.of(part) is lease
    del part
    gc.collect()
    assert len(views) == 0


def test_a_dropped_allocation_is_given_back(views: ViewManager, master: Master) -> None:
    array = memory()
    add(views, array, GRANTED, later())
    del array
    gc.collect()
    master.wait(lambda asked: PutRevoke(7, [9], True) in asked)


class Mount:
    """A segment of the pool that can be mounted anew."""

    same = True

    def __call__(self) -> bool:
        return self.same


def test_a_promise_kept_by_another_replica_is_no_promise_of_this_memory(
    views: ViewManager, master: Master
) -> None:
    """Its node counted as dead and has joined anew, and the master says yes for the other one."""
    mount = Mount()
    array = memory()
    lease = add(views, array, named(1), soon(), mount)
    master.wait(lambda asked: len(asked) >= 1)
    assert is_held(lease)
    mount.same = False
    assert is_held(lease), "what was promised is waited for"
    deadline = uptime() + 5
    while is_held(lease):
        assert uptime() < deadline, "renewed for ever"
        time.sleep(0.005)
    assert array.size


def test_an_answer_that_comes_after_the_segment_was_mounted_anew_promises_nothing() -> None:
    """The master has renewed the lease of the object, which may be elsewhere by then."""
    mount = Mount()
    lease = Lease(named(1), 10.0, 4096, mount, lambda: 0.0, PLACE)
    lease.renewed(20.0)
    assert lease.remaining_s == 20.0
    mount.same = False
    lease.renewed(30.0)
    assert lease.remaining_s == 20.0


def test_an_allocation_ends_when_its_segment_is_mounted_anew(views: ViewManager) -> None:
    """The next master grants its memory to others one lease later, and knows nothing of it."""
    mount = Mount()
    array = memory()
    lease = add(views, array, GRANTED, later(), mount)
    assert is_held(lease)
    mount.same = False
    assert not is_held(lease)
    mount.same = True
    assert not is_held(lease), "that is final"
    assert array.size


@pytest.mark.parametrize("held", [GRANTED, named(1)])
def test_an_array_that_is_dropped_waits_for_no_lock(
    views: ViewManager, master: Master, held: ObjectLease | AllocationLease
) -> None:
    """The collector drops it wherever it likes: also while the renewing thread has all its locks,
    in that thread."""
    arrays = [memory()]
    add(views, arrays[0], held, later())
    with views._lock:
        dropping = threading.Thread(target=arrays.clear, daemon=True)
        dropping.start()
        dropping.join(10)
        assert not dropping.is_alive()
    assert len(views) == 0
    if held is GRANTED:
        master.wait(lambda asked: PutRevoke(7, [9], True) in asked)


def test_what_the_renewing_thread_itself_drops_is_given_back(
    views: ViewManager, master: Master
) -> None:
    """A collection runs in the thread that happens to allocate."""
    ours, its = memory(), [memory()]
    add(views, its[0], GRANTED, later())
    lease = add(views, ours, named(1), later())
    master.answering = its.clear
    lease.renew_at = 0.0
    add(views, memory(), GRANTED._replace(token=10), later())
    master.wait(lambda asked: PutRevoke(7, [9], True) in asked)


def test_the_renewing_thread_outlives_a_bug(
    views: ViewManager, master: Master, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        master.answering = lambda: None
        raise ValueError("a bug")

    master.answering = fail
    array = memory()
    lease = add(views, array, named(1), later())
    lease.renew_at = 0.0
    add(views, memory(), GRANTED, later())
    master.wait(lambda asked: sum(isinstance(each, Renew) for each in asked) >= 2)
    assert "lease_renewal_broken" in caplog.text
    assert array.size


def test_new_views_do_not_put_off_the_renewal_of_others(views: ViewManager, master: Master) -> None:
    """Each new one wakes the thread."""
    array = memory()
    lease = add(views, array, named(0), later())
    lease.renew_at = uptime() + 0.3
    deadline = uptime() + 30
    others: list[Bytes1D] = []
    number = 0
    while not any(isinstance(each, Renew) and b"key-0" in each.keys for each in master.asked):
        assert uptime() < deadline
        number += 1
        others = [*others[-50:], memory()]
        add(views, others[-1], named(number), soon())


def test_a_lease_of_a_second_outlives_a_master_that_stalls_for_a_third_of_one() -> None:
    """Wherever that falls, and though the next attempt has to connect anew, which takes 0.1 s."""
    stall_s, connect_s = 0.35, 0.1
    for begin in (number / 50 for number in range(100)):
        now = 0.0
        table = LeaseTable(lambda: now)  # noqa: B023 - called before the next round
        lease = table.lease_for(4096, 64, named(1), 0.8, always, PLACE)
        table.enter(4096, lease, object())
        broken = False
        while now < begin + 2 and is_held(lease):
            now = table.wake_at()
            for renewal in table.due():
                asked, ends = now, now + renewal.patience_s
                stalled = begin <= now < begin + stall_s
                done = (begin + stall_s if stalled else now) + connect_s * broken
                now = min(done, ends)
                if done > ends:
                    broken = True
                    renewal.failed(MasterUnreachableError("stalled"))
                else:
                    broken = False
                    renewal.on_reply(RenewReply(1_000, 0, b"\1", b""), asked, 0.2)
        assert is_held(lease), begin


def test_what_was_let_go_keeps_no_segment_mapped(views: ViewManager) -> None:
    mount = Mount()
    array = memory()
    lease = add(views, array, named(1), later(), mount)
    kept = weakref.ref(mount)
    del array, mount
    assert len(views) == 0
    assert kept() is None
    assert not lease.is_held


def test_what_is_let_go_after_closing_keeps_no_segment_mapped(views: ViewManager) -> None:
    mount = Mount()
    array = memory()
    lease = add(views, array, named(1), later(), mount)
    views.close()
    kept = weakref.ref(mount)
    del mount
    assert lease.is_held
    assert kept() is not None
    del array
    assert kept() is None
    assert not lease.is_held


def test_a_renewal_that_promises_no_more_than_before_is_not_repeated_at_once() -> None:
    """Such as a master's with a shorter lease."""
    table = LeaseTable(lambda: 10.0)
    lease = table.lease_for(4096, 64, named(1), 100.0, always, PLACE)
    table.enter(4096, lease, object())
    lease.renewed(11.0)
    assert lease.renew_at == 40.0
