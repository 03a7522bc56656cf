"""Who leads: the role's moves; no two lead at once, whatever clocks and networks do."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.master.role import (
    BACKOFF_S,
    KEEP_SHARE,
    MARGIN,
    Campaign,
    Grant,
    KeepAlive,
    Lead,
    LeaderSeen,
    Look,
    Revoke,
    Role,
    Sleep,
    StepDown,
    Watch,
)

US = LeaderSeen("us:1", 7, 40)
OTHER = LeaderSeen("other:1", 8, 50)
TTL = 3.0


def leading(now: float = 100.0) -> Role:
    role = Role()
    assert role.next(now) == Look()
    role.saw(None, 39)
    assert role.next(now) == Grant()
    role.granted(7, TTL)
    assert role.next(now) == Campaign(7)
    role.campaigned(US, 1_040)
    assert role.next(now) == Lead(1_040)
    return role


def test_a_master_that_finds_nobody_leads() -> None:
    role = leading(100.0)
    assert role.leading
    assert role.until == 100.0 + TTL * (1 - MARGIN)
    role.check_invariants()


def test_the_lease_counts_from_before_it_was_asked_for() -> None:
    role = leading(100.0)
    assert isinstance(role.next(101.0), KeepAlive)
    role.kept(TTL, US)  # however long the answer took
    assert role.until == 101.0 + TTL * (1 - MARGIN)
    assert role.next(101.5) == Sleep(101.0 + TTL * KEEP_SHARE)


def test_it_steps_down_when_the_lease_was_not_kept_in_time() -> None:
    role = leading(100.0)
    now = 100.0
    while not isinstance(action := role.next(now), StepDown):
        if isinstance(action, KeepAlive):
            assert action.deadline <= role.until
            now += 0.05
            role.failed(now)
        else:
            assert isinstance(action, Sleep)
            now = action.until
    assert now <= 100.0 + TTL * (1 - MARGIN) + 0.1
    assert action.why == "lease_not_kept"
    assert not role.leading
    role.check_invariants()
    assert role.next(now) == Revoke(7)
    assert role.next(now) == Look()


def test_a_role_that_slept_over_its_lease_says_so_first() -> None:
    role = leading(100.0)
    assert role.next(200.0) == StepDown("lease_not_kept")


def test_an_answer_that_came_too_late_does_not_help() -> None:
    role = leading(100.0)
    role.next(101.0)
    role.kept(TTL, US)
    assert role.next(101.0 + TTL) == StepDown("lease_not_kept")


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
    role = Role()
    role.next(0.0)
    role.saw(OTHER, 55)
    assert role.next(0.0) == Watch(55)
    assert role.leader == OTHER
    role.changed()
    assert role.next(9.0) == Look()
    role.saw(None, 60)
    assert role.next(9.0) == Grant()


def test_the_slower_one_of_two_gives_its_lease_back() -> None:
    role = Role()
    role.next(0.0)
    role.saw(None, 39)
    role.next(0.0)
    role.granted(7, TTL)
    role.next(0.0)
    role.campaigned(OTHER, 0)
    assert role.next(0.0) == Revoke(7)
    assert role.next(0.0) == Watch(OTHER.revision)


def test_a_win_that_took_longer_than_the_lease_is_none() -> None:
    role = Role()
    role.next(0.0)
    role.saw(None, 39)
    role.next(0.0)
    role.granted(7, TTL)
    role.next(0.0)
    role.campaigned(US, 1_040)
    assert role.next(TTL) == Revoke(7) or role.next(TTL) == Look()
    assert not role.leading


def test_an_answer_that_never_came_may_have_made_us_leader() -> None:
    """The lease is given up, so that the key goes; we win again at a new revision only."""
    role = Role()
    role.next(0.0)
    role.saw(None, 39)
    role.next(0.0)
    role.granted(7, TTL)
    role.next(0.0)
    role.failed(1.0)
    assert role.next(1.0) == Revoke(7)
    assert role.next(1.0) == Sleep(1.0 + BACKOFF_S[0])
    assert role.next(1.2) == Look()
    role.saw(US, 41)
    assert role.next(1.2) == Watch(41)


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
    assert isinstance(role.next(101.2), Revoke)
    assert isinstance(role.next(101.3), Look)


def test_resigning_names_the_lease() -> None:
    role = leading()
    assert role.resign() == 7
    assert not role.leading
    assert Role().resign() == 0


# --- no two at once ----------------------------------------------------------------------------


@dataclass
class FakeEtcd:
    """As etcd does it: leases that end by its own clock, one key, revisions."""

    now: float = 0.0
    revision: int = 1
    leases: dict[int, float] = field(default_factory=dict)
    key: LeaderSeen | None = None
    _last_id: int = 0

    def expire(self) -> None:
        for lease_id, until in list(self.leases.items()):
            if self.now >= until:
                self.revoke(lease_id)

    def revoke(self, lease_id: int) -> None:
        self.leases.pop(lease_id, None)
        if self.key is not None and self.key.lease_id == lease_id:
            self.key = None
            self.revision += 1

    def grant(self) -> int:
        self._last_id += 1
        self.leases[self._last_id] = self.now + TTL
        return self._last_id

    def campaign(self, lease_id: int, address: str) -> LeaderSeen | None:
        if lease_id not in self.leases:
            return None
        if self.key is None:
            self.revision += 1
            self.key = LeaderSeen(address, lease_id, self.revision)
        return self.key

    def keep_alive(self, lease_id: int) -> float:
        if lease_id not in self.leases:
            return 0.0
        self.leases[lease_id] = self.now + TTL
        return TTL


class Process:
    """A role with a clock of its own, a network that fails, and somebody who stops it."""

    def __init__(self, name: str, etcd: FakeEtcd, rng: random.Random) -> None:
        self.name, self.etcd, self.rng = name, etcd, rng
        self.role = Role()
        self.rate = rng.uniform(0.97, 1.03)
        self.offset = rng.uniform(0, 1e6)
        self.stopped_until = 0.0
        self.wakes_at = 0.0
        self.epochs: list[int] = []

    @property
    def now(self) -> float:
        return self.offset + self.etcd.now * self.rate

    def acts(self) -> bool:
        """What the gate of the shell asks before each call."""
        return self.role.leading and self.now < self.role.until

    def sleep(self, seconds: float) -> None:
        self.wakes_at = self.etcd.now + max(seconds, 0.0) / self.rate

    def step(self, trouble: float) -> None:
        role, etcd = self.role, self.etcd
        action = role.next(self.now)
        role.check_invariants()
        # Before etcd hears it, after, both or not at all.
        delay = self.rng.choice([0.0, 0.01, 0.5, 1.0]) if self.rng.random() < trouble else 0.0
        heard, answered = self.rng.random() >= trouble / 2, self.rng.random() >= trouble / 2
        self.sleep(delay)
        match action:
            case Sleep(until):
                self.sleep(until - self.now)
            case Lead(epoch):
                assert all(epoch > old for old in self.epochs)
                self.epochs.append(epoch)
            case Look() if heard and answered:
                role.saw(etcd.key, etcd.revision)
            case Watch():
                self.sleep(0.1)
                role.changed()
            case Grant() if heard:
                lease_id = etcd.grant()
                if answered:
                    role.granted(lease_id, TTL)
                else:
                    role.failed(self.now)
            case Campaign(lease_id) if heard:
                leader = etcd.campaign(lease_id, self.name)
                if leader is not None and answered:
                    role.campaigned(leader, 1_000 + leader.revision)
                else:
                    role.failed(self.now)
            case KeepAlive(lease_id, _) if heard:
                ttl_s = etcd.keep_alive(lease_id)
                if answered:
                    role.kept(ttl_s, etcd.key)
                else:
                    role.failed(self.now)
            case Revoke(lease_id):
                if heard:
                    etcd.revoke(lease_id)
            case StepDown():
                pass
            case _:
                role.failed(self.now)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), count=st.integers(2, 3), trouble=st.floats(0.0, 0.6))
def test_no_two_lead_at_once_and_somebody_leads_in_the_end(
    seed: int, count: int, trouble: float
) -> None:
    rng = random.Random(seed)
    etcd = FakeEtcd()
    processes = [Process(f"p{number}", etcd, rng) for number in range(count)]
    led: dict[int, str] = {}

    def run(seconds: float, trouble: float) -> None:
        end = etcd.now + seconds
        while etcd.now < end:
            etcd.now += 0.02
            etcd.expire()
            for process in processes:
                if trouble and rng.random() < 0.002:
                    process.stopped_until = etcd.now + rng.uniform(0, 3 * TTL)
                if etcd.now >= max(process.stopped_until, process.wakes_at):
                    process.step(trouble)
            acting = [process for process in processes if process.acts()]
            assert len(acting) <= 1, [p.name for p in acting]
            for process in acting:
                assert led.setdefault(process.role.epoch, process.name) == process.name

    run(60.0, trouble)
    for process in processes:
        process.stopped_until = 0.0
    run(10 * TTL, 0.0)
    assert [process.acts() for process in processes].count(True) == 1
