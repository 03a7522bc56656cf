"""KV events: the blocks of the store that this engine can load, and those that the store has lost.

They carry vLLM's fields for a shared tier, so that a router credits them to the store and not to
the engine's memory. The connector reports a block as stored when every worker has stored it, or
when a lookup found it, also after a restart of the engine. When vLLM has reported
``AllBlocksCleared``, it reports the last ``REPEATED_MAX`` blocks again. It reports a block as
removed when the store replies that some worker's part is missing. Such a query is an *audit*:

* While the connector receives the store's own events, it audits a block once after it was reported,
  and once after an event that a part of it was removed; and all blocks after missed events. An
  event alone is no proof, because a later put may have stored the block again.
* Otherwise it audits all blocks repeatedly, a few thousand every 5 s.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from kvstore.connectors.vllm.groups import Groups
from kvstore.connectors.vllm.messages import Run

if TYPE_CHECKING:
    from vllm.distributed.kv_events import BlockStored, KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.request import Request

OWNERSHIP: Final = "kvstore"
SHARED_TIER: Final = {"medium": "STORAGE", "locality": "REMOTE", "ownership": OWNERSHIP}
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

REPEATED_MAX: Final = 65_536
"""Blocks whose events are kept for ``AllBlocksCleared``, about 1 KiB each with 16 tokens."""

REPEATED_PER_STEP: Final = 4_096


Block = tuple[int, bytes]
"""Group and key."""


class BlockEvents:
    """The events to report. For one thread only; the function ``audit`` may run on another one."""

    def __init__(self, groups: Groups, *, wanted: bool) -> None:
        self.wanted = wanted
        self._groups = groups
        self._sure: OrderedDict[Block, Sequence[bytes]] = OrderedDict()
        """Reported objects and vLLM's hashes of their blocks; the oldest audit comes first."""
        self._unsure: OrderedDict[Block, Sequence[bytes]] = OrderedDict()
        """As ``_sure``, for blocks that may have been removed since their audit; audited first."""
        self._events: list[KVCacheEvent] = []
        self._kept: OrderedDict[Block, tuple[int, Block | None, BlockStored]] = OrderedDict()
        """Depth, parent and event of the blocks reported last."""
        self._to_repeat: list[Block] = []
        """Blocks to report again, the deepest first."""
        self._pool: BlockPool | None = None
        self._cached: object = None
        self._audited = 0.0
        self._audited_keys = 0

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._pool, self._cached = pool, pool.cached_block_hash_to_block

    def tokens_of(self, request: Request, runs: Sequence[Run]) -> dict[int, list[int]]:
        """Return the token ids of each run's blocks, by index of the run."""
        ids = request.all_token_ids
        tokens = {}
        for index, run in enumerate(runs):
            size = self._groups.tokens_each(run)
            tokens[index] = list(ids[run.first * size : (run.first + len(run.keys)) * size])
        return tokens

    def stored(
        self, runs: Sequence[Run], tokens: dict[int, list[int]], lora: str | None,
        plain: Mapping[bytes, Sequence[bytes]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Report blocks that every worker has stored.

        ``plain``: vLLM's hashes of the blocks of an object, by its key; without: the key.
        """
        if not self.wanted:
            return
        from vllm.distributed.kv_events import BlockStored

        for index, run in enumerate(runs):
            hashes = [plain.get(key, (key,)) for key in run.keys]
            parent = None if run.parent is None else plain.get(run.parent, (run.parent,))[-1]
            size, ids = self._groups.tokens_each(run), tokens.get(index, [])
            event = partial(
                BlockStored, block_size=size // run.each, lora_id=None, lora_name=lora,
                group_idx=run.group, **SHARED_TIER,
            )  # fmt: skip
            self._events.append(event(list(chain.from_iterable(hashes)), parent, ids))
            above = None if run.parent is None else (run.group, run.parent)
            for number, (key, of_object) in enumerate(zip(run.keys, hashes, strict=True)):
                block = run.group, key
                self._sure.pop(block, None)
                self._unsure[block] = of_object
                one = event(list(of_object), parent, ids[number * size : (number + 1) * size])
                self._kept.pop(block, None)
                self._kept[block] = (run.first + number) * size, above, one
                above, parent = block, of_object[-1]
        while len(self._kept) > REPEATED_MAX:
            self._kept.popitem(last=False)
        while len(self._sure) + len(self._unsure) > REPORTED_MAX:
            (self._sure or self._unsure).popitem(last=False)

    def is_reported(self, block: Block) -> bool:
        return block in self._sure or block in self._unsure

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
                by_group.setdefault(group, []).extend(block_hash)
        for group, keys in by_group.items():
            self._events.append(BlockRemoved(keys, group_idx=group, **SHARED_TIER))

    def cleared(self) -> None:
        """Report that the store has lost all blocks of this model."""
        self._sure.update(self._unsure)
        self._unsure.clear()
        self.removed(list(self._sure))

    def take(self) -> list[KVCacheEvent]:
        """Return the new events. vLLM has taken its own for the same batch, which come first."""
        if self._pool is not None and self._cached is not self._pool.cached_block_hash_to_block:
            self._cached = self._pool.cached_block_hash_to_block  # replaced by AllBlocksCleared
            self._to_repeat = self._repeatable()
        events, self._events = self._events, []
        for block in reversed(self._to_repeat[-REPEATED_PER_STEP:]):
            if self.is_reported(block) and block in self._kept:
                events.append(self._kept[block][2])
        del self._to_repeat[-REPEATED_PER_STEP:]
        return events

    def _repeatable(self) -> list[Block]:
        """Return the reported blocks whose ancestors are all kept, the deepest first."""
        found: dict[Block, None] = {}
        for block, (_, parent, _) in sorted(self._kept.items(), key=lambda item: item[1][0]):
            if self.is_reported(block) and (parent is None or parent in found):
                found[block] = None
        return list(found)[::-1]


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
