"""Clusters for the tests of this folder, whose invariants are checked when they are done with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import pytest

from kvstore.calls.tenants import TenantRule
from kvstore.master.state.eviction import LruPolicy, NewPolicy
from kvstore.master.state.rules import MasterRules
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import Cluster


class NewCluster(Protocol):
    def __call__(
        self,
        *,
        rules: MasterRules | None = None,
        tenants: Sequence[TenantRule] | None = None,
        policy: NewPolicy = LruPolicy,
        **nodes: int,
    ) -> Cluster:
        """``nodes``: blocks of memory by name."""
        ...


@pytest.fixture
def new_cluster() -> Iterator[NewCluster]:
    made: list[Cluster] = []

    def new(
        *,
        rules: MasterRules | None = None,
        tenants: Sequence[TenantRule] | None = None,
        policy: NewPolicy = LruPolicy,
        **nodes: int,
    ) -> Cluster:
        made.append(Cluster(nodes, rules or MasterRules(), tenants, policy))
        return made[-1]

    yield new
    for cluster in made:
        check_invariants(cluster.state)
