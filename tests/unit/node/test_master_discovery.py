"""Where a node looks for its master next."""

from __future__ import annotations

import asyncio

from kvstore.errors import NotLeaderError, UnavailableError
from kvstore.node.master_discovery import HOPS_MAX, MasterDiscovery

GONE = UnavailableError("gone")


def find(masters: MasterDiscovery) -> str:
    return asyncio.run(masters.find())


def stands_by(leader: str) -> NotLeaderError:
    return NotLeaderError("stands by", leader=leader)


def test_several_are_tried_in_turn() -> None:
    masters = MasterDiscovery("a:1,b:2,c:3")
    assert masters.several
    tried = []
    for _ in range(4):
        tried.append(find(masters))
        assert not masters.failed(tried[-1], GONE)
    assert tried == ["a:1", "b:2", "c:3", "a:1"]


def test_whoever_leads_is_tried_at_once() -> None:
    masters = MasterDiscovery("a:1,b:2")
    assert masters.failed("a:1", stands_by("x:9"))
    assert find(masters) == "x:9"
    assert not masters.failed("x:9", GONE)
    assert find(masters) == "a:1"


def test_masters_that_name_each_other_are_left_for_a_pause() -> None:
    masters = MasterDiscovery("a:1,b:2")
    hops = 0
    while masters.failed(find(masters), stands_by(f"x:{hops + 1}")):
        hops += 1
    assert hops == HOPS_MAX
    masters.joined()
    assert masters.failed("a:1", stands_by("x:9"))
