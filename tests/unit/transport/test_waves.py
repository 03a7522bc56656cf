"""Whatever order an engine moves the ranges of a wave in, the segment ends up as it should, and at
no moment does a header stand over a payload that is not there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.transport.base import Move
from kvstore.transport.mooncake.waves import waves

MEMORY_BYTES = 40


def nothing() -> None:
    pass


def move(offset: int, data: bytes, *, is_last: bool = False) -> Move:
    return Move(offset, memoryview(data), prepare=nothing if is_last else None)


@st.composite
def moves(draw: st.DrawFn) -> list[Move]:
    count = draw(st.integers(0, 8))
    return [
        move(
            draw(st.integers(0, 30)),
            bytes([index + 1]) * draw(st.integers(0, 10)),
            is_last=draw(st.booleans()),
        )
        for index in range(count)
    ]


def applied(ordered: list[Move]) -> bytes:
    memory = bytearray(MEMORY_BYTES)
    for each in ordered:
        memory[each.offset : each.offset + len(each.buffer)] = each.buffer
    return bytes(memory)


@given(moves(), st.randoms(use_true_random=False))
def test_any_order_within_waves_ends_as_the_given_order(given: list[Move], random) -> None:  # type: ignore[no-untyped-def]
    shuffled = []
    for wave in waves(given):
        assert wave
        random.shuffle(wave)
        shuffled += wave
    assert sorted(map(id, shuffled)) == sorted(map(id, given)), "each once"
    assert applied(shuffled) == applied(given)


def an_object(offset: int, parts: int = 1) -> list[Move]:
    payload = [move(offset + 10 + index, b"p") for index in range(parts)]
    return [move(offset, b"wipe"), *payload, move(offset, b"header", is_last=True)]


def test_many_objects_take_three_waves() -> None:
    objects = [an_object(100 * number, parts=3) for number in range(50)]
    firsts, middles, lasts = waves([each for one in objects for each in one])
    assert firsts == [one[0] for one in objects]
    assert middles == [part for one in objects for part in one[1:-1]]
    assert lasts == [one[-1] for one in objects], "in the order in which they are prepared"


def test_one_move_is_one_wave() -> None:
    wipe = move(0, b"wipe")
    assert waves([wipe]) == [[wipe]]
    header = move(0, b"header", is_last=True)
    assert waves([header]) == [[header]]
    assert waves([wipe, header]) == [[wipe], [header]], "an object of no bytes"
    assert waves([]) == []


def test_objects_that_overlap_are_written_in_their_order() -> None:
    one, other = an_object(0), an_object(5)
    order = [each for wave in waves(one + other) for each in wave]
    assert order == one + other
