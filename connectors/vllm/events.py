"""KV events: which blocks of this engine the store has, and which it has no more.

Stored is told when every worker has stored a block. Removed is found out: the store evicts on its
own and tells nobody, so what was told is asked about again now and then, a few thousand at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.messages import Run

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

MEDIUM: Final = "kvstore"
AUDIT_KEYS: Final = 4_096
"""Asked about at once: two milliseconds of the master."""

AUDIT_EVERY_S: Final = 5.0
TOLD_MAX: Final = 1_000_000
"""Blocks that are remembered as told."""


class Events:
    """Not for several threads; ``audit`` only builds a list and takes one."""

    def __init__(self, groups: Groups, *, wanted: bool) -> None:
        self.wanted = wanted
        self._groups = groups
        self._told: OrderedDict[tuple[int, bytes], None] = OrderedDict()
        """Oldest question first."""
        self._events: list[KVCacheEvent] = []
        self._audited = 0.0

    def tokens_of(self, request: Request, runs: Sequence[Run]) -> dict[int, list[int]]:
        """By index of the run: the token ids of its blocks."""
        ids = request.all_token_ids
        tokens = {}
        for index, run in enumerate(runs):
            size = self._groups.block_tokens[run.group]
            tokens[index] = list(ids[run.first * size : (run.first + len(run.keys)) * size])
        return tokens

    def stored(self, runs: Sequence[Run], tokens: dict[int, list[int]], lora: str | None) -> None:
        if not self.wanted:
            return
        from vllm.distributed.kv_events import BlockStored

        for index, run in enumerate(runs):
            for key in run.keys:
                self._told[run.group, key] = None
            self._events.append(
                BlockStored(
                    block_hashes=list(run.keys), parent_block_hash=run.parent,
                    token_ids=tokens.get(index, []),
                    block_size=self._groups.block_tokens[run.group],
                    lora_id=None, lora_name=lora, medium=MEDIUM, group_idx=run.group,
                )
            )  # fmt: skip
        while len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)

    def to_audit(self, now: float) -> list[tuple[int, bytes]]:
        """Blocks to be asked about now; those that were not for longest."""
        if not self.wanted or not self._told or now - self._audited < AUDIT_EVERY_S:
            return []
        self._audited = now
        chosen = []
        for _ in range(min(AUDIT_KEYS, len(self._told))):
            told, _ = self._told.popitem(last=False)
            self._told[told] = None
            chosen.append(told)
        return chosen

    def gone(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """The store has them no more."""
        from vllm.distributed.kv_events import BlockRemoved

        by_group: dict[int, list[bytes]] = {}
        for group, key in blocks:
            if (group, key) in self._told:
                del self._told[group, key]
                by_group.setdefault(group, []).append(key)
        for group, keys in by_group.items():
            self._events.append(BlockRemoved(block_hashes=keys, medium=MEDIUM, group_idx=group))

    def cleared(self) -> None:
        """The store has none of this model any more."""
        self.gone(list(self._told))

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events


Exists = Callable[[Sequence[bytes], str], Sequence[bool]]


def audit(
    blocks: Sequence[tuple[int, bytes]], namespaces: dict[int, list[str]], exists: Exists
) -> list[tuple[int, bytes]]:
    """Which of these blocks some worker's part is missing of. Raises KVStoreError."""
    gone = []
    for group in {group for group, _ in blocks}:
        keys = [key for each, key in blocks if each == group]
        there = [True] * len(keys)
        for namespace in namespaces[group]:
            found = exists(keys, namespace)
            there = [a and b for a, b in zip(there, found, strict=True)]
        gone += [(group, key) for key, is_there in zip(keys, there, strict=True) if not is_there]
    return gone
