"""The connector for vLLM: prefill engines put their KV blocks, decode engines get them by hash.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector",
      "kv_role": "kv_both", "kv_connector_extra_config": {"master": "127.0.0.1:50001"}}'

vLLM creates one connector in the engine core (*scheduler* role: it decides) and one in each worker
(it transfers bytes); ``messages`` has their messages. The user's guide is docs/vllm.md.

    engine core                                        each worker
    new request ─► lookups (a thread) ─► tokens stored
    blocks allocated ─► Load ─ TransferCommands ─────► a thread: store ─► paged cache ─► loaded
    blocks full ─► kept ─► Save ─── (every step) ────► a thread: paged cache ─► store
    freed, events ◄──────────── TransferReport ──────┘
    identify ─────── (at the start, and when ────────► sample of the live weights
    namespaces ◄───── weights may have changed) ──────┘ WorkerIdentity

Each worker stores its part of a block under ``vllm/<fingerprint>/g<group>/p<stage>t<rank>``; a
prefix is a hit when every part of every group is stored. A reference count in vLLM's block pool
keeps blocks being saved until every worker has reported. On a GPU the worker records an event on
the compute stream before the forward pass, for loads, and after it, for saves. Only the client
waits for the events.
"""

from kvstore.connectors.vllm.connector import KVStoreConnector, MooncakeStoreConnector

__all__ = ["KVStoreConnector", "MooncakeStoreConnector"]
