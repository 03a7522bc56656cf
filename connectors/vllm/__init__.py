"""The connector for vLLM: prefill engines put their KV blocks, decode engines get them by hash.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVStoreConnector",
      "kv_role": "kv_both", "kv_connector_extra_config": {"master": "127.0.0.1:50001"}}'

vLLM creates one connector in the engine core (*scheduler* role: it decides) and one in each worker
(it moves bytes); ``messages`` holds what they send each other. The user's guide is docs/vllm.md.
"""

from kvstore.connectors.vllm.connector import KVStoreConnector, MooncakeStoreConnector

__all__ = ["KVStoreConnector", "MooncakeStoreConnector"]
