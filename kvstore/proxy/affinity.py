"""Affinity: the instance that last computed or loaded a prefix of a prompt, and so caches it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Final

BLOCK_TOKENS: Final = 64
"""Prefixes are compared in units of this many tokens: a few blocks of an engine."""

BLOCKS_MAX: Final = 131_072
"""Remembered blocks, the latest ones: eight million tokens, some 20 MiB."""

Prints = Sequence[int]
"""One number per full block of a prompt, which identifies all tokens up to the block's end."""


def fingerprints(
    token_ids: Sequence[int], *, blocks_max: int = BLOCKS_MAX, salt: str = ""
) -> Prints:
    """Return the fingerprints of the first ``blocks_max`` full blocks; ``salt``: the request's
    ``cache_salt``.

    Different prefixes with equal fingerprints only cost a worse choice.
    """
    prints: list[int] = []
    last = hash(salt)
    blocks = min(len(token_ids) // BLOCK_TOKENS, blocks_max)
    for start in range(0, blocks * BLOCK_TOKENS, BLOCK_TOKENS):
        last = hash((last, *token_ids[start : start + BLOCK_TOKENS]))
        prints.append(last)
    return prints


class PrefixAffinity:
    """Remembers the latest ``blocks_max`` blocks, each with the instance that had it last."""

    def __init__(self, *, blocks_max: int = BLOCKS_MAX) -> None:
        self._blocks_max = blocks_max
        self._last: OrderedDict[int, str] = OrderedDict()

    def remember(self, prints: Prints, address: str) -> None:
        """Record that the instance at ``address`` begins to compute or load these blocks."""
        # The root last, so that the tail of a chain is forgotten first.
        for key in reversed(list(islice(prints, self._blocks_max))):
            self._last[key] = address
            self._last.move_to_end(key)
        while len(self._last) > self._blocks_max:
            self._last.popitem(last=False)

    def longest(self, prints: Prints, addresses: Collection[str]) -> str | None:
        """Return the address with the longest prefix of the prompt; None: none had a block."""
        for key in reversed(prints):
            address = self._last.get(key)
            if address is not None and address in addresses:
                return address
        return None

    def __len__(self) -> int:
        return len(self._last)
