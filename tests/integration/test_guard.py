"""The guard of adapters over a real store."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvstore.connectors.engine.guard import Deadline, Guard
from tests.support.cluster import Cluster


def test_objects_of_another_size_are_misses_and_spoil_no_other_one(
    store: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = store.client()
    sizes = {b"g0": 100, b"g1": 50, b"g2": 100, b"g3": 200, b"g4": 100}
    client.put_many({key: np.full(size, key[1], np.uint8) for key, size in sizes.items()})
    guard = Guard(client, logging.getLogger("test"))
    keys = [*sizes, b"missing"]
    calls: list[float] = []
    get_into = client.get_into

    def counted(*args: object, **named: object) -> list[int | None]:
        calls.append(named["timeout_ms"])  # type: ignore[arg-type]
        return get_into(*args, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(client, "get_into", counted)
    buffers = [np.zeros(100, np.uint8) for _ in keys]
    assert Deadline(guard).get_into(keys, buffers, "default") == [100, None, 100, None, 100, None]
    for key, buffer in zip(keys, buffers, strict=True):
        assert (buffer == key[1]).all() == (sizes.get(key) == 100)
    assert len(calls) == 2, "not one by one"
    assert calls[1] <= calls[0], "within the same deadline"
    only = [np.zeros(1, np.uint8)]
    assert Deadline(guard).get_into([b"g0"], only, "default") == [None]
