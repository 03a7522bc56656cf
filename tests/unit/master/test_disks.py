"""Objects are written behind to a disk of their node, and brought back."""

from __future__ import annotations

import random

import pytest

from kvstore import calls
from kvstore.calls import (
    CopyOutcome,
    DiskLimits,
    HintAction,
    HintOutcome,
    PutOutcome,
    Version,
)
from kvstore.calls.tenants import TenantRule
from kvstore.errors import NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.master.state.inventory import Claim
from kvstore.master.state.object_events import REMOVED_SIZE
from kvstore.master.state.rules import MasterRules
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import EXTENT, NAMESPACE, NO_LIMITS, Cluster, keys_of

SIZE = 2 * EXTENT - 1024
"""Payload bytes: an object takes two blocks."""
MEMORY, DISK = 32, 64
"""Objects that fit."""
ALL = [f"k{index}" for index in range(60)]


def with_disk(limits: DiskLimits = NO_LIMITS, disk: int = DISK, memory: int = MEMORY) -> Cluster:
    cluster = Cluster({}, MasterRules())
    cluster.join("one", 2 * memory, disk=2 * disk * EXTENT, limits=limits)
    return cluster


def fill(cluster: Cluster, names: list[str] = ALL, **given: object) -> None:
    """Puts each, as an engine does: with time for the disk between them."""
    for name in names:
        cluster.put([name], size=SIZE, **given)
        cluster.after(1)
    check_invariants(cluster.state)


def in_memory(cluster: Cluster) -> list[str]:
    table = cluster.state.forest.table(NAMESPACE)
    assert table is not None
    return [record.key.decode() for record in table if record.complete]


def claims_of(cluster: Cluster) -> list[Claim]:
    """What the node finds on its disk, the newest first."""
    return sorted(cluster.on_disk.values(), key=lambda claim: claim.version, reverse=True)


def versions_on_disk(cluster: Cluster) -> set[Version]:
    return {claim.version for claim in cluster.on_disk.values()}


def lose_memory(cluster: Cluster) -> None:
    """The node's host loses power, and is back: only the disk has anything."""
    cluster.wipe()
    cluster.copies.clear()
    cluster.kill("one")
    cluster.join("one", again=True, tells=False)
    cluster.tell("one", index=0)
    cluster.tell("one", *claims_of(cluster), index=1)
    cluster.after(cluster.rules.lease_ms + 1_000)


def test_objects_that_are_evicted_in_one_step_are_written_by_one_order() -> None:
    cluster = with_disk(memory=2_048)
    cluster.copies_at_once = False
    fill(cluster, [f"k{index}" for index in range(2_048)])
    assert max(len(order.tokens) for _, order in cluster.copies) > 1


def test_what_is_evicted_is_found_on_the_disk_and_comes_back() -> None:
    cluster = with_disk()
    fill(cluster)
    gone = [name for name in ALL if name not in in_memory(cluster)]
    assert len(gone) >= len(ALL) - MEMORY
    assert cluster.present(ALL) == "".join(ALL)
    for name in gone:
        assert cluster.find([name]) == [name]
        assert name in in_memory(cluster)
        cluster.after(200)
    check_invariants(cluster.state)


def test_a_match_counts_what_is_on_the_disk_and_brings_it_if_asked_to() -> None:
    cluster = with_disk()
    cluster.put(ALL[:20], size=SIZE)
    fill(cluster, ALL[20:])
    match = calls.MatchPrefix([NAMESPACE], keys_of(ALL[:20]), placements=False)
    [found] = cluster.state.asking.match_prefix(cluster.now_ms, match).matches
    assert found.matched == 20
    assert found.on_disk == 20 - len(set(ALL[:20]) & set(in_memory(cluster))) > 0
    cluster.state.asking.match_prefix(cluster.now_ms, match._replace(bring=True))
    cluster.work()
    assert cluster.match(ALL[:8], placements=True) == 8
    check_invariants(cluster.state)


def test_a_block_in_memory_is_matched_after_one_that_is_on_a_disk_only() -> None:
    cluster = with_disk()
    cluster.put(ALL[:2], size=SIZE)
    fill(cluster, ALL[2:])
    assert not set(ALL[:2]) & set(in_memory(cluster))
    cluster.put(["next"], size=SIZE, parent=ALL[1])
    assert cluster.match([*ALL[:2], "next", "absent"]) == 3
    assert cluster.find([*ALL[:2], "next"]) == [*ALL[:2], "next"]
    assert cluster.match([*ALL[:2], "next"], placements=True) == 3
    check_invariants(cluster.state)


def test_a_state_on_a_disk_is_matched_and_brought_if_asked_to() -> None:
    """Of recurrent layers, which a hit needs at its end."""
    cluster = with_disk()
    cluster.put(ALL[:4], size=SIZE)
    cluster.put([ALL[3]], size=SIZE, namespace="states")
    fill(cluster, ALL[4:])
    assert cluster.state.forest.get("states", Key(ALL[3].encode())) is None, "on the disk only"
    states = [Namespace("states")]
    match = calls.MatchPrefix([NAMESPACE], keys_of(ALL[:4]), placements=False, states=states)
    assert cluster.state.asking.match_prefix(cluster.now_ms, match).state == 4
    assert cluster.state.forest.get("states", Key(ALL[3].encode())) is None
    cluster.state.asking.match_prefix(cluster.now_ms, match._replace(bring=True))
    cluster.work()
    table = cluster.state.forest.table(states[0])
    assert table is not None
    assert [record.key for record in table if record.complete] == keys_of(ALL[3:4])
    without = match._replace(states=[*states, Namespace("other")])
    assert cluster.state.asking.match_prefix(cluster.now_ms, without).state == 0


def test_a_prefetch_brings_a_chain() -> None:
    cluster = with_disk()
    cluster.put(ALL[:6], size=SIZE)
    fill(cluster, ALL[6:])
    assert not set(ALL[:6]) & set(in_memory(cluster))
    hint = calls.Hint(NAMESPACE, keys_of(ALL[5:6]), [int(HintAction.PREFETCH)], [0])
    outcomes: list[int] = []
    for _ in range(2):
        outcomes += cluster.state.hints.hint(cluster.now_ms, hint).outcomes
        cluster.work()
    assert outcomes == [HintOutcome.ACCEPTED, HintOutcome.IGNORED]
    assert set(ALL[:6]) <= set(in_memory(cluster))


def test_a_chain_is_written_from_its_root_on() -> None:
    cluster = with_disk()
    cluster.copies_at_once = False
    cluster.put(ALL[:4], size=SIZE)
    for name in ALL[4:MEMORY]:
        cluster.put([name], size=SIZE)
    cluster.after(100)
    order = cluster.copies[0][1]
    versions = [cluster.stat(name).version for name in ALL[:4]]
    assert list(order.counters)[:4] == [version.counter for version in versions]


def test_a_put_does_not_wait_for_the_disk() -> None:
    cluster = with_disk()
    cluster.copies_at_once = False
    fill(cluster)
    assert len(in_memory(cluster)) <= MEMORY
    cluster.after(30_000)  # the grants expire
    cluster.after(30_000)
    check_invariants(cluster.state)


def test_a_query_waits_for_the_disk_no_longer_than_agreed() -> None:
    cluster = with_disk()
    fill(cluster)
    [gone, *_] = [name for name in ALL if name not in in_memory(cluster)]
    cluster.copies_at_once = False
    reply_id = cluster.find([gone])
    assert isinstance(reply_id, int)
    cluster.after(cluster.rules.bring_ms_max)
    assert cluster.found([gone], cluster.answers.pop(reply_id)) == []
    cluster.copy()
    assert cluster.find([gone]) == [gone]
    check_invariants(cluster.state)


def test_a_disk_that_is_late_is_asked_for_one_object_at_a_time_until_it_is_fast() -> None:
    cluster = with_disk()
    fill(cluster)
    gone = [name for name in ALL if name not in in_memory(cluster)]
    cluster.copies_at_once = False
    cluster.find(gone[:1])
    cluster.after(cluster.rules.bring_ms_max)
    assert cluster.find(gone[1:2]) == [], "a miss at once, while one is on its way"
    cluster.copy()
    cluster.work()
    cluster.find(gone[1:2])
    cluster.after(cluster.rules.bring_ms_max)
    assert cluster.find(gone[2:3]) == [], "still late"
    cluster.copy()
    cluster.copies_at_once = True
    cluster.find(gone[2:8])
    cluster.after(200)
    assert cluster.find(gone[3:8]) == gone[3:8], "the one that came was fast"
    check_invariants(cluster.state)


@pytest.mark.parametrize("outcome", [CopyOutcome.CORRUPT, CopyOutcome.CHANGED, CopyOutcome.FAILED])
def test_a_copy_that_cannot_be_brought_is_a_miss(outcome: CopyOutcome) -> None:
    cluster = with_disk()
    fill(cluster)
    [gone, *_] = [name for name in ALL if name not in in_memory(cluster)]
    cluster.copies_at_once = False
    reply_id = cluster.find([gone])
    assert isinstance(reply_id, int)
    cluster.copy(outcome)
    cluster.work()
    assert cluster.found([gone], cluster.answers.pop(reply_id)) == []
    assert cluster.present([gone]) == ""
    check_invariants(cluster.state)


def test_a_disk_with_three_errors_is_not_used_any_more() -> None:
    cluster = with_disk()
    cluster.copies_at_once = False
    fill(cluster, ALL[:MEMORY])
    while "disk_failed" not in cluster.notices:
        assert cluster.copies
        cluster.copy(CopyOutcome.FAILED)
        cluster.work()
    cluster.copies.clear()
    fill(cluster, ALL[MEMORY:])
    assert not cluster.copies
    check_invariants(cluster.state)


def test_what_is_removed_is_gone_from_the_disk_before_the_reply() -> None:
    cluster = with_disk()
    fill(cluster)
    [removed] = [claim for claim in claims_of(cluster) if claim.name[1] == ALL[0].encode()]
    cluster.wipes_at_once = False
    result = cluster.remove_later(ALL[:1])
    assert not isinstance(result, calls.RemoveReply), "before the wipe"
    assert cluster.present(ALL[:1]) == ""
    cluster.wipe()
    assert isinstance(cluster.reply(result), calls.RemoveReply)
    assert removed.version not in versions_on_disk(cluster)
    cluster.wipes_at_once = True
    while cluster.clear(16).remaining:
        cluster.after(10)
    assert not cluster.on_disk
    assert cluster.present(ALL) == ""
    check_invariants(cluster.state)


@pytest.mark.parametrize("direction", ["write", "bring"])
def test_what_is_removed_while_it_is_copied_does_not_come_back(direction: str) -> None:
    cluster = with_disk()
    fill(cluster, ALL[: MEMORY - 4])
    if direction == "bring":
        fill(cluster, ALL[MEMORY - 4 :])
    cluster.copies_at_once = False
    if direction == "bring":
        name = next(each for each in ALL if each not in in_memory(cluster))
        assert isinstance(cluster.find([name]), int)
    else:
        fill(cluster, ALL[MEMORY - 4 : MEMORY])
        token = cluster.copies[0][1].counters[0]
        name = next(each for each in ALL if cluster.stat(each).version.counter == token)
    assert cluster.remove([name]) == [1]
    cluster.copy()
    cluster.work()
    assert cluster.present([name]) == ""
    cluster.after(60_000)
    check_invariants(cluster.state)


def test_a_full_disk_evicts_the_oldest_and_has_them_wiped() -> None:
    cluster = with_disk()
    names = [f"n{index}" for index in range(3 * DISK)]
    fill(cluster, names)
    cluster.after(1_000)
    present = [name for name in names if cluster.present([name])]
    assert len(present) > DISK
    assert present[-DISK:] == names[-DISK:]
    disk = next(iter(cluster.state.common.disks.disks.values()))
    assert len(cluster.on_disk) == disk.objects
    check_invariants(cluster.state)


def test_an_object_that_is_replaced_loses_its_copy() -> None:
    cluster = with_disk()
    fill(cluster)
    [gone, *_] = [name for name in ALL if name not in in_memory(cluster)]
    before = cluster.state.common.disks.get(NAMESPACE, Key(gone.encode()))
    assert before is not None
    cluster.put([gone], size=SIZE, overwrite=True)
    assert Version(before.epoch, before.counter) not in versions_on_disk(cluster)
    check_invariants(cluster.state)


def test_a_put_keeps_the_value_that_is_on_a_disk() -> None:
    cluster = with_disk()
    fill(cluster)
    gone = [name for name in ALL if name not in in_memory(cluster)][:2]
    grants = cluster.start([*gone, "new"], size=SIZE, chain=False)
    assert list(grants.outcomes) == [PutOutcome.FOUND, PutOutcome.FOUND, PutOutcome.WRITE]
    cluster.end(grants)
    assert cluster.find(gone) == gone
    check_invariants(cluster.state)


def test_what_is_removed_from_a_failed_disk_is_wiped() -> None:
    cluster = with_disk()
    fill(cluster)
    [gone, *_] = [name for name in ALL if name not in in_memory(cluster)]
    [claim] = [claim for claim in claims_of(cluster) if claim.name[1] == gone.encode()]
    next(iter(cluster.state.common.disks.disks.values())).is_failed = True
    assert cluster.present([gone]) == ""
    cluster.remove([gone])
    assert claim.version not in versions_on_disk(cluster)


def test_a_short_budget_keeps_out_what_was_used_least() -> None:
    day = 8 * 2 * EXTENT
    cluster = with_disk(DiskLimits(0, day))
    disk = next(iter(cluster.state.common.disks.disks.values()))
    disk.budget._days = 0.4 * disk.budget._capacity
    fill(cluster)
    assert not disk.written_objects, "nothing was used twice"
    disk.budget._days = 0.9 * disk.budget._capacity
    fill(cluster, [f"m{index}" for index in range(10)])
    assert disk.written_objects


def test_a_limited_rate_is_kept() -> None:
    per_s = 4 * 2 * EXTENT
    cluster = with_disk(DiskLimits(per_s, 0))
    fill(cluster)
    disk = next(iter(cluster.state.common.disks.disks.values()))
    assert disk.written_objects <= 5
    for name in ALL:
        cluster.put([f"later-{name}"], size=SIZE)
        cluster.after(50)
    assert 10 <= disk.written_objects <= 5 + 4 * 4


def test_puts_find_free_memory_while_the_disk_takes_no_more() -> None:
    cluster = with_disk(DiskLimits(2 * EXTENT, 0), memory=256)
    [memory] = cluster.state.common.pool.segments.values()
    for index in range(600):
        cluster.put([f"k{index}"], size=SIZE)
        cluster.after(1)
        assert memory.allocator.free_bytes >= 3 * 2 * EXTENT, "the next put evicts for itself"


def test_a_node_that_returns_brings_its_disk_with_it() -> None:
    cluster = with_disk()
    fill(cluster)
    names = [claim.name[1].decode() for claim in claims_of(cluster)]
    assert len(names) >= len(ALL) - MEMORY
    lose_memory(cluster)
    assert cluster.present(names) == "".join(names)
    assert cluster.match(names[:1]) == 1
    assert cluster.find(names[:4]) == names[:4]
    cluster.kill("one")
    cluster.join("one", again=True, tells=False)
    cluster.tell("one", index=0)
    cluster.tell("one", *claims_of(cluster), index=1)
    assert cluster.match(names[:1]) == 0, "there is no memory to bring it to"
    check_invariants(cluster.state)


def test_what_a_disk_has_reported_is_found_while_it_reports_the_rest() -> None:
    cluster = with_disk()
    fill(cluster)
    cluster.kill("one")
    cluster.wipe()
    cluster.join("one", again=True, tells=False)
    cluster.tell("one", index=0)
    cluster.after(cluster.rules.lease_ms)
    claims = claims_of(cluster)
    cluster.tell("one", *claims[:4], index=1, last=False)
    first = [claim.name[1].decode() for claim in claims[:4]]
    assert cluster.find(first) == first
    cluster.put(["new"], size=SIZE)
    cluster.tell("one", *claims[4:], index=1, first=False)
    assert cluster.present(first) == "".join(first)
    check_invariants(cluster.state)


def test_what_was_removed_while_the_disk_was_away_stays_removed() -> None:
    cluster = with_disk()
    cluster.join("two", 8)
    fill(cluster, ALL[:40])
    first = claims_of(cluster)[0]
    removed = first.name[1].decode()
    cluster.kill("one")
    cluster.remove([removed])
    lose_memory(cluster)
    assert cluster.present([removed]) == ""
    assert first.version not in versions_on_disk(cluster)
    check_invariants(cluster.state)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_no_byte_is_lost_and_nothing_removed_returns(seed: int) -> None:
    dice = random.Random(seed)
    cluster = with_disk(disk=24)
    removing: list[tuple[int, str, Version]] = []
    removed: set[Version] = set()
    outcomes = [CopyOutcome.DONE] * 6 + [CopyOutcome.CORRUPT, CopyOutcome.CHANGED]
    for _ in range(300):
        step = dice.random()
        chain = dice.randrange(10)
        blocks = [f"c{chain}-{block}" for block in range(dice.randint(1, 6))]
        cluster.copies_at_once = step < 0.5
        cluster.wipes_at_once = step < 0.8 or step > 0.9
        if step < 0.45:
            try:
                result = cluster.start_or_wait(blocks, size=SIZE, overwrite=step < 0.05)
            except NoSpaceError:
                continue
            if isinstance(result, calls.Grants):
                cluster.end(result)
        elif step < 0.6:
            cluster.find(blocks)
        elif step < 0.65:
            cluster.match(blocks)
        elif step < 0.75:
            name = dice.choice(blocks)
            known = [c.version for c in claims_of(cluster) if c.name[1] == name.encode()]
            version = max([cluster.stat(name).version, *known])
            removal = cluster.remove_later([name])
            removing.append((getattr(removal, "reply_id", 0), name, version))
        elif step < 0.85:
            cluster.copy(dice.choice(outcomes))
        elif step < 0.9:
            cluster.wipe()
        elif step < 0.92:
            lose_memory(cluster)
        else:
            cluster.after(dice.choice([1, 100, 2_000, 40_000]))
        cluster.work()
        check_invariants(cluster.state)
        for reply_id, name, version in removing[:]:
            if not reply_id or reply_id in cluster.answers:
                removing.remove((reply_id, name, version))
                removed.add(version)
        assert not removed & versions_on_disk(cluster), "removed, and on the disk"
    cluster.wipes_at_once = cluster.copies_at_once = True
    cluster.wipe()
    cluster.copy()
    cluster.after(120_000)
    check_invariants(cluster.state)
    lose_memory(cluster)
    assert not removed & versions_on_disk(cluster)


def test_events_and_lists_name_the_medium_of_each_object() -> None:
    cluster = with_disk()
    cluster.state.forest.collect_events()
    fill(cluster)
    on_disk = {event[1].decode(): event[5] for event in cluster.state.take_events(1_000)}
    gone = [name for name in ALL if name not in in_memory(cluster)]
    assert on_disk == {name: name in gone for name in ALL}
    lose_memory(cluster)
    assert {event[5] for event in cluster.state.take_events(1_000)} == {False, True}
    rows = cluster.state.report.list_objects(
        cluster.now_ms, calls.ListObjects(NAMESPACE, b"", 0, 9)
    )
    assert {row.state for row in rows.objects} == {"on_disk"}
    survey = cluster.state.snapshot("")
    found = survey.take(1_000)
    stored = {claim.name[1].decode() for claim in claims_of(cluster)}
    assert {event[1].decode(): event[5] for event in found} == dict.fromkeys(sorted(stored), True)
    [name, *_] = gone
    detail = cluster.stat(name)
    assert detail.row is not None
    assert (detail.row.state, detail.row.size, detail.disk) == ("on_disk", SIZE, "one")
    blocks = calls.Blocks(NAMESPACE, keys_of([name]), 0)
    assert [row.state for row in cluster.state.chains.blocks(0, blocks).blocks] == ["on_disk"]
    match = calls.MatchPrefix([NAMESPACE], keys_of([name]), placements=False, bring=True)
    cluster.state.asking.match_prefix(cluster.now_ms, match)
    cluster.state.work(cluster.now_ms)  # its copy is ordered, and has not arrived
    wanted = calls.ListObjects(NAMESPACE, name.encode(), 0, 1_000)
    listed = cluster.state.report.list_objects(cluster.now_ms, wanted).objects
    assert [row.state for row in listed if row.key == name.encode()] == ["on_disk"]
    cluster.remove([name])
    [removed] = cluster.state.take_events(1_000)
    assert (removed[1].decode(), removed[3]) == (name, REMOVED_SIZE)
    assert cluster.stat(name).row is None


def test_a_tenant_stays_within_its_part_of_the_disks() -> None:
    def rules(objects: int) -> list[TenantRule]:
        limit = objects * 2 * EXTENT
        return [TenantRule("small", (NAMESPACE,), disk_limit_bytes=limit), TenantRule("b", ("b",))]

    cluster = Cluster({}, MasterRules(), tenants=rules(16))
    cluster.join("one", 2 * MEMORY, disk=2 * DISK * EXTENT)
    fill(cluster, [f"b{index}" for index in range(40)], namespace=Namespace("b"))
    fill(cluster, [f"k{index}" for index in range(60)])
    fill(cluster, [f"c{index}" for index in range(40)], namespace=Namespace("b"))
    cluster.after(1_000)
    small, other = [t for t in cluster.state.pool.tenants if t.name]
    assert 14 <= small.disk_bytes / (2 * EXTENT) <= 16
    assert other.disk_bytes >= 40 * 2 * EXTENT
    assert cluster.present([f"k{index}" for index in range(44, 60)]).count("k") >= 14, "the newest"
    cluster.state.set_tenants(rules(4))
    cluster.after(1_000)
    assert small.disk_bytes <= 4 * 2 * EXTENT
    check_invariants(cluster.state)
