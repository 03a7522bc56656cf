"""Live what-if: what other sizes of the pool and other policies would find, from a sample.

``kvstore-master --what-if`` starts this as a child process, with the paths of policies as
arguments, the present one first. It reads the rows of ``RequestRecorder`` and ``{"m": bytes of the
pool}`` from standard input, until its end, and writes ``[[policy, bytes, found per million], ...]``
as lines of JSON. It samples blocks by hash (SHARDS, Waldspurger et al., FAST 2015), and keeps a
shadow of the pool per size and policy, in which the master's own policies evict. An estimate is
what the master really found, plus the difference between its shadow and that of the present pool.
Leases, pins, tenants, replicas and hints are not in the shadows.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import Any, Final

from kvstore.limits import Key, Namespace
from kvstore.master.state.candidates import CandidateQueue
from kvstore.master.state.eviction import NewPolicy
from kvstore.master.state.records import HIT_GAP_MS, ObjectRecord
from kvstore.planner.traces import REPEAT_MS

QUARTERS: Final = 1, 2, 4, 8, 16, 32
"""Sizes of the pool, in quarters of the present one."""

PRESENT: Final = 4

SAMPLED_BLOCKS: Final = 1_024
"""Blocks of the present pool in the sample."""

HASH_BITS: Final = 24

HALF_LIFE_MS: Final = 1_800_000
"""Age at which a request counts half."""

REPORT_S: Final = 5.0

CHAINS_REMEMBERED: Final = 4_096
"""Chains that are not counted again when they are asked for again at once."""


class Shadow:
    """The sampled blocks of a pool, under one policy."""

    def __init__(self, new_policy: NewPolicy, blocks: int) -> None:
        self.found = 0.0
        self._blocks = max(1, blocks)
        self._policy = new_policy(1)
        self._queue = CandidateQueue(self._policy, None, Counter())
        self._stored: dict[Key, ObjectRecord] = {}

    def use(self, now_ms: int, namespace: Namespace, chain: Sequence[Key]) -> None:
        """Find the blocks of a chain up to the first missing one, and store the others."""
        above: ObjectRecord | None = None
        tip: ObjectRecord | None = None
        for key in chain:
            record = self._stored.get(key)
            if record is None:
                record = self._stored[key] = ObjectRecord(namespace, key)
                record.last_used_ms = now_ms
                record.parent = above
                if above is not None:
                    if above.queue:
                        self._queue.discard(above)
                        above.queue = 0
                    above.children += 1
                self._add(record)
            else:
                self.found += 1
                tip = record
            above = record
        if tip is not None:  # a match marks only the last block that it finds
            if self._policy.learns_uses and now_ms - tip.last_used_ms >= HIT_GAP_MS:
                self._policy.used(tip, now_ms)
            tip.last_used_ms = now_ms
        while len(self._stored) > self._blocks:
            self._evict(now_ms)

    def _evict(self, now_ms: int) -> None:
        record = self._queue.peek(now_ms)
        while record is None:  # it has moved the candidates that were used since
            record = self._queue.peek(now_ms)
        self._queue.discard(record, evicted=True)
        del self._stored[record.key]
        above = record.parent
        if above is not None:
            above.children -= 1
            above.last_used_ms = max(above.last_used_ms, record.last_used_ms)
            if not above.children:
                self._add(above)

    def _add(self, record: ObjectRecord) -> None:
        record.queue = 1
        self._queue.add(record)


class WhatIf:
    """The shadows of one pool. It starts again when the size of the pool changes."""

    def __init__(self, policies: dict[str, Callable[[], NewPolicy]]) -> None:
        """``policies``: by name, the present one first."""
        self._policies = policies
        self._memory = 0
        self._bound = 0
        self._shadows: dict[tuple[str, int], Shadow] = {}
        """By policy and quarters of the present size."""
        self._asked = self._found = self._sampled = 0.0
        self._halved_ms = 0
        self._last_ms: dict[str, int] = {}

    def add(self, row: dict[str, Any]) -> None:
        """Count a row of ``RequestRecorder``."""
        if "m" in row:
            self._memory, self._shadows = row["m"], {}
        elif row.get("z") and self._memory:
            self._add_request(row["t"], row["n"][0], row["k"], row["z"] * len(row["n"]), row["f"])

    def _add_request(
        self, now_ms: int, namespace: Namespace, keys: list[str], size: int, found: int
    ) -> None:
        if not self._shadows:
            self._begin(now_ms, self._memory // size)
        if now_ms - self._last_ms.get(keys[-1], -REPEAT_MS) < REPEAT_MS:
            return
        self._last_ms.pop(keys[-1], None)
        self._last_ms[keys[-1]] = now_ms
        if len(self._last_ms) > CHAINS_REMEMBERED:
            del self._last_ms[next(iter(self._last_ms))]
        if now_ms - self._halved_ms > HALF_LIFE_MS:
            self._halved_ms = now_ms
            self._asked, self._found, self._sampled = (
                self._asked / 2, self._found / 2, self._sampled / 2,
            )  # fmt: skip
            for shadow in self._shadows.values():
                shadow.found /= 2
        names = [key.encode() for key in keys]
        chain = [Key(name) for name in names if zlib.crc32(name) >> 8 < self._bound]
        self._asked += len(keys)
        self._found += found
        self._sampled += len(chain)
        if chain:
            for shadow in self._shadows.values():
                shadow.use(now_ms, namespace, chain)

    def _begin(self, now_ms: int, blocks: int) -> None:
        rate = min(1.0, SAMPLED_BLOCKS / max(1, blocks))
        self._bound = int(rate * (1 << HASH_BITS))
        present, *others = self._policies
        cells = [(present, quarters) for quarters in QUARTERS]
        cells += [(policy, PRESENT) for policy in others]
        self._shadows = {
            (policy, quarters): Shadow(
                self._policies[policy](), round(rate * blocks * quarters / PRESENT)
            )
            for policy, quarters in cells
        }
        self._asked = self._found = self._sampled = 0.0
        self._halved_ms = now_ms

    def estimates(self) -> list[tuple[str, int, int]]:
        """Return policies, bytes of memory, and blocks found per million. Empty: too few
        requests."""
        expected = self._asked * self._bound / (1 << HASH_BITS)
        if expected < SAMPLED_BLOCKS:
            return []
        # What is in the sample too often was found too often (SHARDS).
        surplus = self._sampled - expected
        ratios = {
            cell: (shadow.found - surplus) / expected for cell, shadow in self._shadows.items()
        }
        anchor = self._found / self._asked - ratios[next(iter(self._policies)), PRESENT]
        return [
            (policy, self._memory * quarters // PRESENT,
             round(1e6 * min(1.0, max(0.0, ratio + anchor))))
            for (policy, quarters), ratio in ratios.items()
        ]  # fmt: skip


def main(paths: Sequence[str]) -> int:
    """``paths``: ``NAME=MODULE:FUNCTION`` of each policy."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the master, and with it the input
    os.nice(10)
    named = dict(path.split("=", 1) for path in paths)
    what_if = WhatIf({name: resolve_name(path) for name, path in named.items()})
    reported = time.monotonic()
    for line in sys.stdin.buffer:
        what_if.add(json.loads(line))
        if time.monotonic() - reported >= REPORT_S:
            reported = time.monotonic()
            sys.stdout.write(json.dumps(what_if.estimates()) + "\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
