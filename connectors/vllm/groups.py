"""KV cache groups as the store sees them, and the tokens of their blocks.

Layers with one kind of attention share a *group* and its block table. A group's block size is a
multiple of the *hash block* for which request hashes are computed. A block's key is the hash at its
end, which covers all tokens before it. All full blocks of attention groups are stored, as chains.

With ``blocks_per_object`` several consecutive blocks are one object, whose key is the hash at its
end. The blocks after the last full object of a prompt are objects of their own. A load fills only
the blocks that an engine lacks, of the first and the last object, too.

A block of a *recurrent* group (Mamba, gated delta nets) is the layers' *state* after its last
token. To continue a prefix of n tokens an engine needs only the state at n. vLLM keeps few states
and offers each once, when a request reaches it.

Of a *window* group (sliding-window attention) an engine needs only the blocks of the window before
n. An engine that has a prompt in its own cache has no others either. These blocks are stored
without parents, so the store evicts those that no request needs.

So a prefix of n tokens is stored when each chain reaches n, each recurrent group has a state at n,
and each window group has the last window before n.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from math import gcd

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
    windows: dict[int, int] = field(default_factory=dict)
    """Tokens of the window, by id of the window group."""
    blocks_per_object: int = 1
    """More than 1 only with chains whose blocks are hash blocks and scheduler blocks."""

    def __post_init__(self) -> None:
        for group, tokens in self.block_tokens.items():
            assert tokens % self.hash_block_tokens == 0, f"group {group}: {tokens}"
            assert self.scheduler_block_tokens % tokens == 0, f"group {group}: {tokens}"
        if self.blocks_per_object > 1:
            assert not (self.recurrent | self.windows.keys())
            sizes = {*self.block_tokens.values(), self.hash_block_tokens}
            assert sizes == {self.scheduler_block_tokens}

    @cached_property
    def chains(self) -> dict[int, int]:
        """Tokens per object of the groups of which all blocks are saved: all but recurrent ones."""
        return {
            group: self.tokens_of(group)
            for group in self.block_tokens
            if group not in self.recurrent
        }

    def tokens_of(self, group: int) -> int:
        """Return the tokens per full object of any group."""
        return self.block_tokens[group] * self.blocks_per_object

    def tokens_each(self, run: Run) -> int:
        """Return the tokens per object of a run."""
        return self.block_tokens[run.group] * run.each

    def keys(self, group: int, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the keys of a group's full objects, from the hashes of all hash blocks."""
        step = self.tokens_of(group) // self.hash_block_tokens
        return [bytes(hash_) for hash_ in hashes[step - 1 :: step]]

    def chain_keys(self, group: int, hashes: Sequence[bytes], tokens: int) -> list[bytes]:
        """Return the keys of the objects of the first ``tokens`` tokens: full ones, then blocks."""
        keys = self.keys(group, hashes[: tokens // self.hash_block_tokens])
        if self.blocks_per_object > 1:
            rest = len(keys) * self.blocks_per_object
            keys += [bytes(each) for each in hashes[rest : tokens // self.hash_block_tokens]]
        return keys

    def state_keys(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the keys of the states at which a hit may end, from the hashes of all hash
        blocks."""
        step = self.scheduler_block_tokens // self.hash_block_tokens
        return [bytes(hash_) for hash_ in hashes[step - 1 :: step]]

    def last_keys(self, group: int, keys: Sequence[bytes]) -> Sequence[bytes]:
        """Return those of a group's leading ``keys`` that protect all that an engine needs: of a
        window group those of the last window, otherwise the last one."""
        blocks = -(-(self.windows.get(group, 0) - 1) // self.block_tokens[group])
        return keys[-max(1, blocks) :]

    def tips(self, hashes: Sequence[bytes], tokens: int) -> dict[int, Sequence[bytes]]:
        """Return by group the last keys of the first ``tokens`` tokens.

        Args:
            tokens: more than 0, as returned by ``aligned``.
        """
        return {
            each: self.last_keys(each, self.chain_keys(each, hashes, tokens))
            for each in self.block_tokens
        }

    def aligned(self, tokens: int) -> int:
        """Round ``tokens`` down to complete scheduler blocks."""
        return tokens - tokens % self.scheduler_block_tokens

    @property
    def full_tokens(self) -> int:
        """Tokens after which full objects of all groups end."""
        return self.scheduler_block_tokens * self.blocks_per_object

    @property
    def usual_hash_tokens(self) -> int:
        """The hash block that vLLM chooses for such blocks by default."""
        return gcd(*self.block_tokens.values())

    def objects(
        self, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]] | None,
        start: int, end: int, found: int,
    ) -> Iterator[Run]:  # fmt: skip
        """Yield the chain objects with the blocks of the tokens from ``start`` to ``end``, of which
        ``found`` are stored: full objects, then single blocks. Other args as for ``runs``."""
        yield from self.runs(hashes, block_ids, dict.fromkeys(self.chains, start), end, found)
        start = max(start, found - found % self.full_tokens)
        yield from self.runs(hashes, block_ids, dict.fromkeys(self.chains, start), end, end, each=1)

    def runs(
        self, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]] | None,
        start: Mapping[int, int], end: int, found: int, *, each: int = 0,
    ) -> Iterator[Run]:  # fmt: skip
        """Yield the chain objects with blocks of the tokens from ``start`` to ``end`` in contiguous
        runs. Other blocks of these objects are null, and objects of null blocks are left out.
        Those of windows come first, so that they are stored where a chain is found.

        Args:
            hashes: the request's hashes.
            block_ids: the request's block table, by group id; None: not needed.
            start: tokens, by group id.
            found: all objects end within as many tokens.
            each: blocks per object; 0: ``blocks_per_object``.
        """
        each = each or self.blocks_per_object
        for group in sorted(self.chains, key=lambda group: group not in self.windows):
            size = self.chains[group] // self.blocks_per_object * each
            step, unit = size // self.hash_block_tokens, size // each
            table = range(1, len(hashes) + 1) if block_ids is None else block_ids[group]
            wanted = range(start.get(group, 0) // unit, min(-(-end // unit), len(table)))
            first = wanted.start // each
            stop = min(-(-wanted.stop // each), found // size, len(hashes) // step)
            blocks = [
                table[place] if place in wanted else NULL_BLOCK
                for place in range(first * each, stop * each)
            ]
            filled = [any(blocks[place : place + each]) for place in range(0, len(blocks), each)]
            for is_filled, numbers in groupby(range(len(filled)), filled.__getitem__):
                if is_filled:
                    low, *more = numbers
                    some = blocks[low * each : (low + 1 + len(more)) * each]
                    low += first
                    keys = hashes[(low + 1) * step - 1 : (low + 1 + len(more)) * step : step]
                    parent = bytes(hashes[low * step - 1]) if low else None
                    yield Run(group, [bytes(hash_) for hash_ in keys], some, low, parent, each)

    def states(
        self, hashes: Sequence[bytes], block_ids: Sequence[Sequence[int]], tokens: int
    ) -> list[Run]:
        """Return the blocks of the states at ``tokens`` tokens, one run for each recurrent group.
        Other args as for ``runs``."""
        blocks = {
            group: block_ids[group][tokens // self.block_tokens[group] - 1]
            for group in sorted(self.recurrent)
        }
        return [self.state(hashes, group, block, tokens) for group, block in blocks.items()]

    def state(self, hashes: Sequence[bytes], group: int, block_id: int, tokens: int) -> Run:
        """Return the run of the state at ``tokens`` tokens, which is in this block."""
        key = bytes(hashes[tokens // self.hash_block_tokens - 1])
        return Run(group, [key], [block_id], tokens // self.block_tokens[group] - 1, None)
