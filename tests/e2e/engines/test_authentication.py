"""vLLM's engines against a store that requires identities: with the right one they find what was
stored; with another one, or none, they compute, and say why in one line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from examples.tiny import BLOCK_TOKENS
from kvstore.errors import PermissionDeniedError
from kvstore.limits import FLEET_NAMESPACE
from tests.e2e.engines.conftest import StartEngine, prompt
from tests.e2e.engines.engine import transfer_config
from tests.e2e.engines.offloading import BLOCK_TOKENS as CHUNK_TOKENS
from tests.e2e.engines.offloading import Engine as Offloading
from tests.support.certificates import Identities
from tests.support.cluster import Cluster
from tests.support.processes import free_port
from tests.support.wait import until

WHOLE = 4 * BLOCK_TOKENS
"""Of a prompt of 600 tokens: its full blocks."""

OF_VLLM = ("vllm/*", FLEET_NAMESPACE)
OF_OFFLOADING = ("vllm-offloading/*", FLEET_NAMESPACE)
"""As docs/security.md says them."""

WITHIN_S = 30.0
"""Of a prompt of an engine whose calls are refused, on a busy machine."""

REFUSED = "refused_by_the_store"
STRANGER = "KVSTORE_AUTH=FILE"


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


@pytest.fixture
def store(tmp_path: Path, identities: Identities) -> Iterator[Cluster]:
    settings = {"http_port": free_port(), "events": "on"}
    with Cluster(tmp_path, settings=settings, identities=identities) as cluster:
        cluster.start(memory="256MiB")
        yield cluster


# --- the connector -------------------------------------------------------------------------------


def test_the_connector_needs_its_own_namespaces_and_the_fleets(
    store: Cluster, identities: Identities, llama: Path, engine: StartEngine
) -> None:
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    auth = identities.engine("engine", *OF_VLLM)
    one = engine(
        llama, transfer_config(store.address), kv_events_config=events,
        environ={"KVSTORE_AUTH": auth},
    )  # fmt: skip
    first = one.generate([prompt(1)])
    one.saved()
    assert one.events() == [{"kind": "BlockStored", "keys": 4}]
    until(lambda: any("events_heard" in line for line in one.log), within_s=60)
    assert one.reset()
    again = one.generate([prompt(1)])
    assert again[0].cached == WHOLE
    assert again[0].tokens == first[0].tokens
    until(store.fleet_records)
    assert store.spaces() == ["vllm", FLEET_NAMESPACE]
    (row,) = [r for r in store.client().list_objects() if r.namespace != FLEET_NAMESPACE][:1]
    assert store.client().remove(row.key, namespace=row.namespace)

    def is_told() -> bool:
        one.generate([prompt(2, 5)])  # a step
        return any(each["kind"] == "BlockRemoved" for each in one.events())

    until(is_told, within_s=60)
    assert not [line for line in one.log if REFUSED in line or "not_announced" in line]


def test_engines_of_two_tenants_with_equal_weights_do_not_meet(
    store: Cluster, identities: Identities, llama: Path, engine: StartEngine
) -> None:
    """One pattern is enough for each, and neither can read what the other says of itself."""
    spaces = {}
    for tenant, other in (("acme", "globex"), ("globex", "acme")):
        auth = identities.engine(tenant, f"{tenant}/*")
        with engine(llama, transfer_config(store.address, tenant=tenant, auth=auth)) as one:
            (first,) = one.generate([prompt(1)])
            assert first.cached == 0, "what the other tenant stored"
            one.saved()
            assert one.reset()
            (again,) = one.generate([prompt(1)])
            assert (again.cached, again.tokens) == (WHOLE, first.tokens)
            until(partial(store.fleet_records, tenant))
            assert not [line for line in one.log if REFUSED in line or "not_announced" in line]
        names = [each.name for each in store.status().namespaces]
        spaces[tenant] = {name.partition("/")[2] for name in names if name.startswith(tenant)}
        with pytest.raises(PermissionDeniedError), store.client(auth=auth) as client:
            list(client.list_objects(namespace=f"{other}/{FLEET_NAMESPACE}"))
    assert store.spaces() == ["acme", "globex"]
    assert spaces["acme"] == spaces["globex"], "their fingerprints are equal, too"


@pytest.mark.parametrize("spaces", [("others/*",), ()], ids=["others", "without"])
def test_a_connector_that_is_refused_computes_and_says_why(
    store: Cluster, identities: Identities, llama: Path, engine: StartEngine,
    spaces: tuple[str, ...],
) -> None:  # fmt: skip
    auth = {"auth": identities.engine("other", *spaces)} if spaces else {}
    one = engine(llama, transfer_config(store.address, **auth))
    for seed in (1, 1, 2):
        started = time.monotonic()
        (result,) = one.generate([prompt(seed)])
        assert time.monotonic() - started < WITHIN_S
        assert len(result.tokens) == 8
        one.reset()
    one.saved()
    assert store.spaces() == []
    says = REFUSED if spaces else STRANGER
    until(lambda: any(says in line for line in one.log), within_s=30)
    told = [line for line in one.log if REFUSED in line]
    # A line for each right that is missing: look up, save, and announce.
    assert 2 <= len(told) <= 3 if spaces else not told, told
    assert not any("Traceback" in line for line in one.log)


# --- offloading ----------------------------------------------------------------------------------

Start = Callable[..., Offloading]


@pytest.fixture
def start(store: Cluster, llama: Path) -> Iterator[Start]:
    started: list[Offloading] = []

    def begin(**more: Any) -> Offloading:
        started.append(Offloading(llama, {"master": store.address, **more}))
        return started[-1]

    yield begin
    for each in started:
        each.close()


@pytest.mark.parametrize("tenants", [("",), ("acme", "globex")], ids=["no tenant", "tenants"])
def test_offloading_of_tenants_does_not_meet_and_needs_its_own_namespaces_alone(
    store: Cluster, identities: Identities, start: Start, tenants: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    tokens = prompt(1)
    full = len(tokens) // CHUNK_TOKENS * CHUNK_TOKENS
    for tenant in tenants:
        spaces = (f"{tenant}/*",) if tenant else OF_OFFLOADING
        mine = {"tenant": tenant, "auth": identities.engine(tenant or "engine", *spaces)}
        assert start(**mine).run(tokens) == 0
        assert start(**mine).run(tokens) == full  # and checks every byte
        until(partial(store.fleet_records, tenant))
    own = [FLEET_NAMESPACE, "vllm-offloading"]
    assert store.spaces() == (own if tenants == ("",) else list(tenants))
    assert REFUSED not in caplog.text


@pytest.mark.parametrize("spaces", [OF_VLLM[:1], ()], ids=["others", "without"])
def test_offloading_that_is_refused_computes_and_says_why(
    store: Cluster, identities: Identities, start: Start, caplog: pytest.LogCaptureFixture,
    spaces: tuple[str, ...],
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    engine = start(auth=identities.engine("other", *spaces) if spaces else "")
    for seed in (1, 1, 2, 3):
        started = time.monotonic()
        assert engine.run(prompt(seed)) == 0
        assert time.monotonic() - started < WITHIN_S
        engine.reset()
    assert store.spaces() == []
    says = REFUSED if spaces else STRANGER
    until(lambda: says in caplog.text, within_s=30)
    told = [line for line in caplog.messages if REFUSED in line]
    assert 2 <= len(told) <= 3 if spaces else not told, told
