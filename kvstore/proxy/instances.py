"""The engines: which there are, how each of them does, and whom to ask next.

An instance is *usable* when it is healthy, not draining, and its breaker lets a request through. Of
the usable ones the least busy is chosen, of several such the one that was chosen longest ago. An
instance that drains gets nothing new and is gone when the last request on it ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self

from kvstore.proxy.affinity import PrefixAffinity, Prints
from kvstore.proxy.breaker import Breaker, BreakerState

Role = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")

HEALTH_FAILURES_MAX: Final = 2
"""Failed health checks in a row that make an instance unhealthy: one may be an accident."""


class Rules(NamedTuple):
    """How instances are judged and chosen; see ``ProxyConfig`` for each."""

    breaker_failures: int = 5
    breaker_open_ms: int = 5_000
    prefix_affinity: bool = False
    affinity_slack: int = 4
    affinity_blocks_max: int = 131_072


class InstanceView(NamedTuple):
    """One instance, as operators see it."""

    role: Role
    address: str
    healthy: bool
    draining: bool
    in_flight: int
    breaker: BreakerState


class Instance:
    """One engine in one role. The same engine may be there in both, as two instances."""

    def __init__(self, role: Role, address: str, breaker: Breaker) -> None:
        self.role: Final = role
        self.address: Final = address
        self.breaker: Final = breaker
        self.healthy = False
        """False until it was checked for the first time."""
        self.draining = False
        self.in_flight = 0
        self.chosen = 0
        """Counts up with each choice of any instance: the smaller, the longer ago."""
        self.renders_from_ms = 0
        """Before that it is not asked for token ids, because it said that it cannot."""
        self._health_failures = 0

    def is_well(self) -> None:
        """It answered a health check."""
        self.healthy = True
        self._health_failures = 0

    def is_silent(self) -> None:
        """It failed a health check."""
        self._health_failures += 1
        if self._health_failures >= HEALTH_FAILURES_MAX:
            self.healthy = False

    def is_gone(self) -> None:
        """Nobody took the connection of a request: no second opinion is needed."""
        self.healthy = False

    def usable(self, now_ms: int) -> bool:
        return self.healthy and not self.draining and self.breaker.allows(now_ms)

    def view(self, now_ms: int) -> InstanceView:
        return InstanceView(
            self.role, self.address, self.healthy, self.draining, self.in_flight,
            self.breaker.state(now_ms),
        )  # fmt: skip


class Turn:
    """One request on one instance, which counts as in flight until the ``with`` block ends."""

    def __init__(self, instances: Instances, instance: Instance, now_ms: int) -> None:
        """Internal: use ``Instances.choose``."""
        self.instance: Final = instance
        self._instances = instances
        self._undecided_probe = instance.breaker.begin(now_ms)
        instance.in_flight += 1

    def succeeded(self) -> None:
        """It answers. May be followed by ``failed``, when it stops in the middle."""
        self._undecided_probe = False
        self.instance.breaker.succeeded()

    def failed(self, now_ms: int) -> None:
        self._undecided_probe = False
        self.instance.breaker.failed(now_ms)

    @property
    def is_probe(self) -> bool:
        """Whether it tries an instance that failed, and nothing is known yet."""
        return self._undecided_probe

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._undecided_probe:
            self.instance.breaker.abandoned()
        self.instance.in_flight -= 1
        self._instances.ended(self.instance)


class Instances:
    """All engines. Times are milliseconds of any clock that does not go back."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._all: dict[tuple[Role, str], Instance] = {}
        self._choices = 0
        self._affinity = {
            role: PrefixAffinity(blocks_max=rules.affinity_blocks_max) for role in ROLES
        }

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._all.values()))

    def of(self, role: Role) -> list[Instance]:
        return [each for each in self._all.values() if each.role == role]

    def at(self, address: str, role: Role | None = None) -> list[Instance]:
        """Those at an address, in one role or any."""
        return [
            each
            for each in self._all.values()
            if each.address == address and role in (None, each.role)
        ]

    # --- coming and going ---------------------------------------------------------------------

    def add(self, role: Role, address: str) -> tuple[Instance, bool]:
        """The instance, and whether it is new. One that was draining is taken back."""
        known = self._all.get((role, address))
        if known is not None:
            known.draining = False
            return known, False
        rules = self._rules
        breaker = Breaker(failures_max=rules.breaker_failures, open_ms=rules.breaker_open_ms)
        instance = self._all[role, address] = Instance(role, address, breaker)
        return instance, True

    def drain(self, instance: Instance) -> None:
        """Nothing new for it; it is removed when nothing runs on it any more, maybe at once."""
        instance.draining = True
        self.ended(instance)

    def remove(self, instance: Instance) -> None:
        """Forget it. What runs on it goes on."""
        instance.draining = True
        self._all.pop((instance.role, instance.address), None)

    def ended(self, instance: Instance) -> None:
        """A request on it ended."""
        if instance.draining and not instance.in_flight and self._knows(instance):
            self.remove(instance)

    # --- choosing -----------------------------------------------------------------------------

    def usable(self, role: Role, now_ms: int, *, without: Collection[str] = ()) -> list[Instance]:
        return [
            each for each in self.of(role) if each.address not in without and each.usable(now_ms)
        ]

    def choose(
        self, role: Role, now_ms: int, *, without: Collection[str] = (), prints: Prints = ()
    ) -> Turn | None:
        """Whom to ask; None when nobody is usable.

        Args:
            without: addresses that have been tried for this request.
            prints: of its prompt, for affinity.
        """
        usable = self.usable(role, now_ms, without=without)
        if not usable:
            return None
        chosen = least = min(usable, key=lambda each: (each.in_flight, each.chosen))
        if self._rules.prefix_affinity and prints:
            affinity = self._affinity[role]
            by_address = {each.address: each for each in usable}
            address = affinity.longest(prints, by_address)
            if address is not None:
                preferred = by_address[address]
                if preferred.in_flight - least.in_flight <= self._rules.affinity_slack:
                    chosen = preferred
            affinity.remember(prints, chosen.address)
        self._choices += 1
        chosen.chosen = self._choices
        return Turn(self, chosen, now_ms)

    # --- for operators and tests --------------------------------------------------------------

    def views(self, now_ms: int) -> list[InstanceView]:
        return [each.view(now_ms) for each in self._all.values()]

    def check_invariants(self) -> None:
        for (role, address), each in self._all.items():
            assert (each.role, each.address) == (role, address)
            assert each.in_flight >= 0
            assert not each.draining or each.in_flight > 0, "a drained instance stays"
        for affinity in self._affinity.values():
            assert len(affinity) <= self._rules.affinity_blocks_max

    def _knows(self, instance: Instance) -> bool:
        return self._all.get((instance.role, instance.address)) is instance
