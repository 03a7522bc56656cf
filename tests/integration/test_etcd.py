"""The client of etcd against a real one: leases, the leader's key, news of its end, TLS, users."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import (
    EtcdUnreachableError,
    NotLeaderError,
    PermissionDeniedError,
    StartupError,
)
from kvstore.runtime.addresses import EtcdPlace
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd.client import Etcd
from kvstore.runtime.etcd.leader_lookup import find_leader
from tests.support.etcd import EtcdServer, running
from tests.support.processes import free_port


@pytest.fixture(scope="module", params=["plain", "tls"])
def etcd(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EtcdServer]:
    with running(tmp_path_factory.mktemp("etcd"), tls=request.param == "tls") as server:
        yield server


def soon(seconds: float = 5.0) -> float:
    return uptime() + seconds


def use(place: EtcdPlace, body: Callable[[Etcd], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        etcd = Etcd(place)
        try:
            async with asyncio.timeout(30):
                await body(etcd)
        finally:
            await etcd.close()

    asyncio.run(run())


def test_one_of_two_is_elected_and_its_end_is_told(etcd: EtcdServer) -> None:
    place = etcd.place("two")

    async def body(first: Etcd) -> None:
        second = Etcd(place)
        assert (await first.read_leader(soon())).leader is None
        one, two = await first.grant(5, soon()), await second.grant(5, soon())
        leader = await first.campaign(one.lease_id, "a:1", soon())
        assert (leader.address, leader.lease_id) == ("a:1", one.lease_id)
        assert await first.campaign(one.lease_id, "a:1", soon()) == leader, "may be done twice"
        assert await second.campaign(two.lease_id, "b:2", soon()) == leader
        sight = await second.read_leader(soon())
        assert sight.leader == leader
        assert not await second.watch_for_end(sight.revision, soon(0.3))
        watching = asyncio.create_task(second.watch_for_end(sight.revision, soon(10)))
        await asyncio.sleep(0)
        await first.revoke(one.lease_id, soon())
        assert await watching
        assert await first.keep_alive(one.lease_id, soon()) == 0
        await first.revoke(one.lease_id, soon())
        assert await second.keep_alive(two.lease_id, soon()) == 5
        next_one = await second.campaign(two.lease_id, "b:2", soon())
        assert next_one.address == "b:2"
        assert next_one.revision > leader.revision
        assert await asyncio.to_thread(find_leader, place, soon()) == "b:2"
        await second.revoke(two.lease_id, soon())
        assert await asyncio.to_thread(find_leader, place, soon()) == ""
        await second.close()

    use(place, body)


def test_a_lease_that_nobody_keeps_ends(etcd: EtcdServer) -> None:
    async def body(client: Etcd) -> None:
        lease = await client.grant(1, soon())
        assert lease.ttl_s >= 1
        granted = uptime()
        await client.campaign(lease.lease_id, "a:1", soon())
        sight = await client.read_leader(soon())
        assert await client.watch_for_end(sight.revision, soon(15))
        assert uptime() - granted > lease.ttl_s - 0.1, "not before its time"

    use(etcd.place("ends"), body)


def test_each_leader_has_a_higher_epoch_whatever_the_clocks_say(etcd: EtcdServer) -> None:
    async def body(client: Etcd) -> None:
        leaders = []
        epochs = []
        for now_ms in (5_000, 4_000, 9_000, 9_000):
            lease = await client.grant(5, soon())
            leader = await client.campaign(lease.lease_id, "a:1", soon())
            leaders.append(leader)
            epochs.append(await client.new_epoch(leader, now_ms, 1 << 40, soon()))
            await client.revoke(lease.lease_id, soon())
        assert epochs == [5_000, 5_001, 9_000, 9_001]
        for leader in leaders:
            with pytest.raises(NotLeaderError):
                await client.new_epoch(leader, 99_000, 1 << 40, soon())

    use(etcd.place("epochs"), body)


def test_nobody_there_is_said_in_time() -> None:
    place = EtcdPlace((f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"))

    async def body(client: Etcd) -> None:
        with pytest.raises(EtcdUnreachableError, match="refused"):
            await client.read_leader(soon(1.0))

    started = uptime()
    use(place, body)
    with pytest.raises(EtcdUnreachableError, match="refused"):
        find_leader(place, soon(1.0))
    assert uptime() - started < 3.0


def test_an_etcd_that_comes_back_is_found_again(tmp_path: Path) -> None:
    with running(tmp_path) as server:

        async def body(client: Etcd) -> None:
            lease = await client.grant(30, soon())
            leader = await client.campaign(lease.lease_id, "a:1", soon())
            await asyncio.to_thread(server.stop)
            with pytest.raises(EtcdUnreachableError):
                await client.keep_alive(lease.lease_id, soon(0.5))
            await asyncio.to_thread(server.start)
            assert await client.keep_alive(lease.lease_id, soon()) > 0
            assert (await client.read_leader(soon())).leader == leader

        use(server.place(), body)


def test_users_and_passwords(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.control("user", "add", "root", "--new-user-password", "pw")
        server.control("user", "grant-role", "root", "root")
        server.control("auth", "enable")

        async def body(client: Etcd) -> None:
            lease = await client.grant(30, soon())
            await client.campaign(lease.lease_id, "a:1", soon())
            await asyncio.to_thread(server.stop)
            await asyncio.to_thread(server.start)  # which forgets the tokens that it gave out
            assert await client.keep_alive(lease.lease_id, soon()) > 0
            assert (await client.read_leader(soon())).leader is not None

        place = server.place()._replace(user="root", password="pw")
        use(place, body)
        assert find_leader(place, soon()) == "a:1"
        for wrong in (place._replace(password="no"), server.place()):
            with pytest.raises(PermissionDeniedError) as caught:
                find_leader(wrong, soon())
            assert "pw" not in str(caught.value)


def test_without_our_certificate_there_is_no_answer(tmp_path: Path) -> None:
    with running(tmp_path, tls=True) as server:
        place = server.place()
        for wrong in (place._replace(cert="", key=""), EtcdPlace(place.endpoints)):
            with pytest.raises(EtcdUnreachableError):
                find_leader(wrong, soon(2))
        with pytest.raises(StartupError, match="nowhere"):
            find_leader(place._replace(ca="/nowhere.pem"), soon())
