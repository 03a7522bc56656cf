"""The W3C trace context of a call, appended to its request.

A request may end with the undeclared field 2047: the 55 characters of a ``traceparent``. Protobuf
readers skip unknown fields, so every release accepts it. With gRPC it is the metadata
``traceparent``, as in other programs.
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
"""``request[AT] == MARK``: there is a trace context, or bytes that resemble one."""

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


def with_trace(request: bytes, traceparent: str) -> bytes:
    """Return the request with its trace context; unchanged if ``traceparent`` is invalid."""
    text = traceparent[:_TEXT_BYTES]  # later versions may add to it
    return request + MARK + text.encode() if _TRACEPARENT.fullmatch(text) else request


def trace_of(request: bytes) -> str:
    """Return the trace context of the request; empty: none.

    Keeps the field: a key may end in bytes that look like a trace context.
    """
    text = request[-_TEXT_BYTES:].decode(errors="replace") if request[AT] == MARK else ""
    return text if _TRACEPARENT.fullmatch(text) else ""


def trace_id(traceparent: str) -> str:
    """Return the trace id in a ``traceparent``: 32 hexadecimal digits."""
    return traceparent[3:35]
