"""The hashes of a request's tokens, from which keys are made.

vLLM 0.32 hashes the blocks of a model with one cache group, or parts of blocks of equal size. For
objects of another size (``block_tokens``) vLLM's function hashes parts of that size here, so the
hashes are those of an engine with such blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.request import Request

Hasher = Callable[[Any], list[bytes]]
"""vLLM's function: the hashes that a request's ``block_hashes`` lacks."""


@dataclass
class HashCache:
    """Hashes derived from those of vLLM."""

    made: list[bytes] = field(default_factory=list)
    source: list[bytes] = field(default_factory=list)

    def keep(self, hashes: Sequence[bytes], each: int = 1) -> None:
        """Drop hashes derived from others than these, or beyond them. A session's next input
        replaces its last tokens; each hash covers the tokens before it.

        Args:
            each: number of hashes derived from one.
        """
        source = self.source
        while source and (len(source) > len(hashes) or source[-1] != hashes[len(source) - 1]):
            source.pop()
        del self.made[len(source) * each :]


class BlockHashes:
    """The hashes of all full parts of ``tokens`` tokens of a request: vLLM's own, or, where vLLM
    hashes larger blocks of ``each`` parts, those of ``hasher``."""

    def __init__(self, tokens: int, each: int = 1, hasher: Hasher | None = None) -> None:
        self._tokens = tokens
        self._each = each
        self._hasher = hasher

    def of(self, request: Request, known: HashCache) -> Sequence[bytes]:
        """``known``: the hashes derived for this request before."""
        hashes: Sequence[bytes] = request.block_hashes
        if self._hasher is None:
            return hashes
        known.keep(hashes, self._each)
        known.made += self._hasher(_RequestWithHashes(request, known.made))
        known.source += hashes[len(known.source) :]
        return known.made

    def covered(self, request: Request) -> int:
        """Return the number of tokens with hashes."""
        if self._hasher is None:
            return len(request.block_hashes) * self._tokens
        return int(request.num_tokens) // self._tokens * self._tokens


def block_hashes(tokens: int, vllm_tokens: int, algorithm: str) -> BlockHashes:
    """Return hashes of parts of ``tokens`` tokens by vLLM's function of this name, where vLLM
    hashes ``vllm_tokens`` at a time."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher

    if tokens == vllm_tokens:
        return BlockHashes(tokens)
    hasher = get_request_block_hasher(tokens, get_hash_fn_by_name(algorithm))
    return BlockHashes(tokens, vllm_tokens // tokens, hasher)


class _RequestWithHashes:
    """A request that has these hashes instead of vLLM's."""

    def __init__(self, request: Request, hashes: list[bytes]) -> None:
        self.block_hashes = hashes
        self._request = request

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
