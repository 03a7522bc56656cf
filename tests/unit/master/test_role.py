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
    assert role.next_action(now) == ReadLeader()
    role.on_leader_read(None, 39)
    assert role.next_action(now) == AcquireLease()
    role.on_lease_granted(7, TTL)
    assert role.next_action(now) == Campaign(7)
    role.campaigned(US, 1_040)
    assert role.next_action(now) == BecomeLeader(1_040)
    return role


def test_a_master_that_finds_nobody_leads() -> None:
    role = leading(100.0)
    assert role.is_leading
    assert role.until == 100.0 + TTL * (1 - MARGIN)
    check_invariants(role)


def test_the_lease_counts_from_before_it_was_asked_for() -> None:
    role = leading(100.0)
    assert isinstance(role.next_action(101.0), KeepAlive)
    role.on_lease_kept(TTL, US)  # however long the answer took
    assert role.until == 101.0 + TTL * (1 - MARGIN)
    assert role.next_action(101.5) == WaitUntil(101.0 + TTL * KEEP_SHARE)


def test_it_steps_down_when_the_lease_was_not_kept_in_time() -> None:
    role = leading(100.0)
    now = 100.0
    while not isinstance(action := role.next_action(now), StepDown):
        if isinstance(action, KeepAlive):
            assert action.deadline <= role.until
            now += 0.05
            role.on_etcd_failed(now)
        else:
            assert isinstance(action, WaitUntil)
            now = action.until
    assert now <= 100.0 + TTL * (1 - MARGIN) + 0.1
    assert action.reason == "lease_not_kept"
    assert not role.is_leading
    check_invariants(role)
    assert role.next_action(now) == ReleaseLease(7)
    assert role.next_action(now) == ReadLeader()


def test_a_role_that_slept_over_its_lease_says_so_first() -> None:
    role = leading(100.0)
    assert role.next_action(200.0) == StepDown("lease_not_kept")


def test_a_lease_that_etcd_has_forgotten() -> None:
    role = leading()
    role.next_action(101.0)
    role.on_lease_kept(0, None)
    assert role.next_action(101.0) == StepDown("lease_gone")


def test_somebody_removed_the_key_by_hand() -> None:
    for seen in (None, OTHER):
        role = leading()
        role.next_action(101.0)
        role.on_lease_kept(TTL, seen)
        assert role.next_action(101.0) == StepDown("removed_from_etcd")


def test_the_second_stands_by_and_campaigns_when_the_first_is_gone() -> None:
    role = ElectionStateMachine()
    role.next_action(0.0)
    role.on_leader_read(OTHER, 55)
    assert role.next_action(0.0) == WatchLeader(55)
    assert role.leader == OTHER
    role.on_leader_changed()
    assert role.next_action(9.0) == ReadLeader()
    role.on_leader_read(None, 60)
    assert role.next_action(9.0) == AcquireLease()


def test_the_slower_one_of_two_gives_its_lease_back() -> None:
    role = ElectionStateMachine()
    role.next_action(0.0)
    role.on_leader_read(None, 39)
    role.next_action(0.0)
    role.on_lease_granted(7, TTL)
    role.next_action(0.0)
    role.campaigned(OTHER, 0)
    assert role.next_action(0.0) == ReleaseLease(7)
    assert role.next_action(0.0) == WatchLeader(OTHER.revision)


def test_a_win_that_took_longer_than_the_lease_is_none() -> None:
    role = ElectionStateMachine()
    role.next_action(0.0)
    role.on_leader_read(None, 39)
    role.next_action(0.0)
    role.on_lease_granted(7, TTL)
    role.next_action(0.0)
    role.campaigned(US, 1_040)
    assert role.next_action(TTL) == ReleaseLease(7) or role.next_action(TTL) == ReadLeader()
    assert not role.is_leading


def test_an_answer_that_never_came_may_have_made_us_leader() -> None:
    """The lease is given up, so that the key goes; we win again at a new revision only."""
    role = ElectionStateMachine()
    role.next_action(0.0)
    role.on_leader_read(None, 39)
    role.next_action(0.0)
    role.on_lease_granted(7, TTL)
    role.next_action(0.0)
    role.on_etcd_failed(1.0)
    assert role.next_action(1.0) == ReleaseLease(7)
    assert role.next_action(1.0) == WaitUntil(1.0 + BACKOFF_S[0])
    assert role.next_action(1.2) == ReadLeader()
    role.on_leader_read(US, 41)
    assert role.next_action(1.2) == WatchLeader(41)


def test_what_has_stopped_by_itself_is_not_revived() -> None:
    """A process that slept over its time and found the answer to its last request on waking."""
    role = leading(100.0)
    role.next_action(101.0)
    role.on_lease_kept(TTL, US)
    role.on_service_stopped()
    assert role.next_action(102.9) == StepDown("lease_not_kept")


def test_a_leader_of_a_lower_epoch_than_nodes_know_leads_again_above_it() -> None:
    role = leading()
    role.on_epoch_superseded(role.epoch - 1)
    assert isinstance(role.next_action(101.0), KeepAlive), "nothing new"
    role.on_lease_kept(TTL, US)
    role.on_epoch_superseded(role.epoch + 5)
    assert role.next_action(101.1) == StepDown("outrun")
    assert role.epoch_least == role.epoch + 6
    assert isinstance(role.next_action(101.2), ReleaseLease)
    assert isinstance(role.next_action(101.3), ReadLeader)


def test_resigning_names_the_lease() -> None:
    role = leading()
    assert role.resign() == 7
    assert not role.is_leading
    assert ElectionStateMachine().resign() == 0


# --- no two at once ----------------------------------------------------------------------------
