"""``KVStoreL2Adapter`` on a store that requires identities."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from kvstore.limits import FLEET_NAMESPACE
from tests.engines.lmcache.conftest import StartAdapter
from tests.engines.lmcache.tasks import chunk, key, same
from tests.support.certificates import Identities
from tests.support.cluster import SHORT, Cluster
from tests.support.wait import until

KEYS = [key(number) for number in range(8)]
OF_LMCACHE = ("lmcache/*", FLEET_NAMESPACE)
"""As docs/security.md says them."""

TASKS_S = 20.0
"""Of all tasks of an adapter that is refused: two seconds each at most, until a breaker opens."""


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


@pytest.fixture
def store(tmp_path: Path, identities: Identities) -> Iterator[Cluster]:
    with Cluster(tmp_path, settings=SHORT, identities=identities) as cluster:
        cluster.start(memory="64MiB")
        yield cluster


@pytest.mark.parametrize("tenants", [("",), ("acme", "globex")], ids=["no tenant", "tenants"])
def test_tenants_do_not_meet_and_need_their_own_namespaces_alone(
    store: Cluster,
    identities: Identities,
    adapter: StartAdapter,
    tenants: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    chunks = [chunk(number) for number in range(8)]
    for tenant in tenants:
        spaces = (f"{tenant}/*",) if tenant else OF_LMCACHE
        mine = {"tenant": tenant, "auth": identities.engine(tenant or "engine", *spaces)}
        first, second = adapter(**mine), adapter(**mine)
        assert first.look_up(KEYS) == []
        assert first.store(KEYS, chunks).is_successful()
        loaded = [chunk(None) for _ in KEYS]
        assert second.look_up(KEYS) == list(range(8))
        assert second.load(KEYS, loaded) == list(range(8))
        assert all(map(same, chunks, loaded))
        second.it.submit_unlock(KEYS)
        assert len(first.it.list_l2_keys().entries) == 8
        until(partial(store.fleet_records, tenant))
    assert store.spaces() == (["lmcache", FLEET_NAMESPACE] if tenants == ("",) else list(tenants))
    assert "refused_by_the_store" not in caplog.text


@pytest.mark.parametrize("spaces", [("others/*",), ()], ids=["others", "without"])
def test_if_it_is_refused_all_are_misses_and_the_log_says_why(
    store: Cluster,
    identities: Identities,
    adapter: StartAdapter,
    spaces: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = adapter(**({"auth": identities.engine("other", *spaces)} if spaces else {}))
    started = time.monotonic()
    for _ in range(10):
        assert one.look_up(KEYS) == []
        assert not one.store(KEYS, [chunk(number) for number in range(8)]).is_successful()
        assert one.load(KEYS, [chunk(None) for _ in KEYS]) == []
    assert time.monotonic() - started < TASKS_S
    assert one.it.report_status()["is_healthy"], "it is only slower"
    assert store.spaces() == []
    says = "refused_by_the_store" if spaces else "KVSTORE_AUTH=FILE"
    until(lambda: says in caplog.text)
    told = [each for each in caplog.messages if "refused_by_the_store" in each]
    # One line for each call that is refused, however often it is made.
    assert bool(told) == bool(spaces)
    assert len({each.split(":")[1] for each in told}) == len(told), told
