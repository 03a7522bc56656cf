"""vLLM's plug-in: registers the connector and the tier in vLLM's factories, by their names.

vLLM imports this module in each of its processes. ``kvstore.connectors.vllm`` and ``vllm_tier`` are
separate modules, so that they are loaded only where they are used.
"""

from __future__ import annotations

CONNECTOR = "KVStoreConnector"
TIER = "KVStoreTier"


def register() -> None:
    """The entry point, in the group ``vllm.general_plugins``. vLLM may call it more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:  # no public test
        KVConnectorFactory.register_connector(CONNECTOR, "kvstore.connectors.vllm", CONNECTOR)
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # this version of vLLM has no tiers
        return
    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, "kvstore.connectors.vllm_tier", TIER)
