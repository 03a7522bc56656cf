"""Hints on a whole master, next to a plain one that gets the same requests without hints."""

from __future__ import annotations

import contextlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvstore import calls
from kvstore.calls import HintAction, HintOutcome
from kvstore.calls.tenants import TenantRule
from kvstore.errors import NoSpaceError
from kvstore.limits import Namespace
from kvstore.master.state.density import density
from kvstore.master.state.eviction import lru
from kvstore.master.state.rules import MasterRules
from tests.support.invariants import check_invariants
from tests.unit.master.cluster import STEP_MS, Cluster, keys_of

BLOCKS = 6
HOLD_MS = 2_000
"""Of hints, pins and leases. Puts take longer to fill the pool six times: no hint is clipped."""

A, B, OTHER = map(Namespace, "abo")
NAMES = "abcdefghijk"
CHAINS = st.sampled_from(["abc", "abd", "ab", "e", "fg", "h", "ijk"])
ACTIONS = st.sampled_from([HintAction.RETAIN, HintAction.RELEASE, HintAction.DEMOTE])


class HintsMachine(RuleBasedStateMachine):
    """``everybody``: one tenant retains every chain. Else only tenant a gives hints."""

    policy = staticmethod(lru)

    @initialize(everybody=st.booleans(), lease_ms=st.sampled_from([1, 1, HOLD_MS]))
    def begin(self, everybody: bool, lease_ms: int) -> None:
        rules = MasterRules(lease_ms=lease_ms)
        tenants = None if everybody else [TenantRule(name, (name,)) for name in (A, B)]
        self.plain, self.hinted = self.both = [
            Cluster({"one": BLOCKS}, rules, tenants, self.policy()) for _ in range(2)
        ]
        self.everybody = everybody
        self.held: dict[tuple[Namespace, str], int] = {}
        """Until when leases and pins keep objects of the master with hints."""

    def _hint(self, namespace: Namespace, name: str, action: HintAction) -> HintOutcome:
        request = calls.Hint(namespace, keys_of(name), [int(action)], [HOLD_MS])
        reply = self.hinted.state.hints.hint(self.hinted.now_ms, request)
        return HintOutcome(reply.outcomes[0])

    @rule(requests=st.lists(st.tuples(st.sampled_from([A, B]), CHAINS), min_size=4, max_size=9))
    def request(self, requests: list[tuple[Namespace, str]]) -> None:
        for index, (namespace, chain) in enumerate(requests):
            for cluster in self.both:
                cluster.after(STEP_MS)
                matched = cluster.match(chain, namespace=namespace)
                if cluster is self.hinted:
                    self._hold(namespace, chain[:matched], cluster.rules.lease_ms)
                parent = chain[matched - 1] if matched else None
                with contextlib.suppress(NoSpaceError):
                    cluster.put(chain[matched:], parent=parent, namespace=namespace)
            if self.everybody or (index == 0 and namespace == A):
                self._hint(namespace, chain[-1], HintAction.RETAIN)
            self._check()

    def _hold(self, namespace: Namespace, names: str, ms: int) -> None:
        for name in names:
            until_ms = self.held.get((namespace, name), 0)
            self.held[namespace, name] = max(until_ms, self.hinted.now_ms + ms)

    @precondition(lambda self: not self.everybody)
    @rule(chain=CHAINS, action=ACTIONS)
    def hint(self, chain: str, action: HintAction) -> None:
        is_there = bool(self.hinted.present(chain[-1], namespace=A))
        before = self._order()
        outcome = self._hint(A, chain[-1], action)
        assert is_there == (outcome is not HintOutcome.MISSING)
        assert is_there or self._order() == before

    def _order(self) -> list[tuple[bytes, int, int]]:
        records = self.hinted.state.pool.forest.records()
        return [(record.key, record.position, record.hint) for record in records]

    @rule(namespace=st.sampled_from([A, B]), chain=CHAINS)
    def pin(self, namespace: Namespace, chain: str) -> None:
        """Pin a chain that both masters have: else their memory for other objects differs."""
        request = calls.Pin(namespace, keys_of(chain), HOLD_MS)
        if all(cluster.present(chain, namespace=namespace) == chain for cluster in self.both):
            with contextlib.suppress(NoSpaceError):
                for cluster in self.both:
                    cluster.state.keeping.pin(cluster.now_ms, request)
                self._hold(namespace, chain, HOLD_MS)

    def _check(self) -> None:
        for (namespace, name), until_ms in self.held.items():
            if until_ms > self.hinted.now_ms:
                assert self.hinted.present(name, namespace=namespace)
        if self.policy is not lru or self.hinted.rules.lease_ms > 1:
            return  # learned orders differ; a lease is of what was found
        for namespace in (A, B) if self.everybody else (B,):
            expected, found = (set(at.present(NAMES, namespace=namespace)) for at in self.both)
            assert found == expected if self.everybody else found >= expected

    def teardown(self) -> None:
        """What was retained is ordinary again: with and without hints the same objects go."""
        check_invariants(self.hinted.state)
        for cluster in self.both:
            cluster.after(HOLD_MS + STEP_MS)
        for number in range(BLOCKS):
            for cluster in self.both:
                cluster.put([f"new {number}"], namespace=OTHER)
            self._check()


class DensityMachine(HintsMachine):
    policy = staticmethod(density)


for machine in (HintsMachine, DensityMachine):
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
test_hints = HintsMachine.TestCase
test_hints_with_density = DensityMachine.TestCase
