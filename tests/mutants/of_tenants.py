"""Faults in the quotas of tenants."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

TENANTS: Final = ("tests/unit/master/test_tenants.py",)
POOL: Final = "master/state/pool.py"

MUTANTS: Final = (
    Mutant("guarantees-are-not-kept", POOL,
        "        if tenant.size - bytes_held(victim) >= tenant.guaranteed:\n",
        "        if tenant.size >= tenant.guaranteed:\n", TENANTS),
    Mutant("a-commit-has-no-bound", "master/state/putting.py",
        "        self._keep_bound(now_ms, request, given, len(alive))\n", "", TENANTS),
    Mutant("a-commit-counts-twice", "master/state/putting.py",
        "        if owner is given.tenant:\n", "        if owner is None:\n", TENANTS),
    Mutant("allocations-are-of-nobody", "master/state/putting.py",
        "        owner = self._pool.tenant_of(request.namespace)\n        taken",
        "        owner = self._pool.tenant_of(\"\")\n        taken", TENANTS),
    Mutant("waiting-allocations-are-of-nobody", "master/state/waiting.py",
        "owner = common.pool.tenant_of(request.namespace)",
        "owner = common.pool.tenant_of(getattr(request, 'namespace', '')[:1])", TENANTS),
    Mutant("a-renewed-allocation-does-not-follow", "master/state/tenants.py",
        "            if now is not put.tenant:\n",
        "            if put.tenant is None:\n", TENANTS),
    Mutant("what-is-given-up-counts-for-nobody", "master/state/puts.py",
        "            owner = self.tenants.owner(put)\n", "", TENANTS),
    Mutant("quarantine-counts-for-ever", "master/state/puts.py",
        "self.tenants.quarantined(owner, residue.extents, -length)",
        "self.tenants.quarantined(owner, residue.extents, 0)", TENANTS),
    Mutant("a-repair-has-no-bound", POOL,
        "return self.tenants.of_record(record).lacks(extent_bytes(record.size)) <= 0",
        "return True", TENANTS),
    Mutant("pins-of-tenants-have-no-bound", "master/state/keeping.py",
        "        if missing > 0:\n", "        if missing < 0:\n", TENANTS),
    Mutant("one-tenant-holds-up-all", "master/state/waiting.py",
        "                    self._stuck[put.tenant] = result\n",
        "                    break\n", TENANTS),
    Mutant("bytes-of-dead-segments-count", "master/state/tenants.py",
        "            tenant.size -= tenant.bytes_on.pop(segment_id, 0)\n",
        "            tenant.bytes_on.pop(segment_id, 0)\n", TENANTS),
    Mutant("moved-namespaces-stay-in-the-old-order", "master/state/sweeping.py",
        "            self._swept_breaks = -1\n            self._jobs.due |= SWEEP\n", "", TENANTS),
    Mutant("a-namespace-may-have-two-tenants", "kvstore/tenants.py",
        "            if other is not None and other != name:\n",
        "            if other is not None and other == name + '!':\n", TENANTS),
)  # fmt: skip
