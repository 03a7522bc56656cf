"""The engines: their list, the state of each, and the choice of one for each request.

An instance is *usable* when it is healthy, not draining, and its breaker lets a request through.
The least busy usable instance is chosen; among equals, the least recently chosen one. When no
decoder is usable, requests go to unhealthy ones anyway (*forced*): a busy engine may be too slow
for health checks and still answer its requests, and no other engine can. A draining instance gets
no new requests, and is removed when its last request ends.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Final, Literal, NamedTuple, Self

from kvstore.proxy.affinity import PrefixAffinity, Prints
from kvstore.runtime.breaker import Breaker, BreakerState

log = logging.getLogger("kvstore.proxy")

Role = Literal["prefill", "decode"]
ROLES: Final[tuple[Role, ...]] = ("prefill", "decode")

HEALTH_FAILURES_MAX: Final = 2
"""Failed health checks in a row that make an instance unhealthy. A single one may be chance."""

REFUSALS_MAX: Final = 3
"""Failed connections in a row, within ``REFUSALS_MS``, that make an instance unhealthy."""

REFUSALS_MS: Final = 5_000

BREAKER_FAILURES = 5
"""Failed requests in a row after which an instance gets none for a while, even if its health checks
succeed."""

BREAKER_OPEN_MS = 5_000
"""Pause in which such an instance gets no requests; then one request tests it."""

AFFINITY_SLACK = 4
"""Number of requests by which the instance with the longest prefix may exceed the least busy one:
waiting for a few takes less time than loading a prefix."""


class InstanceView(NamedTuple):
    """One instance, as operators see it."""

    role: Role
    address: str
    healthy: bool
    draining: bool
    in_flight: int
    breaker: BreakerState


class Instance:
    """One engine in one role, and its state. An engine with both roles is two instances."""

    def __init__(self, role: Role, address: str, breaker: Breaker) -> None:
        self.role: Final = role
        self.address: Final = address
        self.breaker: Final = breaker
        self.healthy = False
        """False before the first health check."""
        self.draining = False
        self.in_flight = 0
        self.chosen = 0
        """Number of its last choice, counted over all instances; a smaller one is longer ago."""
        self.renders_from_ms = 0
        """Before this time the engine gets no render requests: it reported that it cannot."""
        self.refuses = False
        """Whether the last attempt to connect was refused: no process listens there."""
        self._health_failures = 0
        self._says_ill = False
        """Whether the engine itself reported a problem at its last health check."""
        self._answered_ms = 0
        self._asked_ms = 0
        self._asked_before_ms = 0
        self._unconnected: list[int] = []
        """Times of failed connections since the last answered request."""

    def on_request(self, now_ms: int) -> None:
        """Record the start of a health check."""
        self._asked_before_ms, self._asked_ms = self._asked_ms, now_ms

    def checked(self, outcome: str, reason: object = "") -> None:
        """Record the result of a health check. ``outcome``: ``well`` or ``ill``, as reported by the
        instance, or the ``EngineFailure``; ``reason``: for the log. A timeout does not count if the
        instance has answered a request since the previous check began: then it is only busy."""
        if outcome == "well":
            self._says_ill = self.refuses = False
            self._recover()
            return
        if outcome == "timeout":
            if self._answered_ms and self._answered_ms >= self._asked_before_ms:
                return
        else:
            self.refuses = outcome == "refused"
            self._says_ill |= outcome == "ill"
        self._health_failures += 1
        if self._health_failures >= HEALTH_FAILURES_MAX:
            self._fail(reason)

    def on_response(self, now_ms: int) -> None:
        """Record that the instance answers a request. This is as good as a passed health check,
        unless the instance itself has reported a problem."""
        self._answered_ms = now_ms
        self.refuses = False
        self._unconnected.clear()
        if not self._says_ill:
            self._recover()

    def on_connect_failed(self, now_ms: int, *, refused: bool, reason: object = "") -> None:
        """Record a failed connection (``refused``: no process listens there). Several in a row make
        the instance unhealthy; a single one may be chance."""
        self.refuses = refused
        recent = [at_ms for at_ms in self._unconnected if now_ms - at_ms < REFUSALS_MS]
        self._unconnected = [*recent, now_ms][-REFUSALS_MAX:]
        if len(self._unconnected) == REFUSALS_MAX:
            self._fail(reason)

    def _recover(self) -> None:
        if not self.healthy:
            log.info("instance_healthy role=%s instance=%s", self.role, self.address)
        self.healthy = True
        self._health_failures = 0

    def _fail(self, reason: object) -> None:
        if self.healthy:
            log.warning(
                "instance_unhealthy role=%s instance=%s reason=%s", self.role, self.address, reason
            )
        self.healthy = False

    def usable(self, now_ms: int) -> bool:
        return self.healthy and self.usable_ignoring_health(now_ms)

    def usable_ignoring_health(self, now_ms: int) -> bool:
        """Return whether the instance is usable, apart from its health."""
        return not self.draining and self.breaker.allows(now_ms)

    def view(self, now_ms: int) -> InstanceView:
        return InstanceView(
            self.role, self.address, self.healthy, self.draining, self.in_flight,
            self.breaker.state(now_ms),
        )  # fmt: skip


class InFlightRequest:
    """One request on one instance, which counts as in flight until the ``with`` block ends."""

    def __init__(
        self, instances: Instances, instance: Instance, now_ms: int, *, forced: bool
    ) -> None:
        """Internal: call ``Instances.choose`` instead."""
        self.instance: Final = instance
        self.forced: Final = forced
        """Whether the instance was chosen although it is unhealthy, because none is usable."""
        self._instances = instances
        self._undecided_probe = instance.breaker.begin(now_ms)
        instance.in_flight += 1

    def succeeded(self) -> None:
        """Record that the instance answers. ``failed`` may follow if its response ends too
        early."""
        self._undecided_probe = False
        self.instance.breaker.succeeded()

    def failed(self, now_ms: int) -> None:
        self._undecided_probe = False
        self.instance.breaker.failed(now_ms)

    @property
    def is_probe(self) -> bool:
        """Whether this request is the probe of a half open breaker, without a result so far."""
        return self._undecided_probe

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._undecided_probe:
            self.instance.breaker.on_abandoned()
        self.instance.in_flight -= 1
        self._instances.ended(self.instance)


class Instances:
    """All instances, and the choice among them. Times are milliseconds of any monotonic clock."""

    def __init__(self, *, prefix_affinity: bool = False) -> None:
        self._prefix_affinity = prefix_affinity
        self._all: dict[tuple[Role, str], Instance] = {}
        self._choices = 0
        self._affinity = {role: PrefixAffinity() for role in ROLES}

    def __iter__(self) -> Iterator[Instance]:
        return iter(list(self._all.values()))

    def of(self, role: Role) -> list[Instance]:
        return [instance for instance in self._all.values() if instance.role == role]

    def at(self, address: str, role: Role | None = None) -> list[Instance]:
        """Return the instances at an address, in one role or in any."""
        return [
            instance
            for instance in self._all.values()
            if instance.address == address and role in (None, instance.role)
        ]

    def add(self, role: Role, address: str) -> tuple[Instance, bool]:
        """Add an instance; return it, and whether it is new. A known one no longer drains."""
        known = self._all.get((role, address))
        if known is not None:
            known.draining = False
            return known, False
        breaker = Breaker(failures_max=BREAKER_FAILURES, open_for=BREAKER_OPEN_MS)
        instance = self._all[role, address] = Instance(role, address, breaker)
        return instance, True

    def drain(self, instance: Instance) -> None:
        """Stop new requests to the instance, and remove it as soon as it has none in flight."""
        instance.draining = True
        self.ended(instance)

    def remove(self, instance: Instance) -> None:
        """Remove the instance. Its running requests continue."""
        instance.draining = True
        self._all.pop((instance.role, instance.address), None)

    def ended(self, instance: Instance) -> None:
        """Record the end of a request on the instance."""
        known = self._all.get((instance.role, instance.address))
        if instance.draining and not instance.in_flight and known is instance:
            self.remove(instance)

    def usable(self, role: Role, now_ms: int, *, without: Collection[str] = ()) -> list[Instance]:
        return [
            instance
            for instance in self.of(role)
            if instance.address not in without and instance.usable(now_ms)
        ]

    def last_resort(
        self, role: Role, now_ms: int, *, without: Collection[str] = ()
    ) -> list[Instance]:
        """Return unhealthy decoders for requests, because no decoder is usable.

        There are no such prefillers, because a decoder can do their work.
        """
        if role == "prefill" or self.usable(role, now_ms):
            return []
        return [
            instance
            for instance in self.of(role)
            if instance.address not in without and instance.usable_ignoring_health(now_ms)
        ]

    def choose(
        self, role: Role, now_ms: int, *, without: Collection[str] = (), prints: Prints = ()
    ) -> InFlightRequest | None:
        """Choose an instance; None if none is usable, not even as a last resort.

        Args:
            without: addresses that have already been tried for this request.
            prints: fingerprints of the prompt, for affinity.
        """
        usable = self.usable(role, now_ms, without=without)
        forced = not usable
        if forced:
            usable = self.last_resort(role, now_ms, without=without)
        if not usable:
            return None
        chosen = least = min(usable, key=lambda each: (each.in_flight, each.chosen))
        if self._prefix_affinity and prints:
            affinity = self._affinity[role]
            by_address = {each.address: each for each in usable}
            address = affinity.longest(prints, by_address)
            if address is not None:
                preferred = by_address[address]
                if preferred.in_flight - least.in_flight <= AFFINITY_SLACK:
                    chosen = preferred
            affinity.remember(prints, chosen.address)
        self._choices += 1
        chosen.chosen = self._choices
        return InFlightRequest(self, chosen, now_ms, forced=forced)

    def views(self, now_ms: int) -> list[InstanceView]:
        return [instance.view(now_ms) for instance in self._all.values()]
