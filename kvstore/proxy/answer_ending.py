"""How an answer of an engine ends, read from its bytes as they are relayed. Pure."""

from __future__ import annotations

import re
from typing import Final

TAIL_BYTES: Final = 1_024
"""Bytes of an answer that are kept: vLLM writes ``kv_transfer_params`` last."""

_CALLS_TOOLS: Final = re.compile(rb'"finish_reason":\s*"tool_calls"')
_TIP: Final = re.compile(rb'"kv_transfer_params":\s*\{[^{}]*"tip":\s*"((?:[0-9a-f]{2}){1,256})"')


class AnswerEnding:
    """In a text of the model these patterns have escaped quotes, so they do not match."""

    def __init__(self) -> None:
        self._tail = b""
        self.calls_tools = False
        """Whether a choice of the answer ends in tool calls."""

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the answer."""
        window = self._tail + piece
        self.calls_tools = self.calls_tools or _CALLS_TOOLS.search(window) is not None
        self._tail = window[-TAIL_BYTES:]

    @property
    def tip(self) -> bytes | None:
        """The last key of the request's chain; None: not reported, as in streams."""
        found = _TIP.search(self._tail)
        return None if found is None else bytes.fromhex(found[1].decode())
