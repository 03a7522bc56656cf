"""Who leads: the role's moves; no two lead at once, whatever clocks and networks do."""

from __future__ import annotations

from kvstore.master.role import (
    BACKOFF_S,
    KEEP_SHARE,
    MARGIN,
    AcquireLease,
    BecomeLeader,
    Campaign,
    ElectionStateMachine,
    KeepAlive,
    LeaderKey,
    ReadLeader,
    ReleaseLease,
    StepDown,
    WaitUntil,
    WatchLeader,
)
from tests.support.invariants import check_invariants

US = LeaderKey("us:1", 7, 40)
OTHER = LeaderKey("other:1", 8, 50)
TTL = 3.0


def leading(now: float = 100.0) -> ElectionStateMachine:
    role = ElectionStateMachine()
    assert role.next(now) == ReadLeader()
    role.saw(None, 39)
    assert role.next(now) == AcquireLease()
    role.granted(7, TTL)
    assert role.next(now) == Campaign(7)
    role.campaigned(US, 1_040)
    assert role.next(now) == BecomeLeader(1_040)
    return role


def test_a_master_that_finds_nobody_leads() -> None:
    role = leading(100.0)
    assert role.leading
    assert role.until == 100.0 + TTL * (1 - MARGIN)
    check_invariants(role)


def test_the_lease_counts_from_before_it_was_asked_for() -> None:
    role = leading(100.0)
    assert isinstance(role.next(101.0), KeepAlive)
    role.kept(TTL, US)  # however long the answer took
    assert role.until == 101.0 + TTL * (1 - MARGIN)
    assert role.next(101.5) == WaitUntil(101.0 + TTL * KEEP_SHARE)


def test_it_steps_down_when_the_lease_was_not_kept_in_time() -> None:
    role = leading(100.0)
    now = 100.0
    while not isinstance(action := role.next(now), StepDown):
        if isinstance(action, KeepAlive):
            assert action.deadline <= role.until
            now += 0.05
            role.failed(now)
        else:
            assert isinstance(action, WaitUntil)
            now = action.until
    assert now <= 100.0 + TTL * (1 - MARGIN) + 0.1
    assert action.why == "lease_not_kept"
    assert not role.leading
    check_invariants(role)
    assert role.next(now) == ReleaseLease(7)
    assert role.next(now) == ReadLeader()


def test_a_role_that_slept_over_its_lease_says_so_first() -> None:
    role = leading(100.0)
    assert role.next(200.0) == StepDown("lease_not_kept")


def test_a_lease_that_etcd_has_forgotten() -> None:
    role = leading()
    role.next(101.0)
    role.kept(0, None)
    assert role.next(101.0) == StepDown("lease_gone")


def test_somebody_removed_the_key_by_hand() -> None:
    for seen in (None, OTHER):
        role = leading()
        role.next(101.0)
        role.kept(TTL, seen)
        assert role.next(101.0) == StepDown("removed_from_etcd")


def test_the_second_stands_by_and_campaigns_when_the_first_is_gone() -> None:
    role = ElectionStateMachine()
    role.next(0.0)
    role.saw(OTHER, 55)
    assert role.next(0.0) == WatchLeader(55)
    assert role.leader == OTHER
    role.changed()
    assert role.next(9.0) == ReadLeader()
    role.saw(None, 60)
    assert role.next(9.0) == AcquireLease()


def test_the_slower_one_of_two_gives_its_lease_back() -> None:
    role = ElectionStateMachine()
    role.next(0.0)
    role.saw(None, 39)
    role.next(0.0)
    role.granted(7, TTL)
    role.next(0.0)
    role.campaigned(OTHER, 0)
    assert role.next(0.0) == ReleaseLease(7)
    assert role.next(0.0) == WatchLeader(OTHER.revision)


def test_a_win_that_took_longer_than_the_lease_is_none() -> None:
    role = ElectionStateMachine()
    role.next(0.0)
    role.saw(None, 39)
    role.next(0.0)
    role.granted(7, TTL)
    role.next(0.0)
    role.campaigned(US, 1_040)
    assert role.next(TTL) == ReleaseLease(7) or role.next(TTL) == ReadLeader()
    assert not role.leading


def test_an_answer_that_never_came_may_have_made_us_leader() -> None:
    """The lease is given up, so that the key goes; we win again at a new revision only."""
    role = ElectionStateMachine()
    role.next(0.0)
    role.saw(None, 39)
    role.next(0.0)
    role.granted(7, TTL)
    role.next(0.0)
    role.failed(1.0)
    assert role.next(1.0) == ReleaseLease(7)
    assert role.next(1.0) == WaitUntil(1.0 + BACKOFF_S[0])
    assert role.next(1.2) == ReadLeader()
    role.saw(US, 41)
    assert role.next(1.2) == WatchLeader(41)


def test_what_has_stopped_by_itself_is_not_revived() -> None:
    """A process that slept over its time and found the answer to its last request on waking."""
    role = leading(100.0)
    role.next(101.0)
    role.kept(TTL, US)
    role.stopped()
    assert role.next(102.9) == StepDown("lease_not_kept")


def test_a_leader_of_a_lower_epoch_than_nodes_know_leads_again_above_it() -> None:
    role = leading()
    role.outrun(role.epoch - 1)
    assert isinstance(role.next(101.0), KeepAlive), "nothing new"
    role.kept(TTL, US)
    role.outrun(role.epoch + 5)
    assert role.next(101.1) == StepDown("outrun")
    assert role.epoch_least == role.epoch + 6
    assert isinstance(role.next(101.2), ReleaseLease)
    assert isinstance(role.next(101.3), ReadLeader)


def test_resigning_names_the_lease() -> None:
    role = leading()
    assert role.resign() == 7
    assert not role.leading
    assert ElectionStateMachine().resign() == 0


# --- no two at once ----------------------------------------------------------------------------
