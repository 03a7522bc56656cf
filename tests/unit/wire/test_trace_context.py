"""The trace context behind a request."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.limits import Key, Namespace
from kvstore.wire import trace_context
from kvstore.wire.messages import CALLS, decode_request, encode_request

PARENT = f"00-{'4b' * 16}-{'a1' * 8}-01"


@pytest.mark.parametrize(
    "request_",
    [
        calls.Lookup(Namespace("n"), [Key(b"a"), Key(b"b")]),
        calls.Exists(Namespace("n"), [Key(b"a")]),
        calls.Status(),
    ],
)
def test_every_reader_of_the_request_skips_it(request_: calls.Request) -> None:
    plain = encode_request(request_)
    traced = trace_context.with_trace(plain, PARENT)
    assert traced[trace_context.AT] == trace_context.MARK
    assert plain[trace_context.AT] != trace_context.MARK
    assert len(traced) == len(plain) + trace_context.FIELD_BYTES
    call = CALLS[type(request_)]
    assert decode_request(call, traced) == decode_request(call, plain)
    assert trace_context.trace_of(traced) == PARENT
    assert trace_context.trace_of(plain) == ""
    assert trace_context.trace_id(PARENT) == "4b" * 16


def test_what_later_versions_add_is_left_out() -> None:
    later = "01" + PARENT[2:]
    assert (
        trace_context.with_trace(b"", later + "-more")
        == trace_context.with_trace(b"", later)
        != b""
    )
