"""KV cache groups as the store sees them: which blocks make up how many tokens of a prompt.

Layers with one kind of attention share a *group* and its block table. Every group has its own block
size, a multiple of the *hash block* for which request hashes are computed. A block's key is the
hash at its end, which covers everything before it as well. All full blocks of attention groups are
stored, as chains.

A block of a *recurrent* group (Mamba, gated delta nets and their like) is the layers' *state* after
its last token. To go on from a prefix of n tokens an engine needs the state at n, and none before
it. vLLM keeps few states and offers each once, when a request reaches it. So a prefix of n tokens
is stored when each chain reaches n and each recurrent group has a state at n.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kvstore.connectors.vllm.messages import Run

NULL_BLOCK = 0
"""Entry of a block table without memory: a sliding-window layer's window has passed the block."""


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The groups of one model that can be stored by hash."""

    hash_block_tokens: int
    scheduler_block_tokens: int
    """Tokens of vLLM's scheduler block: the least common multiple of the groups' block sizes. A hit
    ends at a multiple of it."""
    block_tokens: dict[int, int]
    """Tokens per block, by id of the KV cache group."""
    recurrent: frozenset[int] = frozenset()
    """Ids of the recurrent groups."""

    def __post_init__(self) -> None:
        for group, tokens in self.block_tokens.items():
            assert tokens % self.hash_block_tokens == 0, f"group {group}: {tokens}"
            assert self.scheduler_block_tokens % tokens == 0, f"group {group}: {tokens}"

    @cached_property
    def chains(self) -> dict[int, int]:
        """Tokens per block of the groups whose blocks are chains."""
        sizes = self.block_tokens.items()
        return {group: size for group, size in sizes if group not in self.recurrent}

    def keys(self, group: int, hashes: Sequence[bytes]) -> list[bytes]:
        """The keys of a group's full blocks, from the hashes of all hash blocks."""
        step = self.block_tokens[group] // self.hash_block_tokens
        return [bytes(each) for each in hashes[step - 1 :: step]]

    def state_keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        """The keys of the states at which a hit may end, from the hashes of all hash blocks."""
        step = self.scheduler_block_tokens // self.hash_block_tokens
        return [bytes(each) for each in hashes[step - 1 :: step]]

    def tips(self, hashes: Sequence[bytes], tokens: int) -> dict[int, bytes]:
        """By group: the key of the last block of the first ``tokens`` tokens, or the state's.

        Args:
            tokens: a positive multiple of the scheduler block.
        """
        return dict.fromkeys(self.block_tokens, bytes(hashes[tokens // self.hash_block_tokens - 1]))

    def aligned(self, tokens: int) -> int:
        """``tokens``, rounded down to whole scheduler blocks."""
        return tokens - tokens % self.scheduler_block_tokens

    def runs(
        self, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]],
        first: dict[int, int], tokens: int,
    ) -> Iterator[Run]:  # fmt: skip
        """The blocks of chains of the first ``tokens`` tokens, in contiguous runs, without null
        blocks.

        Args:
            hashes: the request's hashes.
            block_ids: the request's block table, by group id.
            first: index of the first wanted block, by group id.
        """
        for group, block_tokens in self.chains.items():
            keys = self.keys(group, hashes[: tokens // self.hash_block_tokens])
            table = block_ids[group]
            end = min(tokens // block_tokens, len(keys), len(table))
            start = first.get(group, 0)
            while start < end:
                if table[start] == NULL_BLOCK:
                    start += 1
                    continue
                stop = start
                while stop < end and table[stop] != NULL_BLOCK:
                    stop += 1
                parent = keys[start - 1] if start else None
                yield Run(group, keys[start:stop], list(table[start:stop]), start, parent)
                start = stop

    def states(
        self, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]], tokens: int
    ) -> list[Run]:
        """The blocks of the states at ``tokens`` tokens, one run for each recurrent group. Args as
        for ``runs``."""
        blocks = {
            group: block_ids[group][tokens // self.block_tokens[group] - 1]
            for group in sorted(self.recurrent)
        }
        return [self.state(hashes, group, block, tokens) for group, block in blocks.items()]

    def state(self, hashes: Sequence[bytes], group: int, block_id: int, tokens: int) -> Run:
        """The run of the state at ``tokens`` tokens, which is in this block."""
        key = bytes(hashes[tokens // self.hash_block_tokens - 1])
        return Run(group, [key], [block_id], tokens // self.block_tokens[group] - 1, None)
