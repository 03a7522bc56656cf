"""Bodies of requests: what is read from the client's, and what each hop gets instead of it.

A client's body is passed on as it came, byte for byte, unless something has to be said in it. What
the proxy does not know it leaves alone; what is wrong with a body the decoder says.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from kvstore.errors import InvalidArgumentError

Body = dict[str, Any]


class Route(NamedTuple):
    """One of the two ways to ask for text."""

    name: str
    path: str
    chat: bool


COMPLETIONS: Final = Route("completions", "/v1/completions", chat=False)
CHAT: Final = Route("chat", "/v1/chat/completions", chat=True)
ROUTES: Final = (COMPLETIONS, CHAT)

PARAMS: Final = "kv_transfer_params"
TOKEN_IDS: Final = "prompt_token_ids"  # noqa: S105 - a field's name, no password
STORED: Final = "stored_tokens"
NO_LOAD: Final = "no_load"

# What makes no sense with one token that nobody reads, or forbids it.
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

# With these the token ids are not all there is to a completion's prompt.
_NOT_ONLY_IDS: Final = ("echo", "prompt_embeds", "suffix")


def parse(raw: bytes) -> Body:
    """Raises InvalidArgumentError: not a JSON object."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise InvalidArgumentError(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise InvalidArgumentError("the body is JSON, but not an object")
    return body


def dump(body: Body) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


# --- what is read ------------------------------------------------------------------------------


def model_of(body: Body) -> str | None:
    """None: the body names none."""
    model = body.get("model")
    return model if isinstance(model, str) else None


def is_salted(body: Body) -> bool:
    """Whether it shares its cache only with requests that have the same salt."""
    return body.get("cache_salt") is not None


def reason_against_prefill(body: Body) -> str | None:
    """Why a prefiller would not help with it, whatever its length; None: it may."""
    params = body.get(PARAMS)
    if params is not None and not isinstance(params, dict):
        return "invalid"
    if params and params.get(NO_LOAD):
        return "no_load"
    # An engine that is to score the whole prompt computes it, whatever is cached.
    if body.get("prompt_logprobs") is not None or (body.get("echo") and _scores(body)):
        return "prompt_logprobs"
    return None


def given_ids(route: Route, body: Body) -> list[int] | None:
    """The prompt's token ids where the client sent those itself; None where it sent text."""
    if route.chat:
        params = body.get(PARAMS)
        return _ids(params.get(TOKEN_IDS)) if isinstance(params, dict) and _is_text(body) else None
    return _ids(body.get("prompt")) if not any(body.get(key) for key in _NOT_ONLY_IDS) else None


def can_be_rendered(route: Route, body: Body) -> bool:
    """Whether it is one prompt of nothing but text, so that its token ids are all of it."""
    if route.chat:
        return _is_text(body)
    return isinstance(body.get("prompt"), str) and not any(body.get(key) for key in _NOT_ONLY_IDS)


def ids_of_rendered(route: Route, answer: object) -> list[int] | None:
    """The token ids in an engine's answer to ``.../render``; None: there is more than those."""
    if not route.chat:
        if not isinstance(answer, list) or len(answer) != 1:
            return None
        answer = answer[0]
    if not isinstance(answer, dict) or answer.get("features") or answer.get("content_parts"):
        return None
    return _ids(answer.get("token_ids"))


def stored_tokens(answer: object) -> int | None:
    """How many tokens the prefiller is storing, by its answer; None: it does not say."""
    params = answer.get(PARAMS) if isinstance(answer, dict) else None
    stored = params.get(STORED) if isinstance(params, dict) else None
    return stored if type(stored) is int and stored >= 0 else None


def error_message(answer: object) -> str | None:
    """What an engine says about its error, in OpenAI's form; None: it says nothing in that form."""
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else None


# --- what is sent ------------------------------------------------------------------------------


def for_prefill(route: Route, body: Body, token_ids: list[int] | None) -> Body:
    """The same prompt, to be computed and put into the store; one token is the least to ask for."""
    sent = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    sent |= {"stream": False, "n": 1, "max_tokens": 1}
    if route.chat:
        sent["max_completion_tokens"] = 1
    return _with_ids(route, sent, token_ids)


def for_decode(route: Route, body: Body, token_ids: list[int] | None, stored: int | None) -> Body:
    """The client's own body, with what is known by now. Nothing known: an equal body.

    Args:
        stored: see ``stored_tokens``.
    """
    sent = _with_ids(route, dict(body), token_ids)
    if stored is not None:
        sent[PARAMS] = {**(sent.get(PARAMS) or {}), STORED: stored}
    return sent


def _with_ids(route: Route, sent: Body, token_ids: list[int] | None) -> Body:
    if token_ids is None:
        return sent
    if route.chat:
        sent[PARAMS] = {**(sent.get(PARAMS) or {}), TOKEN_IDS: token_ids}
    else:
        sent["prompt"] = token_ids
    return sent


# --- details -----------------------------------------------------------------------------------


def _ids(value: object) -> list[int] | None:
    # bool is a kind of int, hence the exact type.
    if not isinstance(value, list) or not value:
        return None
    return value if all(type(each) is int and each >= 0 for each in value) else None


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
