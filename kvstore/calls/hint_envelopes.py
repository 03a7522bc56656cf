"""Hint envelopes: what an orchestrator or agent expects of KV blocks, in the form of vLLM, SGLang
and Dynamo (``KvHintsEnvelope``): JSON, or objects with the same attributes. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from kvstore.calls import HintAction
from kvstore.errors import InvalidArgumentError
from kvstore.limits import KEY_BYTES_MAX, PIN_KEYS_MAX, PIN_MS_MAX, RETAIN_MS_MAX, Key

ACTIONS_MAX: Final = 64
"""Actions of one envelope; together they name at most ``PIN_KEYS_MAX`` keys."""

TEXT_MAX: Final = 256
"""Characters of an id, type or version."""

TOOL_WAIT_MS: Final = 180_000
"""Time for which a chain is retained while a tool runs whose duration is unknown."""

RESUME_MIN_MS: Final = 60_000

_TYPES: Final = {
    "kv.retain": HintAction.RETAIN,
    "kv.release": HintAction.RELEASE,
    "kv.demote": HintAction.DEMOTE,
    "kv.prefetch": HintAction.PREFETCH,
    "kv.pin": HintAction.NONE,
    "tool_wait": HintAction.RETAIN,
    "session_end": HintAction.RELEASE,
    "branch_over": HintAction.RELEASE,
}
_IS_SHARED: Final = "every engine reads the shared store"
_NOT_DONE: Final[dict[str, str]] = {"kv.fetch": _IS_SHARED, "kv.share": _IS_SHARED}
_UNRESOLVED: Final = {
    "block_hashes": "the store cannot resolve block_hashes of 64 bits: give keys in hexadecimal",
    "session": "the store knows no sessions: give keys in hexadecimal",
}
_KEY: Final = re.compile(f"(?:[0-9a-fA-F]{{2}}){{1,{KEY_BYTES_MAX}}}")


class EnvelopeAction(NamedTuple):
    """A checked action of an envelope."""

    action_id: str
    action: HintAction = HintAction.NONE
    """NONE: a pin, or ignored."""
    duration_ms: int = 0
    """Of a pin and of RETAIN."""
    keys: tuple[Key, ...] = ()
    """The last key of each chain; empty: the chain of the request that the envelope came with."""
    ignored_reason: str = ""
    clipped: bool = False
    """Whether a longer time was requested than is allowed."""

    @property
    def is_pin(self) -> bool:
        return not self.action and not self.ignored_reason


def parse_envelope(envelope: object) -> list[EnvelopeAction]:
    """Return the actions of an envelope. Those that the store does not have are ignored, not wrong.

    Raises:
        InvalidArgumentError: a field is absent or wrong; the text names it.
    """
    for name in ("protocol_version", "message_id"):
        _text(envelope, name, "")
    actions = _field(envelope, "actions")
    if not isinstance(actions, list | tuple) or len(actions) > ACTIONS_MAX:
        raise _error("actions", f"a list of at most {ACTIONS_MAX} actions")
    parsed = [_parse_action(action, f"actions.{at}.") for at, action in enumerate(actions)]
    if sum(len(action.keys) for action in parsed) > PIN_KEYS_MAX:
        raise _error("actions", f"at most {PIN_KEYS_MAX} keys in all payloads together")
    return parsed


def _parse_action(action: object, at: str) -> EnvelopeAction:
    action_id = _text(action, "action_id", at)
    kind = _text(action, "action_type", at)
    version = _text(action, "action_version", at)
    payload = _field(action, "payload")
    if not isinstance(payload, Mapping):
        raise _error(f"{at}payload", "an object")
    reason = _ignored_reason(kind, version, payload)
    if reason:
        return EnvelopeAction(action_id, ignored_reason=reason)
    keys = payload.get("keys", ())
    if not isinstance(keys, list | tuple) or not all(_is_key(key) for key in keys):
        raise _error(f"{at}payload.keys", f"a list of keys of 1 to {KEY_BYTES_MAX} bytes in hex")
    named = tuple(Key(bytes.fromhex(key)) for key in keys)
    wanted_ms = _wanted_ms(kind, payload, at)
    duration_ms = min(wanted_ms, PIN_MS_MAX if kind == "kv.pin" else RETAIN_MS_MAX)
    clipped = duration_ms < wanted_ms
    return EnvelopeAction(action_id, _TYPES[kind], duration_ms, named, clipped=clipped)


def _ignored_reason(kind: str, version: str, payload: Mapping[object, object]) -> str:
    if kind not in _TYPES:
        return _NOT_DONE.get(kind, "this action type is unknown")
    if version.partition(".")[0] != "1":
        return "this action version is unknown: the store has 1.0"
    if "keys" in payload:
        return ""
    return next((reason for name, reason in _UNRESOLVED.items() if name in payload), "")


def _wanted_ms(kind: str, payload: Mapping[object, object], at: str) -> int:
    """Return the requested time of a retention or pin."""
    if kind == "tool_wait":
        resume_ms = _positive(payload, "resume_ms", at)
        return TOOL_WAIT_MS if resume_ms is None else max(RESUME_MIN_MS, 2 * resume_ms)
    if kind == "kv.retain":
        ttl_ms = _positive(payload, "ttl_ms", at)
        return RETAIN_MS_MAX if ttl_ms is None else ttl_ms
    if kind == "kv.pin":
        ttl_ms = _positive(payload, "ttl_ms", at)
        if ttl_ms is None:
            raise _error(f"{at}payload.ttl_ms", "a whole number of milliseconds")
        return ttl_ms
    return 0


def _positive(payload: Mapping[object, object], name: str, at: str) -> int | None:
    value = payload.get(name)
    if value is not None and (type(value) is not int or value <= 0):
        raise _error(f"{at}payload.{name}", "a whole number of milliseconds, more than 0")
    return value


def _is_key(text: object) -> bool:
    return isinstance(text, str) and _KEY.fullmatch(text) is not None


def _text(owner: object, name: str, at: str) -> str:
    value = _field(owner, name)
    if not isinstance(value, str) or len(value) > TEXT_MAX:
        raise _error(at + name, f"a text of at most {TEXT_MAX} characters")
    return value


def _field(owner: object, name: str) -> object:
    return owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None)


def _error(name: str, expected: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name}: this field of a hint envelope is {expected}")
