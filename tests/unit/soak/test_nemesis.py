"""The schedule of a soak follows from its seed."""

from __future__ import annotations

from tests.soak.nemesis import KINDS, LOSS, PEACE_S, schedule


def test_a_seed_repeats_its_schedule() -> None:
    assert schedule(7, 120, frozenset()) == schedule(7, 120, frozenset())
    assert schedule(7, 120, frozenset()) != schedule(8, 120, frozenset())


def test_every_kind_comes_within_half_an_hour_and_ends_in_time() -> None:
    faults = schedule(1, 1_800, frozenset())
    assert {fault.kind for fault in faults} == set(KINDS)
    assert all(fault.at_s + fault.length_s <= 1_800 - PEACE_S for fault in faults)


def test_the_memory_of_a_node_with_a_disk_is_lost_at_the_end() -> None:
    for seed in range(20):
        last = [f for f in schedule(seed, 50, frozenset()) if f.kind == LOSS][-1]
        assert last.at_s + last.length_s <= 50 - PEACE_S
        assert last.at_s >= 50 - PEACE_S - 1


def test_what_is_left_out_does_not_come() -> None:
    faults = schedule(1, 600, frozenset({"kill node"}))
    assert faults
    assert all(fault.kind != "kill node" for fault in faults)
    assert schedule(1, 600, frozenset(KINDS)) == []
