"""A user in a hurry: every argument of every public call of both clients, given all that people
give by mistake. The answer is the right thing or a typed error, soon; never an error of Python's.
"""

from __future__ import annotations

import enum
import inspect
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import AsyncClient, Client
from kvstore.calls.hint_envelopes import EnvelopeAction
from kvstore.errors import KVStoreError
from tests.integration.conftest import either_client
from tests.support.cluster import Cluster

BUFFER = np.zeros(64, np.uint8)
HUGE = 1 << 80


class Text(str):
    __slots__ = ()

    def encode(self, encoding: str = "", errors: str = "") -> bytes:
        return b"something else"


class Named(enum.Enum):
    KEY = "hurried"


def given() -> dict[str, Any]:
    """What a user in a hurry gives, for any argument. New ones for each call: some are used up."""
    return {
        "None": None,
        "text": "hurried",
        "number as text": "5",
        "surrogate": "a\udcff",
        "empty text": "",
        "bytes": b"hurried",
        "number": 5,
        "zero": 0,
        "negative": -1,
        "huge": HUGE,
        "float": 1.5,
        "nan": float("nan"),
        "infinity": float("inf"),
        "bool": True,
        "numpy integer": np.int64(5),
        "array": np.arange(3),
        "array of objects": np.array([None, {}], object),
        "subclass of str": Text("hurried"),
        "enum": Named.KEY,
        "generator": (each for each in ["hurried", "other"]),
        "endless generator": iter(lambda: "x", None),
        "list": ["hurried"],
        "list of None": [None],
        "list of numbers": [1, 2],
        "set": {"hurried"},
        "tuple": ("hurried", b"x"),
        "pairs": [("hurried", b"x")],
        "slice": slice(3),
        "function": lambda *_: None,
        "object": object(),
    }


class Row:
    """One method: arguments with which it works, and those to leave as they are."""

    def __init__(self, *keep: str, **works: Any) -> None:
        self.keep = keep
        self.works = works


KEYS = ["hurried", "other"]
PUT = {"namespace": None, "parent": None, "replicas": 1, "wait_ms": 0, "ttl": 60, "stream": None}
BATCH = PUT | {"partial": False}
ROWS: dict[str, Row | str] = {
    "put": Row(key="hurried", value=b"x", overwrite=True, **PUT),
    "put_many": Row(items=[("hurried", b"x")], overwrite=True, **BATCH),
    "put_chain": Row(keys=KEYS, values=[b"x", b"y"], hint="retain", retain=60, **BATCH),
    "allocate": Row(shape=4, dtype="uint8", kind="numpy", wait_ms=0, namespace=None),
    "get": Row(key="hurried", namespace=None, copy=True, kind=None, device=None),
    "get_many": Row(keys=KEYS, namespace=None, copy=True, kind=None, device=None),
    "get_into": Row(keys=["hurried"], buffers=[BUFFER], namespace=None, stream=None),
    "get_ranges": Row(keys=["hurried"], ranges=[[(0, BUFFER[:1])]], namespace=None),
    "register": Row(memory=BUFFER, size=None),
    "unregister": Row(memory=BUFFER),
    "memory_at": Row(address=BUFFER.ctypes.data, size=8),
    "payload_at": Row(addresses=[BUFFER.ctypes.data], sizes=[8]),
    "device": Row(name="cuda:0"),
    "lease": Row(view=BUFFER),
    "match_prefix": Row(keys=KEYS, namespace=None, hint="retain", retain=60),
    "matches": Row(keys=KEYS, namespaces=["default"]),
    "match_all": Row(keys=KEYS, namespaces=["default"], states=["default"], bring=True),
    "lookup": Row(keys=KEYS, namespace=None),
    "release": Row(keys=KEYS, namespace=None),
    "release_match": "takes what match_all returned",
    "exists": Row(key="hurried", namespace=None),
    "exists_many": Row(keys=KEYS, lease=False, namespace=None),
    "stat": Row(key="hurried", namespace=None),
    "status": Row(),
    "http": Row(),
    "traffic": Row(namespace=None),
    "chains": Row(namespace="default", keys=[], count=0),
    "blocks": Row(keys=KEYS, above=0, namespace=None),
    "list_objects": Row(namespace="", prefix=b""),
    "list_page": Row(namespace="", prefix=b"", cursor=0),
    "pin": Row(keys=KEYS, seconds=1, namespace=None),
    "unpin": Row(keys=KEYS, namespace=None),
    "hint": Row(hints=[("retain", "hurried", 60)], namespace=None),
    "retain": Row(key="hurried", ttl=60, namespace=None),
    "end_session": Row(key="hurried", namespace=None),
    "demote": Row(key="hurried", namespace=None),
    "prefetch": Row(key="hurried", namespace=None),
    "apply_hints": Row(actions=[EnvelopeAction("")], chains={"default": ["hurried"]}),
    "remove": Row(key="hurried", namespace=None),
    "remove_many": Row(keys=KEYS, namespace=None),
    "clear": Row("progress", namespace="nothing"),
    "drain": Row(node="nobody", undo=False, leave=False),
    "move_page": Row("evict_up_to", node="nobody", cursor=0, repair=False),
    "stats": Row(),
    "close": "takes no argument, and ends the client",
    "embedded": "starts processes; its arguments are settings, checked in unit/config",
    "config": "no call",
}
"""Every public name of the clients. A new one fails the test until it has its row."""

PATIENCE_S = 8.0
"""No call takes so long, whatever it is given: the time-out of the clients is 2 s."""


def public(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


def test_each_public_call_has_its_row() -> None:
    assert public(Client) | {"config"} == set(ROWS)
    assert public(AsyncClient) == set(ROWS)
    for name, row in ROWS.items():
        if isinstance(row, Row):
            parameters = set(inspect.signature(getattr(Client, name)).parameters)
            assert parameters - {"self", "timeout_ms", *row.keep} == set(row.works), name


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_people_give_is_taken_or_refused(store: Cluster, kind: str) -> None:
    wrong: list[str] = []
    with either_client(kind, store.address, timeout_ms=2_000) as client:
        client.put("hurried", b"x")
        for name, row in ROWS.items():
            if isinstance(row, Row):
                takes = "timeout_ms" in inspect.signature(getattr(Client, name)).parameters
                for argument in (*row.works, *(["timeout_ms"] if takes else [])):
                    for what in given():
                        works = dict(row.works) | {argument: given()[what]}
                        began = time.monotonic()
                        found = outcome(lambda: all_rows(getattr(client, name)(**works)))  # noqa: B023
                        took = time.monotonic() - began
                        if found or took > PATIENCE_S:
                            wrong.append(f"{name}({argument}={what}): {found} {took:.1f} s")
                client.unregister(BUFFER)
    assert not wrong, "\n".join(wrong)


def all_rows(result: Any) -> Any:
    return list(result) if inspect.isgenerator(result) else result


def outcome(call: Callable[[], object]) -> str:
    """Empty: the right kind of end."""
    try:
        call()
    except KVStoreError as error:
        return "" if error.code != "internal" else f"internal: {error}"
    except Exception as error:  # that is what is looked for
        return f"{type(error).__name__}: {error}"
    return ""
