"""Judges, by the workers' journals alone, whether calls returned what they may return.

The checker knows nothing of masters, leases or memory, only of calls with a beginning and an end:

* A get returns a version that was put under that key, in a put that had begun by then.
* A get does not return a version that was removed, cleared or overwritten, if the version's put had
  ended before that began, and the get began after that was acknowledged. Restarts change nothing.
* A key that is reported as present has a version that is not gone in that sense.

A put without a good end (an error, a killed process, FOUND) may have happened, at any time after
it began: its version is *doubtful*, and is never called gone. Two cases that
docs/decisions/removals.md allows are counted, and are no violations. Memory that was away during a
removal, and joins the next master before all others, can show the object until the first of the
others has joined. And a client with a lease of an earlier master may read the memory of a node that
died before it joined the next one.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

COPIES_WAIT_S: Final = 6.0
"""After a master took over, or memory came back: until all that is there has joined."""

RETURNED: Final = "memory that was away showed what was removed"

Name = tuple[str, str]
"""Namespace, and the key in hexadecimal."""


class Violation(NamedTuple):
    rule: str
    at: float
    worker: int
    detail: str


@dataclass(slots=True)
class Put:
    """One version."""

    name: Name
    begun: float
    overwrite: bool
    ended: float | None = None
    stored: bool = False
    last_got: float = 0.0
    """When the last get that returned it began."""


@dataclass(slots=True)
class AcknowledgedRemovals:
    """Acknowledged ends of what was there before, by when they were acknowledged."""

    ended: list[float] = field(default_factory=list)
    what: list[tuple[float, str]] = field(default_factory=list)
    """When it began, and what it was."""
    latest: list[float] = field(default_factory=list)
    """The latest beginning of all up to here."""

    def add(self, began: float, ended: float, verb: str) -> None:
        at = bisect.bisect_right(self.ended, ended)
        self.ended.insert(at, ended)
        self.what.insert(at, (began, verb))
        before = self.latest[at - 1] if at else 0.0
        self.latest[at:] = []
        for began, _ in self.what[at:]:
            before = max(before, began)
            self.latest.append(before)

    def after(self, put_ended: float, by: float) -> tuple[float, float, str] | None:
        """One that began after a put had ended and was acknowledged by then: (began, ended, what).
        The first of them, so that what is said of it is the strongest."""
        at = bisect.bisect_left(self.ended, by)
        if not at or self.latest[at - 1] <= put_ended:
            return None
        first = bisect.bisect_right(self.latest, put_ended, 0, at)
        began, verb = self.what[first]
        return began, self.ended[first], verb


class Checker:
    """Feed it journals with ``take``, and what was done to the cluster; ask for ``violations``."""

    def __init__(self) -> None:
        self.violations: list[Violation] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.notes: Counter[str] = Counter()
        """What is allowed, and rare enough to be of interest."""
        self._puts: dict[int, Put] = {}
        self._of_name: defaultdict[Name, list[int]] = defaultdict(list)
        self._ends: defaultdict[Name, AcknowledgedRemovals] = defaultdict(AcknowledgedRemovals)
        self._cleared: defaultdict[str, AcknowledgedRemovals] = defaultdict(AcknowledgedRemovals)
        self._away: list[list[float]] = []
        self._led: list[float] = []
        self._told: set[tuple[str, int]] = set()
        self._found: list[tuple[int, list[Any]]] = []
        """Lines of the last reading that are not judged yet."""

    # --- what was done ------------------------------------------------------------------------

    def away(self, since: float, until: float) -> None:
        """Some node could not be reached by its master, or was not there, from then to then."""
        self._away.append([since, until])

    def led(self, at: float) -> None:
        """Some master was killed, stopped or cut off, so that another may have taken over."""
        self._led.append(at)

    # --- what was said ------------------------------------------------------------------------

    def take(self, lines: Iterable[tuple[int, list[Any]]]) -> None:
        """Journal lines of one reading. What was found is judged with the next one: journals are
        read one after the other, and that of its put may have been read before it was put."""
        found, self._found = self._found, []
        for worker, line in lines:
            kind, rest = line[0], line[1:]
            if kind == "put":
                version, namespace, key, at, overwrite = rest
                self._puts[version] = Put((namespace, key), at, overwrite)
                self._of_name[namespace, key].append(version)
            elif kind == "done":
                self._done(*rest)
            elif kind == "gone":
                namespace, key, began, ended, verb = rest
                ends = self._cleared[namespace] if key is None else self._ends[namespace, key]
                ends.add(began, ended, verb)
            elif kind == "count":
                verb, outcome, number = rest
                self.counts[verb, outcome] += number
            elif kind == "broke":
                rule, detail, at = rest
                self.violations.append(Violation(rule, at, worker, detail))
            else:
                self._found.append((worker, line))
        for worker, (kind, *rest) in found:
            if kind == "got":
                self._got(worker, *rest)
            else:
                self._there(worker, *rest)

    def finish(self) -> None:
        """Judge once more with all that is known now: ends may be told later than gets."""
        self.take([])
        for version, put in self._puts.items():
            if put.last_got:
                self._judge(version, put, put.last_got, 0, "get")

    # --- rules --------------------------------------------------------------------------------

    def _done(self, version: int, at: float, outcome: str) -> None:
        put = self._puts[version]
        put.ended, put.stored = at, outcome == "stored"
        if put.stored and put.overwrite:
            self._ends[put.name].add(put.begun, at, "overwritten")

    def _got(
        self, worker: int, namespace: str, key: str, version: int, began: float, ended: float,
        verb: str,
    ) -> None:  # fmt: skip
        put = self._puts.get(version)
        if put is None or put.name != (namespace, key):
            whose = "nobody's" if put is None else f"of {put.name}"
            self._broken("unknown_version", ended, worker, f"{verb} of {namespace}/{key} returned "
                         f"version {version:x}, which is {whose}")  # fmt: skip
            return
        if put.begun > ended:
            self._broken("too_early", ended, worker, f"{verb} of {namespace}/{key} returned "
                         f"{version:x} before its put began")  # fmt: skip
        put.last_got = max(put.last_got, began)
        self._judge(version, put, began, worker, verb)

    def _judge(self, version: int, put: Put, began: float, worker: int, verb: str) -> None:
        end = self._gone(put, began)
        if end is None:
            return
        removed, acknowledged, how = end
        if not put.stored:
            self.notes["a version in doubt was found after a removal"] += 1
            return
        if self._may_return(removed, acknowledged, began):
            self.notes[RETURNED] += 1
            return
        if ("gone_read", version) not in self._told:
            self._told.add(("gone_read", version))
            rule = "replaced_read" if how == "overwritten" else "removed_read"
            self._broken(rule, began, worker, f"{verb} of {put.name[0]}/{put.name[1]} returned "
                         f"{version:x}, put until {put.ended:.3f}, {how} from {removed:.3f} to "
                         f"{acknowledged:.3f}, by a call that began {began - acknowledged:.3f} s "
                         f"later, at {began:.3f}")  # fmt: skip

    def _there(
        self, worker: int, namespace: str, key: str, began: float, ended: float, verb: str
    ) -> None:
        ends: list[tuple[float, float, str]] = []
        for version in self._of_name.get((namespace, key), ()):
            put = self._puts[version]
            if put.begun > ended:
                continue
            end = self._gone(put, began) if put.stored else None
            if end is None:
                return
            ends.append(end)
        name = f"{namespace}/{key}"
        if not ends:
            self._broken("unknown_there", began, worker, f"{verb} found {name}, never put")
        elif any(self._may_return(end[0], end[1], began) for end in ends):
            self.notes[RETURNED] += 1
        elif ("gone_there", hash(name)) not in self._told:
            self._told.add(("gone_there", hash(name)))
            acknowledged, how = max((end[1], end[2]) for end in ends)
            self._broken("gone_there", began, worker, f"{verb} found {name}, which was {how} "
                         f"{began - acknowledged:.3f} s before")  # fmt: skip

    def _gone(self, put: Put, by: float) -> tuple[float, float, str] | None:
        if put.ended is None:
            return None
        for ends in (self._ends.get(put.name), self._cleared.get(put.name[0])):
            if ends is not None and (end := ends.after(put.ended, by)) is not None:
                return end
        return None

    def _may_return(self, began: float, acknowledged: float, read: float) -> bool:
        """Whether it may be read for a moment."""
        if not any(since <= acknowledged and until >= began - 1 for since, until in self._away):
            return False
        # A master before may have given leases on memory that the next one has never seen.
        changes = [at for at in self._led if began - COPIES_WAIT_S <= at <= read]
        back = [until for _, until in self._away if began <= until <= read]
        return bool(changes) and read <= max(changes + back) + COPIES_WAIT_S

    def _broken(self, rule: str, at: float, worker: int, detail: str) -> None:
        self.violations.append(Violation(rule, at, worker, detail))
