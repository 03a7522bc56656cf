"""Packed keys behave as the list that they stand for."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import calls
from kvstore.errors import BatchTooLargeError, InvalidArgumentError
from kvstore.limits import BATCH_KEYS_MAX, Key, Namespace
from kvstore.native.packed_keys import PackedKeys
from kvstore.v1 import client_pb2, common_pb2
from kvstore.wire.columns import (
    encode_with_keys,
    pack_column,
    pack_keys,
    unpack_column,
    unpack_text,
)
from kvstore.wire.messages import CALLS, decode_request
from tests.support.wire_values import U64


@given(
    keys=st.integers(1, 40).flatmap(
        lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=60)
    ),
    data=st.data(),
)
def test_packed_keys_are_a_sequence(keys: list[bytes], data: st.DataObject) -> None:
    packed: Sequence[Key] = PackedKeys(b"".join(keys), len(keys[0]))
    assert list(packed) == keys
    assert packed == keys
    assert keys == packed
    assert len(packed) == len(keys)
    assert all(type(key) is bytes for key in packed)
    index = data.draw(st.integers(-len(keys), len(keys) - 1))
    assert packed[index] == keys[index]
    part = data.draw(st.slices(len(keys)))
    assert packed[part] == keys[part]
    assert Key(keys[index]) in packed
    assert packed.index(packed[index]) == keys.index(keys[index])
    assert packed != [*keys, b"another"]


@pytest.mark.parametrize("size", [1, 29, 256])
@pytest.mark.parametrize("count", [1, 127, 4_500, BATCH_KEYS_MAX])
def test_many_keys_put_behind_a_message_are_read_as_part_of_it(size: int, count: int) -> None:
    data = random.Random(size).randbytes(size * count)
    keys = PackedKeys(data, size)
    whole = client_pb2.ExistsRequest(namespace="n")
    pack_keys(whole.keys, keys)
    encoded = encode_with_keys(client_pb2.ExistsRequest(namespace="n"), keys)
    assert client_pb2.ExistsRequest.FromString(encoded) == whole
    assert decode_request(CALLS[calls.Exists], encoded) == calls.Exists(Namespace("n"), keys)


def test_no_more_keys_than_a_batch_has_are_put_behind_a_message() -> None:
    keys = PackedKeys(bytes(2 * (BATCH_KEYS_MAX + 1)), 2)
    with pytest.raises(BatchTooLargeError):
        encode_with_keys(client_pb2.ExistsRequest(), keys)


@given(values=st.lists(U64, max_size=40) | U64.map(lambda value: [value] * 9))
def test_a_column_comes_out_as_it_went_in(values: list[int]) -> None:
    column = common_pb2.Column()
    pack_column(column, values)
    assert unpack_column(column, "values") == values
    assert unpack_column(column, "values", rows=len(values)) == values


@pytest.mark.parametrize("text", ["", "x" * 256, "é" * 128, "two\nlines", "\x1b[31m"])
def test_text_that_cannot_stand_in_a_log_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        unpack_text(text, "name")
