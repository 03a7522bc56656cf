"""Matching more keys than one call may carry; removing while a master has no node yet."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.calls import NO_PLACEMENTS
from kvstore.client.flows.control_calls import PrefixMatchResult, match_all, match_prefix, remove
from kvstore.errors import MasterUnreachableError, UnavailableError
from kvstore.limits import BATCH_KEYS_MAX, Key, Namespace
from tests.unit.client.world import EPOCH, World

SPACES = [Namespace("a"), Namespace("b")]


def keys(count: int) -> list[Key]:
    return [Key(number.to_bytes(4, "big")) for number in range(count)]


class Master:
    """Has so many leading blocks in each namespace, and notes what it is asked."""

    def __init__(self, *present: int, being_written: int = 0) -> None:
        self.present = dict(zip(SPACES, present, strict=False))
        self.being_written = being_written
        self.asked: list[tuple[list[Namespace], int]] = []

    def __call__(self, request: calls.MatchPrefix) -> calls.MatchPrefixReply:
        self.asked.append((list(request.namespaces), len(request.keys)))
        first = int.from_bytes(request.keys[0], "big")
        matches = []
        for space in request.namespaces:
            matched = max(0, min(len(request.keys), self.present[space] - first))
            written = self.being_written if matched < len(request.keys) else 0
            matches.append(calls.PrefixMatch(matched, written, NO_PLACEMENTS))
        return calls.MatchPrefixReply(EPOCH, 10_000, matches)


def run(master: Master, count: int) -> list[PrefixMatchResult]:
    world = World()
    world.answers[calls.MatchPrefix] = master
    return world.run(match_prefix(world.context, SPACES[: len(master.present)], keys(count)))


@pytest.mark.parametrize(
    ("present", "calls_made"),
    [
        (0, 1),
        (BATCH_KEYS_MAX - 1, 1),
        (BATCH_KEYS_MAX, 2),
        (BATCH_KEYS_MAX + 7, 2),
        (3 * BATCH_KEYS_MAX, 3),
    ],
)
def test_pieces_are_asked_for_until_one_is_not_all_there(present: int, calls_made: int) -> None:
    master = Master(present, being_written=2)
    [match] = run(master, 3 * BATCH_KEYS_MAX)
    assert match.matched == present
    assert match.being_written == (2 if present < 3 * BATCH_KEYS_MAX else 0)
    assert [size for _, size in master.asked] == [BATCH_KEYS_MAX] * calls_made


def test_a_namespace_that_has_ended_is_not_asked_again() -> None:
    master = Master(BATCH_KEYS_MAX + 1, 3)
    found = run(master, BATCH_KEYS_MAX + 2)
    assert [match.matched for match in found] == [BATCH_KEYS_MAX + 1, 3]
    assert [spaces for spaces, _ in master.asked] == [SPACES, SPACES[:1]]


class States(Master):
    """Answers about states, too: without knowing what the chains reach, if it is in pieces."""

    def __init__(self, *present: int, states: list[int], in_pieces: bool = False) -> None:
        super().__init__(*present)
        self.states = states
        """How many leading keys there are up to each state."""
        self.in_pieces = in_pieces

    def __call__(self, request: calls.MatchPrefix) -> calls.MatchPrefixReply:
        first = int.from_bytes(request.keys[0], "big")
        answer = super().__call__(request)
        assert list(request.states) == [Namespace("s")]
        matched = [len(request.keys), *(match.matched for match in answer.matches)]
        end = first + (len(request.keys) if self.in_pieces else min(matched))
        here = [each - first for each in self.states if first < each <= end]
        return answer._replace(state=max(here, default=0))


def run_reach(master: States, count: int) -> tuple[int, bool, int]:
    world = World()
    world.answers[calls.MatchPrefix] = master
    spaces = SPACES[: len(master.present)]
    return world.run(match_all(world.context, spaces, [Namespace("s")], keys(count)))[:3]


def test_chains_and_states_are_one_question() -> None:
    master = States(9, 7, states=[2, 5, 8])
    assert run_reach(master, 10) == (7, False, 5)
    assert master.asked == [(SPACES, 10)]
    assert run_reach(States(states=[2, 5, 8]), 10) == (10, False, 8)


def test_a_removal_is_asked_again_until_a_node_is_there_that_remembers_it() -> None:
    world = World()
    none_yet = UnavailableError("no node is there")
    world.answers[calls.Remove] = [none_yet, none_yet, calls.RemoveReply(b"\1")]
    assert world.run(remove(world.context, SPACES[0], keys(1))) == [True]
    assert len(world.paused) == 2

    world.answers[calls.Remove] = [none_yet] * 5
    with pytest.raises(UnavailableError):
        world.run(remove(world.context, SPACES[0], keys(1)))

    world.answers[calls.Remove] = [MasterUnreachableError("gone")]
    with pytest.raises(MasterUnreachableError):
        world.run(remove(world.context, SPACES[0], keys(1)))
