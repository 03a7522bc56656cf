"""Every error of the tree comes back as itself, on both carriers."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import (
    BY_CODE,
    BusyError,
    InternalError,
    KVStoreError,
    ProtocolError,
)
from kvstore.v1 import common_pb2
from kvstore.wire.status import (
    decode_error,
    encode_error,
    from_grpc,
    grpc_code,
    unexpected,
)

every_class = pytest.mark.parametrize("kind", BY_CODE.values(), ids=list(BY_CODE))


@every_class
@given(
    message=st.text(max_size=80),
    advice=st.text(max_size=80),
    number=st.integers(-(2**63), 2**63 - 1),
    text=st.text(max_size=40),
)
def test_an_error_comes_back_as_itself(
    kind: type[KVStoreError], message: str, advice: str, number: int, text: str
) -> None:
    error = kind(message, advice=advice, number=number, text=text)
    back = decode_error(encode_error(error))
    assert type(back) is kind
    assert (back.message, back.advice, back.retriable) == (message, advice, kind.retriable)
    assert back.fields == {"number": number, "text": text}


@every_class
def test_every_class_has_a_grpc_status_that_is_none_of_ok_and_cancelled(
    kind: type[KVStoreError],
) -> None:
    code = grpc_code(kind("m"))
    assert code not in (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)
    assert type(from_grpc(code, "m", encode_error(kind("m")))) is kind


def test_an_unknown_code_becomes_the_nearest_known_class() -> None:
    detail = common_pb2.ErrorDetail(code="too_hot", kinds=["busy", "unavailable", "error"])
    assert type(decode_error(detail.SerializeToString())) is BusyError
    detail = common_pb2.ErrorDetail(code="too_hot", kinds=["weather", "error"])
    assert type(decode_error(detail.SerializeToString())) is KVStoreError
    assert type(decode_error(b"")) is KVStoreError


@given(garbage=st.binary(max_size=100))
def test_an_unreadable_error_is_an_error_all_the_same(garbage: bytes) -> None:
    assert isinstance(decode_error(garbage), KVStoreError)
    assert type(decode_error(b"\xff")) is ProtocolError


def test_a_long_error_fits_into_grpc_metadata() -> None:
    fields: dict[str, Any] = {f"field_{i}": "v" * 1000 for i in range(100)}
    error = KVStoreError("m" * 10_000, advice="é" * 10_000, **fields)
    encoded = encode_error(error)
    assert len(encoded) * 4 / 3 < 7_000
    assert decode_error(encoded).message == "m" * 512


def test_an_unexpected_error_is_logged_with_its_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = ZeroDivisionError("secret detail")
    told = unexpected(error, "Exists", logging.getLogger("test"))
    assert type(told) is InternalError
    assert "secret" not in str(told)
    assert caplog.records[0].exc_info is not None
