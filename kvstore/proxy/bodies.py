"""Request bodies: parses a client's body, and builds the body for each hop.

The decoder gets the client's body byte for byte, unless the proxy has to add a field. The proxy
keeps unknown fields, and lets the decoder report errors in a body.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from kvstore.errors import InvalidArgumentError

Body = dict[str, Any]


class EngineRoute(NamedTuple):
    """An endpoint of engines."""

    name: str
    path: str
    chat: bool = False
    method: str = "POST"

    @property
    def is_generation(self) -> bool:
        """Whether the proxy knows how to prefill these requests."""
        return self in ROUTES


COMPLETIONS: Final = EngineRoute("completions", "/v1/completions")
CHAT: Final = EngineRoute("chat", "/v1/chat/completions", chat=True)
ROUTES: Final = (COMPLETIONS, CHAT)

PARAMS: Final = "kv_transfer_params"
TOKEN_IDS: Final = "prompt_token_ids"  # noqa: S105 - a field's name, no password
STORED: Final = "stored_tokens"
NO_LOAD: Final = "no_load"
SALT: Final = "cache_salt"
HINTS: Final = "kv_hint"

# Fields that forbid a response of one token, or are useless because it is discarded.
_NOT_FOR_PREFILL: Final = (
    "best_of",
    "echo",
    "logprob_token_ids",
    "logprobs",
    "max_completion_tokens",
    "max_tokens",
    "min_completion_tokens",
    "min_tokens",
    "n",
    "stream",
    "stream_options",
    "top_logprobs",
    "use_beam_search",
)

# With these fields a completion's prompt is more than its token ids.
_NOT_ONLY_IDS: Final = ("echo", "prompt_embeds", "suffix")


def parse(raw: bytes) -> Body:
    """Parse the body. Raises InvalidArgumentError if it is not a JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidArgumentError("the body is JSON, but not an object")
    return body


def dump(body: Body) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def model_of(body: Body) -> str | None:
    """Return the model's name, or None."""
    model = body.get("model")
    return model if isinstance(model, str) else None


def salt_of(body: Body) -> str | None:
    """Return the salt, which limits sharing to requests with the same one; empty: none; None:
    engines reject this one."""
    salt = body.get(SALT)
    if salt is None:
        return ""
    try:
        return salt if isinstance(salt, str) and salt.encode() else None
    except UnicodeEncodeError:  # half of a surrogate pair
        return None


def prefill_skip_reason(body: Body) -> str | None:
    """Return the reason why a prefiller cannot help this request, whatever its length, or None."""
    params = body.get(PARAMS)
    if params is not None and not isinstance(params, dict):
        return "invalid"
    if params and params.get(NO_LOAD):
        return "no_load"
    # An engine that scores the whole prompt computes all of it, whatever is cached.
    if body.get("prompt_logprobs") is not None or (body.get("echo") and _scores(body)):
        return "prompt_logprobs"
    return None


def given_ids(route: EngineRoute, body: Body) -> list[int] | None:
    """Return the prompt's token ids if the client sent token ids; None if it sent text."""
    if route.chat:
        params = body.get(PARAMS)
        return _ids(params.get(TOKEN_IDS)) if isinstance(params, dict) and _is_text(body) else None
    return _ids(body.get("prompt")) if not any(body.get(key) for key in _NOT_ONLY_IDS) else None


def can_be_rendered(route: EngineRoute, body: Body) -> bool:
    """Return whether the request is one text prompt, which its token ids represent in full."""
    if route.chat:
        return _is_text(body)
    return isinstance(body.get("prompt"), str) and not any(body.get(key) for key in _NOT_ONLY_IDS)


def ids_of_rendered(route: EngineRoute, answer: object) -> list[int] | None:
    """Return the token ids of a ``.../render`` response; None: the prompt is more than token
    ids."""
    if not route.chat:
        if not isinstance(answer, list) or len(answer) != 1:
            return None
        answer = answer[0]
    if not isinstance(answer, dict) or answer.get("features") or answer.get("content_parts"):
        return None
    return _ids(answer.get("token_ids"))


def stored_tokens(answer: object) -> int | None:
    """Return the number of tokens that the prefiller reports as stored, or None."""
    params = answer.get(PARAMS) if isinstance(answer, dict) else None
    stored = params.get(STORED) if isinstance(params, dict) else None
    return stored if type(stored) is int and stored >= 0 else None


def error_message(answer: object) -> str | None:
    """Return the message in an engine's error; None: the error is not in OpenAI's form."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None


def hint_of(body: Body) -> object:
    """Return the hint envelope of the request, or None."""
    params = body.get(PARAMS)
    return params.get(HINTS) if isinstance(params, dict) else None


def with_hint(body: Body, envelope: Body) -> Body:
    """Return the body with this hint envelope, unless it has one of its own."""
    params = body.get(PARAMS) or {}
    return {**body, PARAMS: {HINTS: envelope, **params}} if isinstance(params, dict) else body


def for_prefill(route: EngineRoute, body: Body, token_ids: list[int] | None) -> Body:
    """Build the body for a prefiller: the same prompt, with a response of one token, the
    minimum."""
    sent = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    if hint_of(body) is not None:  # the decoder's: the request does not end here
        sent[PARAMS] = {name: value for name, value in sent[PARAMS].items() if name != HINTS}
    sent |= {"stream": False, "n": 1, "max_tokens": 1}
    if route.chat:
        sent["max_completion_tokens"] = 1
    return _with_ids(route, sent, token_ids)


def for_decode(
    route: EngineRoute, body: Body, token_ids: list[int] | None, stored: int | None
) -> Body:
    """Build the body for a decoder: the client's own, with the token ids and ``stored`` if known.

    Args:
        stored: see ``stored_tokens``.
    """
    sent = _with_ids(route, dict(body), token_ids)
    if stored is not None:
        sent[PARAMS] = {**(sent.get(PARAMS) or {}), STORED: stored}
    return sent


def _with_ids(route: EngineRoute, sent: Body, token_ids: list[int] | None) -> Body:
    if token_ids is None:
        return sent
    if route.chat:
        sent[PARAMS] = {**(sent.get(PARAMS) or {}), TOKEN_IDS: token_ids}
    else:
        sent["prompt"] = token_ids
    return sent


def _ids(value: object) -> list[int] | None:
    # Compares the exact type, because bool is a subclass of int.
    if not isinstance(value, list) or not value:
        return None
    return value if all(type(token) is int and token >= 0 for token in value) else None


def _scores(body: Body) -> bool:
    logprobs = body.get("logprobs")
    return logprobs is not None and logprobs is not False


def _is_text(body: Body) -> bool:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or body.get("echo"):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            return False
        if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
            return False
    return True
