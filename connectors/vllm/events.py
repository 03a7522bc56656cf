"""KV events: which blocks of this engine the store holds, and which it has lost.

The connector reports a block as stored when every worker has stored it. The store does not announce
evictions, so the connector checks reported blocks again from time to time, a few thousand at once,
and reports missing ones as removed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.messages import Run

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request

MEDIUM: Final = "kvstore"
AUDIT_KEYS: Final = 4_096
"""Keys per audit: two milliseconds of the master's time."""

AUDIT_EVERY_S: Final = 5.0
TOLD_MAX: Final = 1_000_000
"""Reported blocks that are remembered."""


class Events:
    """The events to report. For one thread only; the function ``audit`` may run on another one."""

    def __init__(self, groups: Groups, *, wanted: bool) -> None:
        self.wanted = wanted
        self._groups = groups
        self._told: OrderedDict[tuple[int, bytes], bytes] = OrderedDict()
        """By group and key: vLLM's hash. The block whose last audit is oldest comes first."""
        self._events: list[KVCacheEvent] = []
        self._audited = 0.0

    def tokens_of(self, request: Request, runs: Sequence[Run]) -> dict[int, list[int]]:
        """The token ids of each run's blocks, by index of the run."""
        ids = request.all_token_ids
        tokens = {}
        for index, run in enumerate(runs):
            size = self._groups.block_tokens[run.group]
            tokens[index] = list(ids[run.first * size : (run.first + len(run.keys)) * size])
        return tokens

    def stored(
        self, runs: Sequence[Run], tokens: dict[int, list[int]], lora: str | None,
        plain: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """
        Args:
            plain: vLLM's hashes, by key, of keys that are different from them.
        """
        if not self.wanted:
            return
        from vllm.distributed.kv_events import BlockStored

        for index, run in enumerate(runs):
            hashes = [plain.get(key, key) for key in run.keys]
            parent = None if run.parent is None else plain.get(run.parent, run.parent)
            for key, block_hash in zip(run.keys, hashes, strict=True):
                self._told[run.group, key] = block_hash
            self._events.append(
                BlockStored(
                    block_hashes=hashes, parent_block_hash=parent,
                    token_ids=tokens.get(index, []),
                    block_size=self._groups.block_tokens[run.group],
                    lora_id=None, lora_name=lora, medium=MEDIUM, group_idx=run.group,
                )
            )  # fmt: skip
        while len(self._told) > TOLD_MAX:
            self._told.popitem(last=False)

    def to_audit(self, now: float) -> list[tuple[int, bytes]]:
        """The blocks to audit now: those whose last audit is oldest."""
        if not self.wanted or not self._told or now - self._audited < AUDIT_EVERY_S:
            return []
        self._audited = now
        chosen = []
        for _ in range(min(AUDIT_KEYS, len(self._told))):
            told, block_hash = self._told.popitem(last=False)
            self._told[told] = block_hash
            chosen.append(told)
        return chosen

    def gone(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Reports that the store has lost these blocks."""
        from vllm.distributed.kv_events import BlockRemoved

        by_group: dict[int, list[bytes]] = {}
        for group, key in blocks:
            if (block_hash := self._told.pop((group, key), None)) is not None:
                by_group.setdefault(group, []).append(block_hash)
        for group, keys in by_group.items():
            self._events.append(BlockRemoved(block_hashes=keys, medium=MEDIUM, group_idx=group))

    def cleared(self) -> None:
        """Reports that the store has lost all blocks of this model."""
        self.gone(list(self._told))

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events


Exists = Callable[[Sequence[bytes], str], Sequence[bool]]


def audit(
    blocks: Sequence[tuple[int, bytes]], namespaces: dict[int, list[str]], exists: Exists
) -> list[tuple[int, bytes]]:
    """The blocks of which the store lacks some worker's part. Raises KVStoreError."""
    gone = []
    for group in {group for group, _ in blocks}:
        keys = [key for each, key in blocks if each == group]
        there = [True] * len(keys)
        for namespace in namespaces[group]:
            found = exists(keys, namespace)
            there = [a and b for a, b in zip(there, found, strict=True)]
        gone += [(group, key) for key, is_there in zip(keys, there, strict=True) if not is_there]
    return gone
