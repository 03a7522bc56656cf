"""What vLLM calls in each of its processes: makes the connector and the tier known under their own
names.

Apart from ``kvstore.connectors.vllm`` and ``vllm_tier``, which are loaded only where they are used.
"""

from __future__ import annotations

CONNECTOR = "KVStoreConnector"
TIER = "KVStoreTier"


def register() -> None:
    """vLLM's plug-in, of the group ``vllm.general_plugins``; it may be called more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:  # it has no question for that
        KVConnectorFactory.register_connector(CONNECTOR, "kvstore.connectors.vllm", CONNECTOR)
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # a version without tiers
        return
    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, "kvstore.connectors.vllm_tier", TIER)
