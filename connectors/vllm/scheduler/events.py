"""KV events: the blocks of this engine that the store has stored or lost.

The connector reports a block as stored when every worker has stored it, and as removed when the
store replies that some worker's part is missing. Such a query is an *audit*:

* While the connector receives the store's own events, it audits a block once after it was reported,
  and once after an event that a part of it was removed; and all blocks after missed events. An
  event alone is no proof, because a later put may have stored the block again.
* Otherwise it audits all blocks repeatedly, a few thousand every 5 s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
"""Pause between two audits while no events are received."""

AUDIT_SOON_S: Final = 0.05
AUDIT_FULL_S: Final = 1.0
"""Pause while events are received: ``AUDIT_FULL_S`` after an audit of ``AUDIT_KEYS`` blocks, less
in proportion after fewer, at least ``AUDIT_SOON_S``."""

REPORTED_MAX: Final = 1_000_000
"""Reported blocks that are remembered. The others are never reported as removed."""


Block = tuple[int, bytes]
"""Group and key."""


class BlockEvents:
    """The events to report. For one thread only; the function ``audit`` may run on another one."""

    def __init__(self, groups: Groups, *, wanted: bool) -> None:
        self.wanted = wanted
        self._groups = groups
        self._sure: OrderedDict[Block, bytes] = OrderedDict()
        """Reported blocks and vLLM's hash of each; the one with the oldest audit comes first."""
        self._unsure: OrderedDict[Block, bytes] = OrderedDict()
        """As ``_sure``, for blocks that may have been removed since their audit; audited first."""
        self._events: list[KVCacheEvent] = []
        self._audited = 0.0
        self._audited_keys = 0

    def tokens_of(self, request: Request, runs: Sequence[Run]) -> dict[int, list[int]]:
        """Return the token ids of each run's blocks, by index of the run."""
        ids = request.all_token_ids
        tokens = {}
        for index, run in enumerate(runs):
            size = self._groups.tokens_of(run.group)
            tokens[index] = list(ids[run.first * size : (run.first + len(run.keys)) * size])
        return tokens

    def stored(
        self, runs: Sequence[Run], tokens: dict[int, list[int]], lora: str | None,
        plain: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Report blocks that every worker has stored.

        ``plain``: vLLM's hash for each key that differs from it.
        """
        if not self.wanted:
            return
        from vllm.distributed.kv_events import BlockStored

        for index, run in enumerate(runs):
            hashes = [plain.get(key, key) for key in run.keys]
            parent = None if run.parent is None else plain.get(run.parent, run.parent)
            for key, block_hash in zip(run.keys, hashes, strict=True):
                self._sure.pop((run.group, key), None)
                self._unsure[run.group, key] = block_hash
            self._events.append(
                BlockStored(
                    block_hashes=hashes, parent_block_hash=parent,
                    token_ids=tokens.get(index, []),
                    block_size=self._groups.tokens_of(run.group),
                    lora_id=None, lora_name=lora, medium=MEDIUM, group_idx=run.group,
                )
            )  # fmt: skip
        while len(self._sure) + len(self._unsure) > REPORTED_MAX:
            (self._sure or self._unsure).popitem(last=False)

    def suspect(self, blocks: Iterable[Block]) -> None:
        """Schedule an audit of blocks that may have been removed. Ignores unreported blocks."""
        for block in blocks:
            if (block_hash := self._sure.pop(block, None)) is not None:
                self._unsure[block] = block_hash

    def suspect_all(self) -> None:
        """Schedule an audit of all blocks, after events were missed."""
        few, many = sorted((self._sure, self._unsure), key=len)
        many.update(few)
        few.clear()
        self._sure, self._unsure = few, many

    def to_audit(self, now: float, *, listening: bool = False) -> list[Block]:
        """Return the blocks to audit now. After the audit call ``removed``; if it failed,
        ``suspect``.

        Args:
            listening: whether events are received, so that only suspect blocks need an audit.
        """
        pause = AUDIT_EVERY_S
        if listening:
            pause = max(AUDIT_SOON_S, AUDIT_FULL_S * self._audited_keys / AUDIT_KEYS)
        count = len(self._unsure) + (0 if listening else len(self._sure))
        if not count or now - self._audited < pause:
            return []
        chosen = []
        for _ in range(min(AUDIT_KEYS, count)):
            block, block_hash = (self._unsure or self._sure).popitem(last=False)
            self._sure[block] = block_hash
            chosen.append(block)
        self._audited, self._audited_keys = now, len(chosen)
        return chosen

    def removed(self, blocks: Sequence[Block]) -> None:
        """Report audited blocks that the store has lost, except those that were stored again, or
        became suspect, since the audit began."""
        from vllm.distributed.kv_events import BlockRemoved

        by_group: dict[int, list[bytes]] = {}
        for group, key in blocks:
            if (block_hash := self._sure.pop((group, key), None)) is not None:
                by_group.setdefault(group, []).append(block_hash)
        for group, keys in by_group.items():
            self._events.append(BlockRemoved(block_hashes=keys, medium=MEDIUM, group_idx=group))

    def cleared(self) -> None:
        """Report that the store has lost all blocks of this model."""
        self._sure.update(self._unsure)
        self._unsure.clear()
        self.removed(list(self._sure))

    def take(self) -> list[KVCacheEvent]:
        events, self._events = self._events, []
        return events


Exists = Callable[[Sequence[bytes], str], Sequence[bool]]


def audit(blocks: Sequence[Block], namespaces: dict[int, list[str]], exists: Exists) -> list[Block]:
    """Return the blocks of which the store lacks some worker's part. Raises KVStoreError."""
    gone = []
    for group in {group for group, _ in blocks}:
        keys = [key for each, key in blocks if each == group]
        there = [True] * len(keys)
        for namespace in namespaces[group]:
            found = exists(keys, namespace)
            there = [a and b for a, b in zip(there, found, strict=True)]
        gone += [(group, key) for key, is_there in zip(keys, there, strict=True) if not is_there]
    return gone
