"""A client on both sides of a fork: each has what it needs, and harms nothing of the other's."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable

import numpy as np
import pytest

from kvstore import AsyncClient, Client, PutOutcome
from kvstore.errors import ReservationLostError
from tests.support.cluster import Cluster

VALUES = {f"k{number}": bytes([number]) * (10, 5_000, 300_000)[number % 3] for number in range(30)}


def fork(work: Callable[[], None]) -> int:
    """Run ``work`` in a child; its pid."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.alarm(60)
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def join(pid: int) -> None:
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def read_and_write(client: Client, who: str) -> None:
    for number, (key, value) in enumerate(VALUES.items()):
        assert client.get(key) == value
        assert client.put(f"{who}-{number}", value) is PutOutcome.STORED
    assert set(client.stats().counters) <= {"late_reads"}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_both_sides_go_on_and_find_every_object_whole(store: Cluster, transport: str) -> None:
    client = store.client(transports=(transport,))
    client.put_many(list(VALUES.items()))
    read_and_write(client, "before")
    children = [fork(lambda n=n: read_and_write(client, f"child{n}")) for n in range(3)]  # type: ignore[misc]
    read_and_write(client, "parent")
    for child in children:
        join(child)
    assert [client.get(key) for key in VALUES] == list(VALUES.values())
    assert client.get("child2-29") == VALUES["k29"]


def test_what_the_parent_holds_is_not_the_childs_to_put_or_to_end(store: Cluster) -> None:
    client = store.client()
    client.put("k", b"kept")
    view = client.get("k", copy=False)
    allocated = client.allocate(1_000, kind="numpy")
    assert isinstance(allocated, np.ndarray)
    assert view is not None
    allocated[:] = 7
    lease = client.lease(view)
    assert lease is not None

    def child() -> None:
        nonlocal view, allocated
        assert view is not None
        theirs = client.lease(view)
        assert theirs is lease
        assert not lease.is_held
        assert bytes(view) == b"kept"
        with pytest.raises(ReservationLostError):
            client.put("a", allocated)
        own = client.get("k", copy=False)
        assert own is not None
        again = client.lease(own)
        assert again is not None
        assert again.is_held
        mine = client.allocate(1_000, kind="numpy")
        assert client.put("mine", mine) is PutOutcome.STORED
        del view, allocated  # gives nothing back
        client.close()

    join(fork(child))
    assert lease.is_held
    assert client.put("a", allocated) is PutOutcome.STORED
    got = client.get("a")
    assert isinstance(got, np.ndarray)
    assert (got == 7).all()
    assert client.get("mine") is not None


def test_a_child_ends_no_process_of_the_parents(store: Cluster) -> None:
    with Client(store.address, memory="16MiB") as client:
        nodes = len(client.status().nodes)
        join(fork(client.close))
        join(fork(lambda: None))
        assert len(client.status().nodes) == nodes
        assert {node.state for node in client.status().nodes} == {"alive"}


def test_a_client_of_an_event_loop_begins_anew_in_another_loop(store: Cluster) -> None:
    client = AsyncClient(store.address)

    async def use(who: str) -> None:
        assert await client.put(who, b"value of " + who.encode()) is PutOutcome.STORED
        assert await client.get("parent") == b"value of parent"

    async def use_in_child() -> None:
        await use("child")
        await client.close()

    async def use_and_close() -> None:
        await use("parent")
        pid = await asyncio.to_thread(fork, lambda: asyncio.run(use_in_child()))
        await asyncio.to_thread(join, pid)
        assert await client.get("child") == b"value of child"
        await use("parent again")
        await client.close()

    asyncio.run(use_and_close())


def test_a_client_that_is_sent_elsewhere_arrives_as_a_new_one(store: Cluster) -> None:
    client = store.client(namespace="sent", timeout_ms=5_000)
    client.put("key", b"value")
    with pickle.loads(pickle.dumps(client)) as there:
        assert there.config == client.config
        assert there.get("key") == b"value"
        assert there is not client
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(Client.get, (client, "key")) == b"value"
    assert client.get("key") == b"value"

    async def main() -> None:
        async with (
            AsyncClient(store.address, namespace="sent") as client,
            pickle.loads(pickle.dumps(client)) as there,
        ):
            assert await there.get("key") == b"value"

    asyncio.run(main())
