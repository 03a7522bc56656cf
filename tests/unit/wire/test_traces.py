"""The trace context behind a request."""

from __future__ import annotations

import pytest

from kvstore import calls
from kvstore.limits import Key, Namespace
from kvstore.wire import traces
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
    traced = traces.with_trace(plain, PARENT)
    assert traced[traces.AT] == traces.MARK
    assert plain[traces.AT] != traces.MARK
    assert len(traced) == len(plain) + traces.FIELD_BYTES
    call = CALLS[type(request_)]
    assert decode_request(call, traced) == decode_request(call, plain)
    assert traces.trace_of(traced) == PARENT
    assert traces.trace_of(plain) == ""
    assert traces.trace_id(PARENT) == "4b" * 16


def test_what_later_versions_add_is_left_out() -> None:
    later = "01" + PARENT[2:]
    assert traces.with_trace(b"", later + "-more") == traces.with_trace(b"", later) != b""
