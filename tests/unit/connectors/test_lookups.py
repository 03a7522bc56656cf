"""Questions to a store that answers when it is told to, on a clock that goes when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvstore.client.flows.control_calls import EngineMatchResult, PrefixMatchResult
from kvstore.client.leases.read_leases import ReadLease
from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.scheduler import lookups as module
from kvstore.connectors.vllm.scheduler.lookups import (
    BUSY_PATIENCE_S,
    FRESH_S,
    PENDING_MAX,
    STEP_PATIENCE_S,
    LookupThread,
    PendingLookup,
)
from kvstore.errors import ClosedError, KVStoreError, MasterUnreachableError

PLAIN = Groups(hash_block_tokens=16, scheduler_block_tokens=16, block_tokens={0: 16})
HYBRID = Groups(hash_block_tokens=16, scheduler_block_tokens=32, block_tokens={0: 16, 1: 32})
FOURS = Groups(
    hash_block_tokens=16, scheduler_block_tokens=16, block_tokens={0: 16}, blocks_per_object=4
)
DEADLINE_S = 1 / 64
WRITERS_WAIT_S = 0.5
LONG_S = 10.0
"""Of a wait that ends long before in a test that passes."""


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Store:
    """Answers at once, unless it is held."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[bytes], list[str]]] = []
        self.answers: list[Sequence[PrefixMatchResult] | Exception] = []
        """The next ones; the last is repeated."""
        self.state = 0
        self.go_on = threading.Event()
        self.go_on.set()
        self.entered = threading.Semaphore(0)

    def __call__(
        self, keys: Sequence[bytes], chains: Sequence[str], states: Sequence[str]
    ) -> EngineMatchResult:
        self.asked.append((list(keys), [*chains, *states]))
        self.entered.release()
        assert self.go_on.wait(LONG_S)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return EngineMatchResult(
            min((match.matched for match in answer), default=len(keys)),
            any(match.being_written for match in answer),
            self.state,
            ReadLease(len(self.asked)),
        )

    def hold(self) -> None:
        self.go_on.clear()

    def wait_until_asked(self) -> None:
        assert self.entered.acquire(timeout=LONG_S)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store() -> Store:
    return Store()


Start = Callable[..., LookupThread]


@pytest.fixture
def start(store: Store, clock: Clock) -> Iterator[Start]:
    started: list[LookupThread] = []

    def start(
        groups: Groups = PLAIN,
        namespaces: dict[int, list[str]] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> LookupThread:
        lookups = LookupThread(
            store, groups, deadline_s=deadline_s, writers_wait_s=WRITERS_WAIT_S, clock=clock
        )
        lookups.start(namespaces or {group: [f"n{group}"] for group in groups.block_tokens})
        started.append(lookups)
        return lookups

    yield start
    store.go_on.set()
    for each in started:
        each.close()


def hashes(number: int) -> list[bytes]:
    return [b"h%d" % index for index in range(number)]


def answered(lookups: LookupThread, lookup: PendingLookup) -> int:
    assert lookup.done.wait(LONG_S)
    tokens = lookups.tokens(lookup)
    assert tokens is not None
    return tokens


def pass_time(clock: Clock, until: threading.Event, seconds: float) -> float:
    """Time goes on in steps of a millisecond, for so long at most; how long it took."""
    began = clock.now
    while not until.wait(0.002) and clock.now - began < seconds:
        clock.now += 0.005
    return clock.now - began


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_is_in_tokens(start: Start, store: Store) -> None:
    store.answers = [[PrefixMatchResult(3, 0)]]
    lookups = start()
    lookup = lookups.request("r", hashes(5))
    assert answered(lookups, lookup) == 48
    assert store.asked == [(hashes(5), ["n0"])]
    assert not lookup.failed
    assert len(lookups.take_latencies_us()) == 1
    assert lookups.take_latencies_us() == []
    assert lookups.take_counters() == {}


def test_what_a_worker_lacks_is_not_there(start: Start, store: Store) -> None:
    store.answers = [[PrefixMatchResult(5, 0), PrefixMatchResult(2, 0), PrefixMatchResult(4, 0)]]
    lookups = start(namespaces={0: ["a", "b", "c"]})
    assert answered(lookups, lookups.request("r", hashes(5))) == 32
    assert store.asked[0][1] == ["a", "b", "c"]


def test_what_a_group_lacks_is_not_there_and_hits_are_aligned(start: Start, store: Store) -> None:
    store.answers = [[PrefixMatchResult(5, 0)], [PrefixMatchResult(2, 0)]]
    lookups = start(HYBRID)
    assert answered(lookups, lookups.request("r", hashes(5))) == 64
    assert store.asked == [(hashes(5), ["n0"]), ([b"h1", b"h3"], ["n1"])]


def test_chains_and_states_are_one_question_at_the_end_of_which_a_state_is(
    start: Start, store: Store
) -> None:
    groups = replace(PLAIN, block_tokens={0: 16, 1: 16, 2: 16}, recurrent=frozenset({0, 2}))
    store.answers, store.state = [[PrefixMatchResult(5, 0)]], 3
    lookups = start(groups)
    assert answered(lookups, lookups.request("r", hashes(6))) == 48
    assert store.asked == [(hashes(6), ["n1", "n0", "n2"])]
    store.state = 0
    assert answered(lookups, lookups.request("s", hashes(6))) == 0


def test_states_are_asked_for_where_a_hit_may_end(start: Start, store: Store) -> None:
    """Blocks of the chain are smaller than those of the states."""
    groups = replace(HYBRID, recurrent=frozenset({1}))
    store.answers, store.state = [[PrefixMatchResult(5, 0)], []], 1
    lookups = start(groups)
    assert answered(lookups, lookups.request("r", hashes(6))) == 32
    assert store.asked == [(hashes(6), ["n0"]), ([b"h1", b"h3"], ["n1"])]


def test_a_model_without_attention_has_states_alone(start: Start, store: Store) -> None:
    groups = replace(PLAIN, recurrent=frozenset({0}))
    store.answers, store.state = [[]], 4
    lookups = start(groups)
    assert answered(lookups, lookups.request("r", hashes(6))) == 64
    assert store.asked == [(hashes(6), ["n0"])]


@pytest.mark.parametrize(
    ("windows", "tokens"),
    [
        ({6, 7}, 128), ({2, 3, 4, 7}, 80), ({0, 4, 7}, 16), ({2, 4, 7}, 0),
        ({0, 1, 3, 5, 7}, 32), (set(), 0),
    ],
)  # fmt: skip
def test_a_hit_needs_the_last_window_and_none_before_it(
    start: Start, windows: set[int], tokens: int
) -> None:
    """The store has the whole chain of the full layers, and these blocks of those with a window."""
    held = {"n0": set(hashes(8)), "n1": {b"h%d" % index for index in windows}}

    def answer(
        keys: Sequence[bytes], chains: Sequence[str], states: Sequence[str]
    ) -> EngineMatchResult:
        missing = [at for at, key in enumerate(keys) if any(key not in held[n] for n in chains)]
        matched = min(missing, default=len(keys))
        ends = [at for at in range(matched) if all(keys[at] in held[name] for name in states)]
        return EngineMatchResult(matched, False, max(ends, default=-1) + 1, ReadLease(1))

    groups = replace(PLAIN, block_tokens={0: 16, 1: 16}, windows={1: 33})
    lookups = start(groups)
    lookups._ask = answer
    assert answered(lookups, lookups.request("r", hashes(8))) == tokens


def test_a_prompt_too_short_for_a_block_of_a_group_has_nothing(start: Start, store: Store) -> None:
    store.answers = [[PrefixMatchResult(1, 0)]]
    lookups = start(HYBRID)
    assert answered(lookups, lookups.request("r", hashes(1))) == 0


def test_one_question_at_a_time_is_asked_for_a_request(start: Start, store: Store) -> None:
    store.hold()
    store.answers = [[PrefixMatchResult(2, 0)]]
    lookups = start()
    lookup = lookups.request("r", hashes(2))
    assert lookups.request("r", hashes(2)) is lookup
    store.go_on.set()
    assert answered(lookups, lookup) == 32
    assert lookups.request("r", hashes(2)) is lookup
    assert len(store.asked) == 1


def test_an_old_answer_is_asked_anew(start: Start, store: Store, clock: Clock) -> None:
    store.answers = [[PrefixMatchResult(2, 0)], [PrefixMatchResult(1, 0)]]
    lookups = start()
    assert answered(lookups, lookups.request("r", hashes(2))) == 32
    clock.now += FRESH_S - 0.01
    assert answered(lookups, lookups.request("r", hashes(2))) == 32
    clock.now += 0.01
    assert answered(lookups, lookups.request("r", hashes(2))) == 16
    assert len(store.asked) == 2


# --- deadlines ------------------------------------------------------------------------------------


def test_there_is_no_answer_until_the_deadline_and_then_it_is_nothing(
    start: Start, store: Store, clock: Clock
) -> None:
    store.hold()
    store.answers = [[PrefixMatchResult(2, 0)]]
    lookups = start()
    lookup = lookups.request("r", hashes(2))
    store.wait_until_asked()
    clock.now += 60  # the deadline counts from when the scheduler comes for it
    assert lookups.tokens(lookup) is None
    clock.now += DEADLINE_S - 1 / 1024
    assert lookups.tokens(lookup) is None
    clock.now += 1 / 1024
    assert lookups.tokens(lookup) == 0
    assert lookups.tokens(lookup) == 0
    assert lookups.take_counters() == {"lookups_late": 1}


def test_what_a_prefiller_says_it_stores_is_waited_for_before_the_first_answer(
    start: Start, store: Store, clock: Clock
) -> None:
    """On a busy host the master's answer may take longer than the deadline of other lookups."""
    store.hold()
    store.answers = [[PrefixMatchResult(2, 0)]]
    lookups = start()
    lookup = lookups.request("r", hashes(2), 32)
    assert lookups.tokens(lookup) is None
    clock.now += DEADLINE_S + WRITERS_WAIT_S - 1 / 1024
    assert lookups.tokens(lookup) is None
    store.go_on.set()
    assert answered(lookups, lookup) == 32


def test_one_step_waits_only_so_long_for_all_its_requests(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, waits = 0.0, []

    class Waited(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            assert timeout is not None
            waits.append(timeout)
            now += timeout / 2
            return False

    store.hold()
    store.answers = [[PrefixMatchResult(1, 0)]]
    lookups = start()
    wanted = [lookups.request(f"r{number}", hashes(1)) for number in range(200)]
    store.wait_until_asked()
    for lookup in wanted:
        lookup.done = Waited()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    for lookup in wanted:
        assert lookups.tokens(lookup) is None
    assert waits[0] == STEP_PATIENCE_S
    assert waits == sorted(waits, reverse=True)
    assert now <= STEP_PATIENCE_S
    for busy, patience in ((False, STEP_PATIENCE_S), (True, BUSY_PATIENCE_S)):
        lookups.new_step()
        lookups.is_busy = (lambda: True) if busy else (lambda: False)
        lookups.tokens(wanted[0])
        assert waits[-1] == patience


def test_no_more_than_so_many_questions_wait(start: Start, store: Store) -> None:
    store.hold()
    store.answers = [[PrefixMatchResult(1, 0)]]
    lookups = start()
    for number in range(PENDING_MAX):
        assert not lookups.request(f"r{number}", hashes(1)).done.is_set()
    refused = lookups.request("one more", hashes(1))
    assert answered(lookups, refused) == 0
    assert refused.failed


# --- writers --------------------------------------------------------------------------------------


def test_blocks_that_are_being_written_are_waited_for(
    start: Start, store: Store, clock: Clock
) -> None:
    store.answers = [
        [PrefixMatchResult(1, 1)],
        [PrefixMatchResult(1, 1)],
        [PrefixMatchResult(3, 0)],
    ]
    lookups = start()
    lookup = lookups.request("r", hashes(4))
    assert pass_time(clock, lookup.done, WRITERS_WAIT_S) < WRITERS_WAIT_S
    assert answered(lookups, lookup) == 48
    assert len(store.asked) == 3
    assert lookups.take_counters() == {"lookups_waited_for_writers": 1}


def test_writers_are_waited_for_only_so_long(start: Start, store: Store, clock: Clock) -> None:
    store.answers = [[PrefixMatchResult(2, 1)]]
    lookups = start()
    lookup = lookups.request("r", hashes(4))
    waited = pass_time(clock, lookup.done, 10 * WRITERS_WAIT_S)
    assert WRITERS_WAIT_S - 0.01 < waited < 2 * WRITERS_WAIT_S
    assert answered(lookups, lookup) == 32
    assert 2 <= len(store.asked) <= WRITERS_WAIT_S / 0.002


def test_what_a_prefiller_has_announced_is_waited_for(
    start: Start, store: Store, clock: Clock
) -> None:
    store.answers = [
        [PrefixMatchResult(0, 0)],
        [PrefixMatchResult(1, 0)],
        [PrefixMatchResult(3, 0)],
    ]
    lookups = start()
    lookup = lookups.request("r", hashes(4), 3 * 16 + 5)
    assert pass_time(clock, lookup.done, WRITERS_WAIT_S) < WRITERS_WAIT_S
    assert answered(lookups, lookup) == 48
    assert len(store.asked) == 3


@pytest.mark.parametrize("being_written", [0, 1])
def test_what_can_not_be_hit_is_not_waited_for(
    start: Start, store: Store, being_written: int
) -> None:
    store.answers = [[PrefixMatchResult(2, being_written)], [PrefixMatchResult(1, 0)]]
    lookups = start(HYBRID)
    lookup = lookups.request("r", hashes(3), 1_000)
    assert answered(lookups, lookup) == 32
    assert len(store.asked) == 2
    assert not lookup.waits_for_writers


# --- a store that does not answer -----------------------------------------------------------------


def failures(lookups: LookupThread, number: int) -> None:
    for index in range(number):
        lookup = lookups.request(f"failing {index}", hashes(1))
        assert answered(lookups, lookup) == 0
        assert lookup.failed


def test_a_store_that_does_not_answer_has_nothing_and_is_left_alone(
    start: Start, store: Store, clock: Clock
) -> None:
    store.answers = [MasterUnreachableError("away")]
    lookups = start()
    failures(lookups, 3)
    assert lookups.breaker.is_open(clock.now)
    failures(lookups, 20)
    assert lookups.request("at once", hashes(1)).done.is_set(), "no thread is asked"
    assert len(store.asked) == 3
    assert lookups.take_counters() == {"lookups_failed": 3, "breaker_opened": 1}


def test_questions_that_wait_when_the_breaker_opens_are_not_asked(
    start: Start, store: Store
) -> None:
    store.hold()
    store.answers = [MasterUnreachableError("away")]
    lookups = start()
    wanted = [lookups.request(f"r{number}", hashes(1)) for number in range(10)]
    store.go_on.set()
    assert [answered(lookups, each) for each in wanted] == [0] * 10
    assert len(store.asked) == 3


def test_a_bug_in_asking_does_not_end_the_thread(start: Start, store: Store) -> None:
    store.answers = [ValueError("a bug of ours"), [PrefixMatchResult(1, 0)]]
    lookups = start()
    broken = lookups.request("r", hashes(1))
    assert answered(lookups, broken) == 0
    assert broken.failed
    assert answered(lookups, lookups.request("s", hashes(1))) == 16


# --- the end --------------------------------------------------------------------------------------


def test_what_is_forgotten_is_not_asked(start: Start, store: Store) -> None:
    store.hold()
    store.answers = [[PrefixMatchResult(1, 0)]]
    lookups = start()
    first = lookups.request("first", hashes(1))
    store.wait_until_asked()
    second = lookups.request("second", hashes(1))
    lookups.forget("first")
    lookups.forget("second")
    lookups.forget("never known")
    assert first.done.is_set()
    assert second.done.is_set()
    store.go_on.set()
    lookups.run_on_thread(lambda: None).result(LONG_S)
    assert len(store.asked) == 1
    assert lookups.request("first", hashes(1)) is not first


def test_closing_answers_what_waits_and_leaves_no_thread(start: Start, store: Store) -> None:
    store.hold()
    store.answers = [[PrefixMatchResult(1, 1)]]
    lookups = start()
    wanted = [lookups.request(f"r{number}", hashes(2)) for number in range(5)]
    store.wait_until_asked()
    closing = threading.Thread(target=lookups.close)
    closing.start()
    store.go_on.set()
    closing.join(LONG_S)
    assert not closing.is_alive()
    assert all(each.done.is_set() for each in wanted)
    lookups.close()


# --- errands --------------------------------------------------------------------------------------


def test_an_errand_gives_its_result_or_its_error(start: Start) -> None:
    lookups = start()

    def fail() -> None:
        raise KVStoreError("no")

    assert lookups.run_on_thread(lambda: threading.current_thread().name).result(LONG_S) == (
        "kvstore-lookups"
    )
    assert isinstance(lookups.run_on_thread(fail).exception(LONG_S), KVStoreError)
    assert lookups.run_on_thread(lambda: 7).result(LONG_S) == 7


def test_errands_that_were_not_done_at_the_end_are_told(start: Start, store: Store) -> None:
    store.hold()
    store.answers = [[PrefixMatchResult(1, 0)]]
    lookups = start()
    lookups.request("r", hashes(1))
    store.wait_until_asked()
    waiting = lookups.run_on_thread(lambda: 7)
    closing = threading.Thread(target=lookups.close)
    closing.start()
    store.go_on.set()
    closing.join(LONG_S)
    assert waiting.done()
    late = lookups.run_on_thread(lambda: 7)
    assert isinstance(late.exception(LONG_S), ClosedError)


def test_after_a_move_only_the_new_namespaces_are_asked(start: Start, store: Store) -> None:
    store.answers = [[PrefixMatchResult(3, 0)]]
    lookups = start()
    before = lookups.request("r", hashes(5))
    assert answered(lookups, before) == 48
    lookups.set_namespaces({0: ["other"]})
    after = lookups.request("r", hashes(5))
    assert after is not before, "what was known is of other blocks"
    assert answered(lookups, after) == 48
    assert store.asked[-1] == (hashes(5), ["other"])


def test_a_thread_that_dies_by_a_bug_leaves_nobody_waiting(
    start: Start, store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lookups = start()

    def broken(lookup: PendingLookup) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(lookups, "_run_queries", broken)
    first = lookups.request("r", hashes(1))
    assert answered(lookups, first) == 0
    assert first.failed
    assert "lookup_thread_failed" in caplog.text
    assert answered(lookups, lookups.request("s", hashes(1))) == 0
    assert isinstance(lookups.run_on_thread(lambda: 7).exception(LONG_S), ClosedError)


def test_single_blocks_are_looked_up_after_the_last_full_object(store: Store, start: Start) -> None:
    store.answers = [[PrefixMatchResult(1, 0)], [PrefixMatchResult(2, 0)]]
    lookups = start(FOURS)
    asked = hashes(11)
    assert answered(lookups, lookups.request("r", asked)) == 6 * 16
    assert store.asked == [([b"h3", b"h7"], ["n0"]), (asked[4:7], ["n0"])]
