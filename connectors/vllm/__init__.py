"""The connector for vLLM: prefill engines put their KV blocks, decode engines get them by hash.

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "MooncakeStoreConnector",
      "kv_connector_module_path": "kvstore.connectors.vllm", "kv_role": "kv_both",
      "kv_connector_extra_config": {"master": "127.0.0.1:50001"}}'

vLLM makes one in the engine core (*scheduler* role: it decides) and one in each worker (it moves
bytes); ``messages`` is what they say to each other. docs/vllm.md is for its users.
"""

from kvstore.connectors.vllm.connector import MooncakeStoreConnector

__all__ = ["MooncakeStoreConnector"]
