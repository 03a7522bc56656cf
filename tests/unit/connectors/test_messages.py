"""What the two halves say to each other: plain values that add up."""

from __future__ import annotations

from kvstore.calls.fleet_records import is_draft_namespace
from kvstore.connectors.vllm.messages import (
    DraftIdentity,
    SaveResult,
    TransferReport,
    WorkerIdentity,
    draft_part,
    namespace,
    namespace_prefix,
)
from kvstore.connectors.vllm.weights.fingerprint import draft_of
from kvstore.limits import NAMESPACE_BYTES_MAX, TENANT_BYTES_MAX, check_namespace


def test_reports_of_workers_add_up() -> None:
    first = TransferReport({1: SaveResult(1, 1), 2: SaveResult(1, 1)}, {"r": 64, "s": 32})
    second = TransferReport({2: SaveResult(1, 0), 3: SaveResult(2, 1)}, {"r": 48, "t": 0})
    assert first.aggregate(second) is first
    assert first == TransferReport(
        {1: SaveResult(1, 1), 2: SaveResult(2, 1), 3: SaveResult(2, 1)}, {"r": 48, "s": 32, "t": 0}
    )
    assert second.saves == {2: SaveResult(1, 0), 3: SaveResult(2, 1)}


def test_namespaces_are_apart_and_allowed() -> None:
    names = {
        namespace("f" * 32, group, part)
        for group in (0, 1, 11)
        for part in ("p0t0", "p1t0", "p0t1", "p15t127")
    }
    assert len(names) == 12
    for name in names:
        assert check_namespace(name) == name
        assert len(name.encode()) <= NAMESPACE_BYTES_MAX


def test_the_names_of_a_draft_models_pages_are_known_to_those_who_explain_misses() -> None:
    draft = DraftIdentity(["d"], ["layout"], "eagle", "w")
    part = draft_part("p0s1", draft_of([WorkerIdentity("", [0], ["p0s1"], draft=draft)]))
    assert is_draft_namespace(namespace("abc", 3, part))
    assert not is_draft_namespace(namespace("abc", 3, "p0s1"))
    assert is_draft_namespace(namespace("abc", 3, part, tenant="acme"))
    assert not is_draft_namespace(namespace("abc", 3, "p0s1", tenant="acme"))


def test_namespaces_of_a_tenant_have_its_prefix_and_are_allowed() -> None:
    tenant = "t" * TENANT_BYTES_MAX
    longest = namespace("f" * 32, 1_000, draft_part("p1000s1000", "d" * 16), tenant=tenant)
    assert check_namespace(longest).startswith(namespace_prefix("f" * 32, tenant=tenant))
    assert namespace("f", 0, "p0t0", tenant="acme") == "acme/vllm/f/g0/p0t0"
    assert namespace_prefix("f", tenant="acme") == "acme/vllm/f/"
