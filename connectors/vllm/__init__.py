"""The connector for vLLM: prefill engines put their KV blocks, decode engines get them by hash.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector",
      "kv_role": "kv_both", "kv_connector_extra_config": {"master": "127.0.0.1:50001"}}'

vLLM creates one connector in the engine core (*scheduler* role: it decides) and one in each worker
(it moves bytes); ``messages`` holds what they send each other. The user's guide is docs/vllm.md.

    engine core                                        each worker
    new request ─► lookups (a thread) ─► tokens there
    blocks allocated ─► Load ────── Orders ──────────► a thread: store ─► paged cache ─► arrived
    blocks full ─► pinned ─► Save ─ (every step) ────► a thread: paged cache ─► store
    unpinned, events ◄───────── TransferReport ──────┘
    who are you? ─── (at the start, and when ────────► sample of the live weights
    namespaces ◄───── weights may have changed) ──────┘ WorkerIdentity

Each worker stores its part of a block under ``vllm/<fingerprint>/g<group>/p<stage>t<rank>``; a
prefix is a hit when every part of every group is there. A reference count in vLLM's block pool pins
blocks until every worker has reported. On a GPU the worker marks the compute stream twice in a
step: before the forward pass for loads, after it for saves. Only the client waits for the marks.
"""

from kvstore.connectors.vllm.connector import KVStoreConnector, MooncakeStoreConnector

__all__ = ["KVStoreConnector", "MooncakeStoreConnector"]
