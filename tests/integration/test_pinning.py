"""Pins and lifetimes, with a master and a node of their own."""

from __future__ import annotations

import time

import pytest

from kvstore import Client
from kvstore.errors import NoSpaceError

VALUE = bytes(64 << 10)


def test_a_full_pool_keeps_what_is_pinned_and_says_so() -> None:
    with Client.embedded("8MiB") as client:
        client.put_chain(["root", "tip"], [VALUE, VALUE])
        assert client.pin(["tip", "absent"], 600) == [True, False]
        for index in range(200):
            client.put(f"k{index}", VALUE)
        assert client.match_prefix(["root", "tip"]) == 2
        with pytest.raises(NoSpaceError) as refused:
            client.pin([f"k{index}" for index in range(100, 200)], 600)
        assert refused.value.fields["cause"] == "pins"
        (row,) = client.status().namespaces
        assert row.pinned_objects == 2

        for index in range(60):
            client.put(f"o{index}", VALUE, namespace="other")
        client.pin([f"o{index}" for index in range(55)], 600, namespace="other")
        client.pin([key for key in map("k{}".format, range(170, 200)) if client.exists(key)], 600)
        with pytest.raises(NoSpaceError, match="are pinned") as full:
            client.put_many([(f"n{index}", VALUE) for index in range(100)], wait_ms=8_000)
        assert full.value.fields["pinned_bytes"]
        assert client.unpin(["tip"]) == [True]


def test_an_object_is_gone_after_its_time_to_live() -> None:
    with Client.embedded("8MiB") as client:
        client.put("brief", b"x", ttl=0.2)
        client.put("lasting", b"x", ttl=600)
        deadline = time.monotonic() + 10
        while client.exists("brief") and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.get("brief") is None
        assert client.get("lasting") == b"x"
