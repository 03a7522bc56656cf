"""The W3C trace context of a call, behind its request.

A request may end with one field that no message declares: number 2047, the 55 characters of a
``traceparent``. Readers of protobuf skip fields that they do not know, so masters of every release
take such a request; and a request without it costs no byte. gRPC carries the same text as the
metadata ``traceparent``, as other programs send it.
"""

from __future__ import annotations

import re
from typing import Final

METADATA_KEY: Final = "traceparent"

MARK: Final = b"\xfa\x7f\x37"
"""The tag of field 2047, and the length of its text."""

_TEXT_BYTES: Final = 55
FIELD_BYTES: Final = len(MARK) + _TEXT_BYTES

AT: Final = slice(-FIELD_BYTES, -_TEXT_BYTES)
"""``request[AT] == MARK``: there is a trace context, or bytes that look like one."""

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def with_trace(request: bytes, traceparent: str) -> bytes:
    """The request with its trace context; unchanged, if ``traceparent`` is not one."""
    text = traceparent[:_TEXT_BYTES]  # later versions may add to it
    return request + MARK + text.encode() if _TRACEPARENT.fullmatch(text) else request


def trace_of(request: bytes) -> str:
    """The trace context behind the request; empty: it has none.

    Leaves the field in place: a key may end in bytes that look like a trace, so decoding must not
    depend on removing it.
    """
    text = request[-_TEXT_BYTES:].decode(errors="replace") if request[AT] == MARK else ""
    return text if _TRACEPARENT.fullmatch(text) else ""


def trace_id(traceparent: str) -> str:
    """The trace id in a ``traceparent``: 32 hexadecimal digits."""
    return traceparent[3:35]
