"""Hints of the proxy: which sessions go on, and which are over.

* ``X-KV-Hint`` of a request becomes an action in ``kv_transfer_params.kv_hint``, which the engine's
  connector carries out when the request has ended.
* If an answer ends in tool calls, the proxy has the store retain its chain.
* ``DELETE /v1/sessions/ID`` releases the chain of the session's last answer, as does an hour
  without an answer.

The last two need the store (``--master``), and the last key of the chain: from the answer, or, for
a stream, computed from the prompt's token ids. They are sent after the answer.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import OrderedDict
from typing import Any, Final, NamedTuple

from aiohttp import web
from multidict import CIMultiDictProxy

from kvstore.calls import HintAction, HintOutcome
from kvstore.calls.hint_envelopes import TOOL_WAIT_MS, EnvelopeAction
from kvstore.client.hints import ActionResult
from kvstore.errors import InvalidArgumentError
from kvstore.limits import Key
from kvstore.proxy import bodies
from kvstore.proxy.lookup import StoreLookup
from kvstore.proxy.request_context import (
    REQUEST_ID,
    ProxyContext,
    RequestContext,
    error_response,
    request_id_of,
)
from kvstore.runtime.formatting import sanitize
from kvstore.runtime.tasks import start_task

log = logging.getLogger("kvstore.proxy")

SESSION: Final = "X-KV-Session"
HINT: Final = "X-KV-Hint"

SESSIONS_MAX: Final = 65_536
"""Remembered sessions, the latest ones: some 20 MiB."""

SESSION_IDLE_S: Final = 3_600.0
"""A session without an answer for that long is over, as its client is gone for good: no chain is
retained for longer."""

HINTS_MAX: Final = 1_024
"""Answers whose hints are being sent; those of further ones are not."""

SAVED_AFTER_S: Final = 1.0
"""Time after which a hint is sent once more if its block was not stored: engines save blocks while
they answer."""

_ACTIONS: Final = {"end": "session_end", "demote": "kv.demote", "retain": "kv.retain"}
_TIMES: Final = {"retain": "ttl_ms", "tool_wait": "resume_ms"}
_HINT: Final = re.compile(r"(end|demote|retain|tool_wait)(?:=([0-9]{1,6}))?")
_SESSION: Final = re.compile(r"[\x21-\x7e]{1,128}")


class SessionTip(NamedTuple):
    """The last key of a session's chain."""

    model: str
    key: bytes
    at: float
    """Time of the answer."""


class SessionHints:
    """The hints of one proxy, and the tips of its sessions. For one event loop."""

    def __init__(self, lookup: StoreLookup | None) -> None:
        self._lookup = lookup
        self._tips: OrderedDict[tuple[str, str], SessionTip] = OrderedDict()
        """By caller and session; the caller is empty without cache isolation."""
        self._sending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        for task in list(self._sending):
            task.cancel()
        if self._sending:
            await asyncio.wait(self._sending)

    def on_answer(self, context: RequestContext) -> None:
        """Remember the session of a complete answer, and send its hint, in the background."""
        if self._lookup is None or len(self._sending) >= HINTS_MAX:
            return
        waits = context.ending.calls_tools and not bodies.hint_of(context.body)
        if waits or context.session:
            task = start_task("hint", self._follow(self._lookup, context, waits=waits))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _follow(self, lookup: StoreLookup, context: RequestContext, *, waits: bool) -> None:
        model, salt = bodies.model_of(context.body), bodies.salt_of(context.body)
        if model is None or salt is None:
            return
        key = context.ending.tip
        if key is None and context.token_ids is not None:
            key = await lookup.last_key(model, context.token_ids, salt)
        if key is None:
            return
        if context.session:
            self._tips[context.session] = SessionTip(model, key, time.monotonic())
            self._tips.move_to_end(context.session)
            if len(self._tips) > SESSIONS_MAX:
                self._tips.popitem(last=False)
        if waits:
            action = EnvelopeAction("tool_calls", HintAction.RETAIN, TOOL_WAIT_MS, (Key(key),))
            result = await lookup.hint(model, action)
            if result is not None and result.outcome == HintOutcome.MISSING:
                await asyncio.sleep(SAVED_AFTER_S)
                await lookup.hint(model, action)
        await self._end_idle(time.monotonic() - SESSION_IDLE_S)

    async def _end_idle(self, before: float) -> None:
        """End the sessions whose last answer was earlier."""
        while self._tips:
            session, tip = next(iter(self._tips.items()))
            if tip.at >= before:
                break
            await self.end(session)

    async def end(self, session: tuple[str, str]) -> ActionResult | None:
        """Release the chain of a session and forget it; None: it is unknown, or the store is."""
        tip = self._tips.pop(session, None)
        if self._lookup is None or tip is None:
            return None
        action = EnvelopeAction("session_end", HintAction.RELEASE, keys=(Key(tip.key),))
        return await self._lookup.hint(tip.model, action)


def session_of(text: str, caller: str | None) -> tuple[str, str] | None:
    """Return the key of a session: callers do not share sessions. None: no valid name."""
    return (caller or "", text) if _SESSION.fullmatch(text) else None


def envelope_of(headers: CIMultiDictProxy[str], request_id: str) -> dict[str, Any] | None:
    """Return the envelope for ``X-KV-Hint``; None: there is no such header.

    Raises:
        InvalidArgumentError: it is none that the proxy knows.
    """
    text = headers.get(HINT, "")
    if not text:
        return None
    found = _HINT.fullmatch(text)
    if found is None:
        known = "end, demote, retain[=SECONDS] or tool_wait[=SECONDS]"
        raise InvalidArgumentError(f"{HINT}: {sanitize(text, 40)!r} is not one of {known}")
    name, seconds = found.groups()
    payload = {_TIMES[name]: int(seconds) * 1000} if name in _TIMES and int(seconds or 0) else {}
    action = {"action_id": HINT, "action_type": _ACTIONS.get(name, name), "action_version": "1.0"}
    return {
        "protocol_version": "0.1",
        "message_id": request_id,
        "actions": [action | {"payload": payload}],
    }


async def delete_session(
    parts: ProxyContext, hints: SessionHints, request: web.Request
) -> web.Response:
    """Answer ``DELETE /v1/sessions/ID``: the session is over."""
    headers, caller = {REQUEST_ID: request_id_of(request)}, None
    if parts.salts is not None and (caller := parts.salts.caller(request.headers)) is None:
        message = f"this needs one header {parts.salts.header}"
        return error_response(401, message, "authentication_error", headers=headers)
    session = session_of(request.match_info["session"], caller)
    if parts.lookup is None:
        message = "this proxy has no store: start it with --master"
        return error_response(404, message, "not_found", headers=headers)
    result = None if session is None else await hints.end(session)
    if result is None:
        message = "no such session here, not any more, or the store does not answer"
        return error_response(404, message, "not_found", headers=headers)
    told = {"outcome": str(result.outcome), "reason": result.reason}
    return web.json_response(told, headers=headers)
