"""Who had the longest beginning of a prompt."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.proxy.affinity import BLOCK_TOKENS, PrefixAffinity, fingerprints


def prompt(*starts: int) -> list[int]:
    """One full block per start."""
    return [start * 1_000 + each for start in starts for each in range(BLOCK_TOKENS)]


def prints(*starts: int) -> list[int]:
    return list(fingerprints(prompt(*starts), blocks_max=100))


def test_a_print_stands_for_everything_up_to_the_end_of_its_block() -> None:
    assert prints(1, 2)[0] == prints(1, 3)[0]
    assert prints(1, 2)[1] != prints(3, 2)[1]
    assert len(fingerprints(prompt(1)[:-1], blocks_max=100)) == 0
    assert len(fingerprints(prompt(1, 2, 3), blocks_max=2)) == 2


def test_a_salt_is_part_of_every_print() -> None:
    plain, *salted = (
        set(fingerprints(prompt(1, 2), blocks_max=9, salt=each)) for each in ("", "a", "b")
    )
    assert plain == set(prints(1, 2))
    assert plain.isdisjoint(salted[0] | salted[1])
    assert salted[0].isdisjoint(salted[1])


def test_the_longest_beginning_wins() -> None:
    affinity = PrefixAffinity(blocks_max=100)
    affinity.remember(prints(1, 2, 3), "a")
    affinity.remember(prints(1, 9), "b")
    assert affinity.longest(prints(1, 2, 7), {"a", "b"}) == "a"
    assert affinity.longest(prints(1, 9, 7), {"a", "b"}) == "b"
    assert affinity.longest(prints(1, 7), {"a", "b"}) == "b"  # the last one that had it
    assert affinity.longest(prints(7, 2), {"a", "b"}) is None


def test_the_tail_of_what_was_not_used_for_longest_is_forgotten_first() -> None:
    affinity = PrefixAffinity(blocks_max=4)
    affinity.remember(prints(1, 2), "a")
    affinity.remember(prints(3, 4), "b")
    affinity.remember(prints(5), "c")
    assert len(affinity) == 4
    assert affinity.longest(prints(1, 2), {"a"}) == "a"  # by its root
    assert affinity.longest(prints(1, 2)[1:], {"a"}) is None
    assert affinity.longest(prints(3, 4)[1:], {"b"}) == "b"


@given(st.lists(st.lists(st.integers(0, 3), max_size=6), max_size=12))
def test_it_never_remembers_more_than_it_may(prompts: list[list[int]]) -> None:
    affinity = PrefixAffinity(blocks_max=5)
    for starts in prompts:
        affinity.remember(prints(*starts), "a")
        assert len(affinity) <= 5
        if starts:
            assert affinity.longest(prints(*starts), {"a"}) == "a"
