"""The plug-in that vLLM calls in each of its processes: registers the connector under its name.

Apart from ``kvstore.connectors.vllm``, which is loaded only where the connector is used.
"""

from __future__ import annotations

NAME = "KVStoreConnector"


def register() -> None:
    """vLLM's plug-in, of the group ``vllm.general_plugins``; it may be called more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:  # the factory has no public method for this
        KVConnectorFactory.register_connector(NAME, "kvstore.connectors.vllm", NAME)
