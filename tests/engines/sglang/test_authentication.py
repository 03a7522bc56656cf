"""``KVStoreHiCache`` on a store that requires identities."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvstore.limits import FLEET_NAMESPACE
from tests.engines.sglang.hicache import attach, bytes_at, host_pool, indices
from tests.support.certificates import Identities
from tests.support.cluster import Cluster
from tests.support.wait import until

KEYS = [f"{number:064x}" for number in range(8)]
OF_SGLANG = ("sglang/*", FLEET_NAMESPACE)
"""As docs/security.md says them."""

CALLS_S = 15.0
"""Of all calls of a back-end that is refused: two seconds each at most, until a breaker opens."""


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


@pytest.fixture
def store(tmp_path: Path, identities: Identities) -> Iterator[Cluster]:
    with Cluster(tmp_path, identities=identities) as cluster:
        cluster.start()
        yield cluster


@pytest.fixture
def backend(store: Cluster, model: Path) -> Iterator[Callable[..., Any]]:
    made: list[Any] = []

    def make(pool: Any, auth: str, **given: Any) -> Any:
        given |= {"auth": auth} if auth else {}
        made.append(attach(pool, store.address, model=model, **given))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.mark.parametrize("tenants", [("",), ("acme", "globex")], ids=["no tenant", "tenants"])
def test_tenants_do_not_meet_and_need_their_own_namespaces_alone(
    store: Cluster,
    identities: Identities,
    backend: Callable[..., Any],
    tenants: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    readers = []
    for tenant in tenants:
        spaces = (f"{tenant}/*",) if tenant else OF_SGLANG
        auth = identities.engine(tenant or "engine", *spaces)
        pool, other_pool = host_pool(filled=1), host_pool()
        one = backend(pool, auth, tenant=tenant)
        readers.append(other := backend(other_pool, auth, tenant=tenant))
        assert other.batch_exists(KEYS) == 0
        assert one.batch_set_v1(KEYS, indices(*range(8))) == [True] * 8
        assert other.batch_exists(KEYS) == 8
        assert other.batch_get_v1(KEYS, indices(*range(8))) == [True] * 8
        assert [bytes_at(other_pool, page) for page in range(8)] == [
            bytes_at(pool, page) for page in range(8)
        ]
        until(partial(store.fleet_records, tenant))
    assert store.spaces() == (["sglang", FLEET_NAMESPACE] if tenants == ("",) else list(tenants))
    readers[-1].clear()
    assert [each.batch_exists(KEYS) for each in readers] == [8, 0][-len(tenants) :]
    assert "refused_by_the_store" not in caplog.text


@pytest.mark.parametrize("spaces", [("others/*",), ()], ids=["others", "without"])
def test_if_it_is_refused_all_are_misses_and_the_log_says_why(
    store: Cluster,
    identities: Identities,
    backend: Callable[..., Any],
    spaces: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = backend(host_pool(filled=1), identities.engine("other", *spaces) if spaces else "")
    started = time.monotonic()
    for _ in range(10):
        assert one.batch_exists(KEYS) == 0
        assert one.batch_set_v1(KEYS, indices(*range(8))) == [False] * 8
        assert one.batch_get_v1(KEYS, indices(*range(8))) == [False] * 8
    assert time.monotonic() - started < CALLS_S
    assert store.spaces() == []
    says = "refused_by_the_store" if spaces else "KVSTORE_AUTH=FILE"
    until(lambda: says in caplog.text)
    told = [each for each in caplog.messages if "refused_by_the_store" in each]
    # One line for each call that is refused, however often it is made.
    assert bool(told) == bool(spaces)
    assert len({each.split(":")[1] for each in told}) == len(told), told
