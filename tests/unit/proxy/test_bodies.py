"""What each hop is sent."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.proxy.bodies import (
    CHAT,
    COMPLETIONS,
    can_be_rendered,
    dump,
    error_message,
    for_decode,
    for_prefill,
    given_ids,
    ids_of_rendered,
    model_of,
    parse,
    prefill_skip_reason,
    salt_of,
    stored_tokens,
)

IDS = [5, 6, 7]
PICTURE = {"type": "image_url", "image_url": {"url": "data:"}}


def chat(content: Any = "hello", **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}], **more}


@pytest.mark.parametrize("raw", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 100_000])
def test_what_is_no_body(raw: bytes) -> None:
    with pytest.raises(InvalidArgumentError):
        parse(raw)


# --- prefill -----------------------------------------------------------------------------------


def test_a_completion_for_a_prefiller() -> None:
    body = {
        "model": "m", "prompt": "text", "stream": True, "stream_options": {}, "max_tokens": 9,
        "min_tokens": 3, "n": 4, "best_of": 4, "logprobs": 1, "echo": False, "temperature": 0.5,
        "use_beam_search": False, "logprob_token_ids": [1], "cache_salt": "s",
        "kv_transfer_params": {"mine": 1},
    }  # fmt: skip
    before = dump(body)
    assert for_prefill(COMPLETIONS, body, IDS) == {
        "model": "m", "prompt": IDS, "stream": False, "max_tokens": 1, "n": 1, "temperature": 0.5,
        "cache_salt": "s", "kv_transfer_params": {"mine": 1},
    }  # fmt: skip
    assert dump(body) == before


def test_a_chat_for_a_prefiller() -> None:
    body = chat(max_tokens=9, logprobs=True, top_logprobs=3, tools=[1], kv_transfer_params={"x": 1})
    assert for_prefill(CHAT, body, IDS) == {
        **chat(tools=[1]), "stream": False, "n": 1, "max_tokens": 1, "max_completion_tokens": 1,
        "kv_transfer_params": {"x": 1, "prompt_token_ids": IDS},
    }  # fmt: skip
    assert body["kv_transfer_params"] == {"x": 1}


def test_without_ids_the_prompt_stays() -> None:
    assert for_prefill(COMPLETIONS, {"prompt": "text"}, None)["prompt"] == "text"
    assert "kv_transfer_params" not in for_prefill(CHAT, chat(), None)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"kv_transfer_params": None}, None), ({"kv_transfer_params": {"no_load": False}}, None),
        ({"kv_transfer_params": {"no_load": True}}, "no_load"),
        ({"kv_transfer_params": [1]}, "invalid"), ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"logprobs": 1}, None), ({"echo": True, "logprobs": 1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": False}, None),
    ],
)  # fmt: skip
def test_when_a_prefiller_would_not_help(more: dict[str, Any], reason: str | None) -> None:
    assert prefill_skip_reason({"prompt": "text", **more}) == reason


# --- decode ------------------------------------------------------------------------------------


def test_a_completion_for_a_decoder() -> None:
    body = {"prompt": "text", "max_tokens": 9, "stream": True, "stream_options": {}}
    assert for_decode(COMPLETIONS, body, IDS, 16) == {
        **body, "prompt": IDS, "kv_transfer_params": {"stored_tokens": 16},
    }  # fmt: skip
    assert for_decode(COMPLETIONS, body, None, None) == body


def test_a_chat_for_a_decoder_keeps_what_the_user_gave() -> None:
    body = chat(kv_transfer_params={"mine": 1, "stored_tokens": 3})
    assert for_decode(CHAT, body, IDS, 16)["kv_transfer_params"] == {
        "mine": 1, "stored_tokens": 16, "prompt_token_ids": IDS,
    }  # fmt: skip
    assert for_decode(CHAT, body, None, None) == body
    assert body["kv_transfer_params"] == {"mine": 1, "stored_tokens": 3}


@pytest.mark.parametrize(
    ("answer", "stored"),
    [
        ({"kv_transfer_params": {"stored_tokens": 16, "remote": 1}}, 16),
        ({"kv_transfer_params": {"stored_tokens": 0}}, 0),
        ({"kv_transfer_params": {"stored_tokens": -1}}, None),
        ({"kv_transfer_params": {"stored_tokens": True}}, None),
        ({"kv_transfer_params": None}, None), ({}, None), (None, None),
    ],
)  # fmt: skip
def test_what_a_prefiller_says_it_stores(answer: object, stored: int | None) -> None:
    assert stored_tokens(answer) == stored


# --- token ids ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([1, 2], [1, 2]), ([], None), ([[1, 2]], None), ([1, True], None), ([1, -1], None),
        ("text", None),
    ],
)  # fmt: skip
def test_ids_that_a_client_sent(prompt: object, ids: list[int] | None) -> None:
    assert given_ids(COMPLETIONS, {"prompt": prompt}) == ids


def test_ids_that_a_client_sent_with_a_chat() -> None:
    params = {"prompt_token_ids": [1, 2]}
    assert given_ids(CHAT, chat(kv_transfer_params=params)) == [1, 2]
    assert given_ids(CHAT, chat([PICTURE], kv_transfer_params=params)) is None
    assert given_ids(CHAT, chat()) is None


@pytest.mark.parametrize("key", ["echo", "suffix", "prompt_embeds"])
def test_what_is_more_than_ids_is_not_replaced_by_them(key: str) -> None:
    assert not can_be_rendered(COMPLETIONS, {"prompt": "text", key: "x"})
    assert given_ids(COMPLETIONS, {"prompt": [1, 2], key: "x"}) is None


@pytest.mark.parametrize(
    ("body", "can"),
    [
        (chat(None, tools=[]), True), (chat([{"type": "text", "text": "hello"}]), True),
        (chat([{"type": "text", "text": "hello"}, PICTURE]), False), (chat(["text"]), False),
        (chat(7), False), (chat(echo=True), False), ({"messages": []}, False), ({}, False),
    ],
)  # fmt: skip
def test_chats_that_can_be_rendered(body: dict[str, Any], can: bool) -> None:
    assert can_be_rendered(CHAT, body) is can


@pytest.mark.parametrize("prompt", [["one", "two"], ["one"], [[1]], [1], None, 7])
def test_completions_that_are_not_rendered(prompt: object) -> None:
    assert not can_be_rendered(COMPLETIONS, {"prompt": prompt})


def test_ids_in_the_answer_to_a_rendering() -> None:
    one: dict[str, Any] = {
        "token_ids": IDS,
        "features": None,
        "content_parts": None,
        "sampling_params": {},
    }
    assert ids_of_rendered(CHAT, one) == IDS
    assert ids_of_rendered(COMPLETIONS, [one]) == IDS
    assert ids_of_rendered(COMPLETIONS, [one, one]) is None
    assert ids_of_rendered(COMPLETIONS, one) is None
    assert ids_of_rendered(CHAT, [one]) is None
    assert ids_of_rendered(CHAT, one | {"features": {"mm_hashes": {}}}) is None
    assert ids_of_rendered(CHAT, one | {"content_parts": [{}]}) is None
    assert ids_of_rendered(CHAT, None) is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"error": {"message": None}}, None),
        ({"error": "no"}, None),
        ({"detail": "Not Found"}, None),
        (None, None),
    ],
)
def test_what_an_engine_says_about_its_error(answer: object, said: str | None) -> None:
    assert error_message(answer) == said


def test_models_and_salts() -> None:
    assert model_of({"model": "m"}) == "m"
    assert model_of({"model": 7}) is model_of({}) is None
    assert salt_of({"cache_salt": "s"}) == "s"
    assert salt_of({"cache_salt": None}) == salt_of({}) == ""
    for wrong in ("", 7, ["s"], "\ud800"):
        assert salt_of({"cache_salt": wrong}) is None
