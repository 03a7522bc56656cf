"""One tenant: its rules, and what it holds. ``TenantAccounting`` keeps the counts."""

from __future__ import annotations

from kvstore.calls.tenants import TenantRule
from kvstore.master.state.turnover import TurnoverClock

LIMIT = "limit"
GUARANTEE = "guarantee"
PIN_LIMIT = "pin_limit"
PUT_SHARE = "put_share"
"""Which quota an error is about: its field ``quota``."""


class Tenant:
    """The rules of one tenant, and what it holds."""

    def __init__(self, number: int, rule: TenantRule) -> None:
        self.number = number
        """The number of its queues of eviction candidates, from 1."""
        self.size = 0
        """Bytes of memory that it holds."""
        self.bytes_on: dict[int, int] = {}
        """The same by segment id."""
        self.disk_bytes = 0
        """Bytes of its copies on disks."""
        self.objects = 0
        self.pending = 0
        """Puts and allocations under way."""
        self.waiting = 0
        """Puts that wait for room."""
        self.pinned_bytes = 0
        self.evicted_by_own = 0
        """Objects that made room for its own puts, also ahead of need."""
        self.evicted_by_others = 0
        """Objects that made room for puts of others, and for copies."""
        self.turnover = TurnoverClock()
        self.refused = 0
        """Puts, pins and writes to disks that were refused because of a quota."""
        self.name = rule.name
        self.follow(rule)

    def follow(self, rule: TenantRule) -> None:
        self.namespaces = rule.namespaces
        self.guarantee = rule.guarantee_bytes
        self.limit_bytes = rule.limit_bytes
        self.disk_limit = rule.disk_limit_bytes
        self.pinned_max = rule.pin_limit_bytes
        self.puts = rule.put_share
        self.retired = False
        """Whether the rules name it no more."""

    def retire(self) -> None:
        self.follow(TenantRule(self.name))
        self.retired = True

    def bytes_to_evict(self, wanted: int) -> int:
        """Return the bytes to evict before it may take ``wanted`` more."""
        return self.size + wanted - self.limit_bytes

    def share_of(self, count_max: int) -> int:
        """Return its share of so many puts."""
        return int(self.puts * count_max)

    def __repr__(self) -> str:
        return f"<Tenant {self.name!r}>"
