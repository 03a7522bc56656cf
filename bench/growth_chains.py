"""Chains of growing length: the time of the master's search, and of the whole call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvstore import calls
from kvstore.bench import virtual
from kvstore.bench.ours import TIMEOUT_MS, own_master
from kvstore.bench.timing import median_us, require, timed
from kvstore.bench.virtual import NAMESPACE, PUT_AT_ONCE, chain
from kvstore.config import ClientConfig
from kvstore.limits import BATCH_KEYS_MAX, PROTOCOL_VERSION, Key
from kvstore.master.state.master_state import MasterState
from kvstore.memory.header import SUPERBLOCK_BYTES, extent_bytes

CALLS_MAX: Final = 20_000


class Matched(NamedTuple):
    """The times for a chain of ``blocks`` blocks, all of which are stored."""

    blocks: int
    search_us: float
    """Time of the master's state alone, in this process, to find the tip and lease it."""
    call_us: float
    """Time of ``Client.match_prefix``: checks, sends and decodes every key, and searches."""
    requests: int
    """Calls to the master: each carries at most ``BATCH_KEYS_MAX`` keys."""


def measure(
    sizes: Sequence[int], seconds: float, progress: Callable[[str, int], None]
) -> list[Matched]:
    """Measures each length, all on one chain that has the greatest length.

    Raises:
        KVStoreError: the master failed.
    """
    from kvstore import Client

    keys = chain(0, max(sizes))
    progress("chains: putting the longest", 0)
    state = _state_with(keys)
    with (
        own_master() as (address, _),
        virtual.virtual_node(address, 2 * len(keys)),
        virtual.stub_of(address) as stub,
    ):
        virtual.put_chain(stub, keys)
        config = ClientConfig(master=address, namespace=NAMESPACE, timeout_ms=TIMEOUT_MS)
        with Client(config=config) as client:
            found = []
            for size in sorted(sizes):
                progress(f"a chain of {size:,} blocks", 1)
                found.append(
                    Matched(
                        blocks=size,
                        search_us=round(_search_us(state, keys[:size], seconds), 2),
                        call_us=round(_call_us(client.match_prefix, keys[:size], seconds), 1),
                        requests=-(-size // BATCH_KEYS_MAX),
                    )
                )
    return found


def _search_us(state: MasterState, keys: list[Key], seconds: float) -> float:
    request = calls.MatchPrefix([NAMESPACE], keys, False)

    def check(matched: calls.Matched) -> None:
        require(matched.matches[0].matched == len(keys), "of the chain was not matched")

    return median_us(
        timed(lambda _: state.asking.match_prefix(0, request), seconds, CALLS_MAX, check)
    )


def _call_us(match_prefix: Callable[[list[Key]], int], keys: list[Key], seconds: float) -> float:
    def check(matched: int) -> None:
        require(matched == len(keys), "of the chain was not matched")

    return median_us(timed(lambda _: match_prefix(keys), seconds, CALLS_MAX, check))


def _state_with(keys: list[Key]) -> MasterState:
    """A master's state with that chain, outside of a master process."""
    state = MasterState(epoch=1)
    size = SUPERBLOCK_BYTES + 2 * len(keys) * extent_bytes(virtual.OBJECT_BYTES)
    offer = calls.SegmentOffer(
        size=size, uuid=bytes(16), shm_name="", address="127.0.0.1:9", token=bytes(16), seed=1,
        generation=1, fresh=True,
    )  # fmt: skip
    state.nodes.joined(0, 1, calls.NodeJoin("bench", virtual.HOST, PROTOCOL_VERSION, 0, [offer]))
    for start in range(0, len(keys), PUT_AT_ONCE):
        parent = keys[start - 1] if start else None
        grants = state.putting.put_start(
            0, virtual.putting(keys[start : start + PUT_AT_ONCE], parent)
        )
        assert isinstance(grants, calls.Grants)
        state.putting.put_end(0, calls.PutEnd(grants.epoch, grants.tokens))
    state.take_effects()
    return state
