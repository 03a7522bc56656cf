"""What is published by ZeroMQ, decoded by vLLM's own types."""

from __future__ import annotations

import msgpack
import msgspec
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvstore.console.events.zmq_publisher import CLEARED, described
from kvstore.master.ipc_channel import REMOVED_SIZE


def test_vllm_decodes_our_events() -> None:
    key, parent = bytes(range(32)), bytes(range(1, 33))
    model = "org/model", 16
    events = [
        CLEARED,
        described(("vllm/f/g2/p0t0", key, parent, 4096, 3, False), model),
        described(("vllm/f/g2/p0t0", parent, b"", 4096, 0, True), model),
        described(("vllm/f/g2/p0t0", key, b"", REMOVED_SIZE, 0, False), model),
    ]
    payload = msgpack.packb([1.5, events, 0])
    batch = msgspec.msgpack.Decoder(KVEventBatch).decode(payload)
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    _, stored, root, removed = batch.events
    assert isinstance(stored, BlockStored)
    assert stored.block_hashes == [maybe_convert_block_hash(BlockHash(key))]
    assert stored.parent_block_hash == maybe_convert_block_hash(BlockHash(parent))
    assert (stored.block_size, stored.medium, stored.group_idx) == (16, "STORAGE", 2)
    assert isinstance(root, BlockStored)
    assert root.parent_block_hash is None
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == stored.block_hashes
