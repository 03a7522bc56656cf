"""A call that fails keeps nothing of its caller's: no frame of ours refers to the error that it has
caught or passed on, whose traceback refers to that frame, and so to all its callers.

What a program holds in a variable ends with the variable then, and not at some later collection: a
leased view, a tensor of gigabytes. The collector is off here, as engines have it (``gc.freeze``).
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Final

import pytest

from kvstore import AsyncClient, Client
from kvstore.errors import KVStoreError
from tests.integration.test_hurried_calls import ROWS, Row
from tests.support.cluster import Cluster
from tests.support.processes import ROOT

CALLS: Final[dict[str, Callable[[Any], Any]]] = {
    name: lambda client, name=name, row=row: getattr(client, name)(**row.works)
    for name, row in ROWS.items()
    if isinstance(row, Row)
} | {
    "no key": lambda client: client.get(5),
    "a view": lambda client: client.get("hurried", copy=False),
    "too large": lambda client: client.put("large", bytes(64 << 20), wait_ms=0),
    "no room": lambda client: client.put_many([(f"{n}", bytes(4 << 20)) for n in range(9)]),
}


class Mark:
    """What a caller holds."""


async def done(result: Any) -> None:
    """What either client has returned, to its end."""
    if inspect.isawaitable(result):
        await result
    elif inspect.isasyncgen(result):
        async for _ in result:
            pass
    elif inspect.isgenerator(result):
        for _ in result:
            pass


async def kept_by(call: Callable[[], Any]) -> tuple[str, str]:
    """What keeps the frame of the caller when a call is over (empty: nothing does), and how the
    call ended."""
    ended = "returned"

    async def caller() -> weakref.ref[Mark]:
        nonlocal ended
        mark = Mark()
        try:
            await done(call())
        except KVStoreError as error:
            ended = type(error).__name__
        return weakref.ref(mark)

    if (await caller())() is None:
        return "", ended
    return _holders() or "something", ended


def _holders() -> str:
    """The frames of ours that refer to an error that refers to them."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = []
    for error in [each for each in gc.garbage if isinstance(each, BaseException)]:
        at: TracebackType | None = error.__traceback__
        while at is not None:
            frame, at = at.tb_frame, at.tb_next
            names = [name for name, value in frame.f_locals.items() if _leads_to(value, error, 2)]
            if names:
                code = frame.f_code
                file = code.co_filename.removeprefix(f"{ROOT}/")
                found.append(f"{file}:{code.co_firstlineno} {code.co_name}: {names}")
    gc.garbage.clear()
    return "; ".join(sorted(set(found)))


def _leads_to(value: object, error: BaseException, steps: int) -> bool:
    if value is error or steps == 0:
        return value is error
    within = list(value.values()) if isinstance(value, dict) else value
    return isinstance(within, (list, tuple, set)) and any(
        _leads_to(each, error, steps - 1) for each in within
    )


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize(
    "way",
    [
        pytest.param((Client, "shm", True), id="shm-lane"),
        pytest.param((Client, "tcp", False), id="tcp-grpc"),
        pytest.param((AsyncClient, "tcp", True), id="async-tcp-lane"),
    ],
)
@pytest.mark.parametrize(
    "circumstance", ["well", "node dead", "node hangs", "master dead", "master hangs", "closed"]
)
def test_what_a_caller_holds_ends_with_the_call(
    cluster: Cluster, way: tuple[Any, str, bool], circumstance: str
) -> None:
    kind, transport, lane = way
    cluster.start(memory="32MiB")
    (node,), master = cluster.nodes, cluster.master_server
    assert master is not None
    settings = {"transports": (transport,), "lane": lane, "timeout_ms": 250}

    kept: list[str] = []

    async def run() -> None:
        client = kind(cluster.address, **settings)
        await done(client.put("hurried", b"x" * 1000))
        happens = {
            "well": lambda: None,
            "node dead": node.kill,
            "node hangs": node.freeze,
            "master dead": master.kill,
            "master hangs": master.freeze,
            "closed": client.close,
        }[circumstance]
        await done(happens())
        try:
            for name, call in CALLS.items():
                by, ended = await kept_by(lambda: call(client))  # noqa: B023
                if by:
                    kept.append(f"{name} ({ended}): {by}")
        finally:
            await done(client.close())
            if "hangs" in circumstance:
                node.resume()
                master.resume()

    asyncio.run(run())
    assert not kept, "\n" + "\n".join(kept)
    if circumstance == "master dead":
        cluster.master()
