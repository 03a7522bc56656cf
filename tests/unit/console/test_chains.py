"""What a pasted text of keys may mean, and who may see chains."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import calls
from kvstore.client.async_client import AsyncClient
from kvstore.console.api.chains import ChainsAPI, ChainsRequest, keys_of
from kvstore.errors import InvalidArgumentError, PermissionDeniedError
from kvstore.limits import Key
from kvstore.runtime.formatting import key_text
from kvstore.security.identity import validated_identity
from kvstore.security.impersonation import impersonate


@pytest.mark.parametrize(
    ("text", "readings"),
    [
        ("9f86", [[b"\x9f\x86"], [b"9f86"]]),
        ("0x9F86, 0Xab", [[b"\x9f\x86", b"\xab"]]),
        ("hex:9f86 plain", [[b"\x9f\x86", b"plain"]]),
        ("9f86 plain", [[b"9f86", b"plain"]]),
        ('["9f86", "a, b c"]', [[b"9f86", b"a, b c"]]),
        ("'9f86';\n \"abcd\"\t", [[b"\x9f\x86", b"\xab\xcd"], [b"9f86", b"abcd"]]),
        ("9f8", [[b"9f8"]]),
        ("שלום", [["שלום".encode()]]),
    ],
)
def test_readings(text: str, readings: list[list[bytes]]) -> None:
    assert keys_of(text) == readings


@given(st.lists(st.binary(min_size=1, max_size=40).map(Key), min_size=1, max_size=5))
def test_what_ls_shows_is_understood(keys: list[Key]) -> None:
    texts = [key_text(key) for key in keys]
    if not any(set(text) & set(",;'\"[") or not text.isascii() for text in texts):
        assert keys in keys_of("\n".join(texts))
    assert keys in keys_of(" ".join(key.hex() for key in keys))


@given(st.text(max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        readings = keys_of(text)
    except InvalidArgumentError:
        return
    assert all(key for keys in readings for key in keys)
    assert len({len(keys) for keys in readings}) == 1


def test_a_cached_reply_is_for_identities_that_may_read_its_namespace() -> None:
    queries: list[str | None] = []

    class Store:
        async def chains(self, namespace: str | None, **_: Any) -> calls.ChainsReply:
            queries.append(namespace)
            return calls.ChainsReply(7, 0, [], True)

    async def nodes_of(_: Iterable[int]) -> dict[int, str]:
        return {}

    async def main() -> None:
        api = ChainsAPI(cast(AsyncClient, Store()), nodes_of)
        engine = validated_identity("e", ["engine"], reads=["ours"])
        for namespace in ("ours", "theirs", ""):
            request = ChainsRequest(namespace=namespace)
            await api._chains(request)
            with impersonate(engine):
                if namespace == "ours":
                    await api._chains(request)
                else:
                    with pytest.raises(PermissionDeniedError):
                        await api._chains(request)

    asyncio.run(main())
    assert queries == ["ours", "theirs", None], "the engine gets the cached reply, or none"
