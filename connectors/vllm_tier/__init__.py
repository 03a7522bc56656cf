"""A tier of vLLM's own KV offloading, which copies blocks between the GPU and a pool in main
memory. The tier keeps chunks of that pool in a store.

    GPU ◄── vLLM ──► pool in main memory of this engine ◄── tier ──► store

vLLM creates the tier by its class name, in the scheduler's process:

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
       "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 8000000000,
       "secondary_tiers": [{"type": "KVStoreTier", "master": "10.0.0.7:50001"}]}}

* ``tier.py``: the class that implements vLLM's ``SecondaryTierManager``
* ``namespace.py``: the namespace of chunks, shared by equal engines
* ``chunk_order.py``: the order of a request's chunks, from which their parents follow

docs/engines/vllm-offloading.md describes settings and failures.
"""

from kvstore.connectors.vllm_tier.tier import KVStoreTier

__all__ = ["KVStoreTier"]
