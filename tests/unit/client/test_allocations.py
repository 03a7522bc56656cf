"""Putting an allocation: what happens when nobody answers, or the object is there already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from kvstore import calls
from kvstore.calls import PutOutcome, SegmentInfo
from kvstore.client.devices import ClientDevices
from kvstore.client.flows import allocate, put
from kvstore.client.flows.write_objects import PutOptions
from kvstore.client.leases.lease_table import RedundantAllocation
from kvstore.client.leases.views import ViewManager
from kvstore.client.values import Bytes1D, described_as
from kvstore.errors import DeadlineExceededError, MasterUnreachableError, ReservationLostError
from kvstore.limits import DEFAULT_NAMESPACE, check_key
from kvstore.runtime.clock import uptime
from tests.unit.client.world import EPOCH, World, grants

WRITE, STORED, FOUND = PutOutcome.WRITE, PutOutcome.STORED, PutOutcome.FOUND
TOKEN = 9
AT = 4096


class Store(World):
    """With views of its segments' memory, as if it was mapped here."""

    def __init__(self) -> None:
        super().__init__(1)
        self.views = ViewManager(self._renew, lease_margin_s=0.2, returnables=[self.context.leases])
        self.devices = ClientDevices()
        self.context.pool, self.context.views = cast(Any, self), self.views
        self.context.clock = uptime  # as the views'
        self.answers[calls.Allocate] = grants([WRITE], [TOKEN], [(1, AT)])
        self.answers[calls.PutStart] = grants([FOUND], [], [])

    def view(self, segment: SegmentInfo, offset: int, length: int) -> memoryview:
        return memoryview(self.memory[segment.segment_id])[offset : offset + length]

    def watch(self, segment: SegmentInfo) -> Any:
        return lambda: segment is self.segments[1]

    def allocate(self) -> Bytes1D:
        descriptor, size = described_as(100, "uint8", "numpy")
        flow = allocate.allocate(self.context, DEFAULT_NAMESPACE, descriptor, size, 0)
        return cast(Bytes1D, self.run(flow))

    def put(self, key: str, array: Bytes1D) -> PutOutcome:
        options = PutOptions(namespace=DEFAULT_NAMESPACE)
        return self.run(put.put(self.context, check_key(key), array, options))

    def _renew(self, request: calls.Request, seconds: float) -> calls.Reply:
        del seconds
        if isinstance(request, calls.PutRevoke):
            return calls.PutRevokeReply(1)
        raise MasterUnreachableError("the background is quiet here")


def renewed(*, key: bool, token: bool) -> calls.RenewReply:
    return calls.RenewReply(10_000, 30_000, bytes([key]), bytes([token]))


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store()
    yield store
    store.views.close()


@pytest.fixture
def unanswered(store: Store) -> Bytes1D:
    """An allocation whose commit under "k" had no answer."""
    array = store.allocate()
    store.answers[calls.Commit] = DeadlineExceededError("nobody answers")
    with pytest.raises(DeadlineExceededError):
        store.put("k", array)
    store.moved.clear()
    return array


def test_a_commit_that_was_carried_out_is_not_written_again(
    store: Store, unanswered: Bytes1D
) -> None:
    """Readers have it by now."""
    store.answers[calls.Renew] = renewed(key=True, token=False)
    assert store.put("k", unanswered) is STORED
    assert store.moved == []
    lease = store.views.of(unanswered)
    assert lease is not None
    assert lease.is_held
    (asked,) = store.requests(calls.Renew)
    assert (asked.keys, asked.counters, asked.epoch, asked.tokens) == (
        [b"k"], [TOKEN], EPOCH, [TOKEN],
    )  # fmt: skip


def test_a_commit_that_never_came_is_made_again(store: Store, unanswered: Bytes1D) -> None:
    store.answers[calls.Renew] = [renewed(key=False, token=True), renewed(key=True, token=False)]
    store.answers[calls.Commit] = calls.CommitReply(STORED)
    assert store.put("k", unanswered) is STORED
    assert store.moved == [], "its header stands there, or what it made was removed and wiped"


def test_made_again_under_another_key_it_has_another_header(
    store: Store, unanswered: Bytes1D
) -> None:
    store.answers[calls.Renew] = [renewed(key=False, token=True), renewed(key=True, token=False)]
    store.answers[calls.Commit] = calls.CommitReply(STORED)
    assert store.put("other", unanswered) is STORED
    (transfer,) = store.moved
    assert transfer.deadline is not None
    assert transfer.deadline < store.context.clock() + 10, "the first commit may still come"


def test_a_commit_that_nobody_knows_of_is_lost(store: Store, unanswered: Bytes1D) -> None:
    store.answers[calls.Renew] = renewed(key=False, token=False)
    with pytest.raises(ReservationLostError):
        store.put("k", unanswered)
    assert store.moved == []


def test_under_another_key_it_is_copied_once_it_is_an_object(
    store: Store, unanswered: Bytes1D
) -> None:
    store.answers[calls.Renew] = renewed(key=True, token=False)
    assert store.put("other", unanswered) is FOUND
    assert store.requests(calls.PutStart)[-1].keys == [b"other"]


def test_an_allocation_whose_object_is_there_stays_readable_and_is_no_allocation(
    store: Store,
) -> None:
    array = store.allocate()
    store.answers[calls.Commit] = calls.CommitReply(FOUND)
    assert store.put("k", array) is FOUND
    lease = store.views.of(array)
    assert lease is not None
    assert lease.what == RedundantAllocation(EPOCH, TOKEN)
    assert lease.is_held
    assert store.views.allocation(array.data) is None
    store.segments[1] = store.segments[1]._replace(generation=2)
    assert not lease.is_held, "the next master does not know of the quarantine"
