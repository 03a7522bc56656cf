"""What the proxy takes from headers and answers, and what it remembers of sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from multidict import CIMultiDict, CIMultiDictProxy

from kvstore.calls import HintOutcome
from kvstore.calls.hint_envelopes import EnvelopeAction, parse_envelope
from kvstore.client.hints import ActionResult
from kvstore.errors import InvalidArgumentError
from kvstore.proxy import hints
from kvstore.proxy.answer_ending import AnswerEnding
from kvstore.proxy.bodies import CHAT
from kvstore.proxy.hints import SessionHints, envelope_of
from kvstore.proxy.request_context import RequestContext

TIP = "0a" * 32
ANSWER = (
    b'{"choices":[{"message":{"content":"\\"finish_reason\\":\\"tool_calls\\""},'
    b'"finish_reason":"%s"}],"usage":{},"kv_transfer_params":{"stored_tokens":8,"tip":"%s"}}'
)


@pytest.mark.parametrize("size", [1, 7, 4096])
@pytest.mark.parametrize("reason", ["stop", "tool_calls"])
def test_the_end_of_an_answer_is_read_however_it_arrives(size: int, reason: str) -> None:
    data, ending = ANSWER % (reason.encode(), TIP.encode()), AnswerEnding()
    for start in range(0, len(data), size):
        ending.feed(data[start : start + size])
    assert (ending.calls_tools, ending.tip) == (reason == "tool_calls", bytes.fromhex(TIP))


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("end", ("session_end", {})), ("demote", ("kv.demote", {})), ("retain", ("kv.retain", {})),
        ("retain=9", ("kv.retain", {"ttl_ms": 9_000})), ("tool_wait=0", ("tool_wait", {})),
        ("tool_wait=999999", ("tool_wait", {"resume_ms": 999_999_000})),
        ("end=5", ("session_end", {})), ("stay", None), ("retain=-1", None), ("", None),
    ],
)  # fmt: skip
def test_a_header_becomes_an_envelope(
    header: str, expected: tuple[str, dict[str, int]] | None
) -> None:
    headers = CIMultiDictProxy(CIMultiDict({"X-KV-Hint": header}))
    if expected is None and header:
        with pytest.raises(InvalidArgumentError, match="tool_wait"):
            envelope_of(headers, "id")
        return
    made = envelope_of(headers, "id")
    if made is None:
        assert expected is None
    else:
        (action,) = made["actions"]
        assert (action["action_type"], action["payload"]) == expected
        parse_envelope(made)


def test_the_latest_sessions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "SESSIONS_MAX", 2)
    sent: list[tuple[str, ...]] = []

    class Lookup:
        async def last_key(self, *_: object) -> bytes:
            return b"computed"

        async def hint(self, model: str, action: EnvelopeAction) -> ActionResult:
            sent.append((model, action.action_id, *(key.decode() for key in action.keys)))
            return ActionResult("", HintOutcome.IGNORED, "shared", 0)

    async def scenario() -> None:
        store: Any = Lookup()
        sessions = SessionHints(store)

        async def answer(name: str) -> None:
            context = RequestContext(CHAT, "id", b"", {"model": "m"}, CIMultiDict(), 0)
            context.session, context.token_ids = ("caller", name), [1]
            sessions.on_answer(context)
            await asyncio.wait(sessions._sending)

        for name in ("old", "alice", "bob"):
            await answer(name)
        assert sent == []
        alice = ("caller", "alice")
        sessions._tips[alice] = sessions._tips[alice]._replace(at=-hints.SESSION_IDLE_S)
        await answer("bob")
        assert sent == [("m", "session_end", "computed")], "she is gone for good"
        assert await sessions.end(alice) is None
        assert await sessions.end(("caller", "old")) is None
        assert await sessions.end(("another", "bob")) is None, "callers do not share sessions"
        ended = await sessions.end(("caller", "bob"))
        assert ended is not None
        assert (ended.outcome, ended.reason) == (HintOutcome.IGNORED, "shared")
        assert await sessions.end(("caller", "bob")) is None
        await sessions.close()

    asyncio.run(scenario())
    assert sent == 2 * [("m", "session_end", "computed")]
