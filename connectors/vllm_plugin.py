"""vLLM's plug-in: registers the connector and the tier in vLLM's factories, records weights that
vLLM packs and files that it loads, and prefixes client names of media.

vLLM imports this module in each of its processes. ``kvstore.connectors.vllm`` and ``vllm_tier`` are
separate modules, so that they are loaded only where they are used.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from kvstore.connectors.vllm_media import mark_names

CONNECTOR = "KVStoreConnector"
TIER = "KVStoreTier"


def register() -> None:
    """Entry point in the group ``vllm.general_plugins``. vLLM may call it more than once."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:  # no public test
        KVConnectorFactory.register_connector(CONNECTOR, "kvstore.connectors.vllm", CONNECTOR)
    _note_packing()
    _note_workers()
    mark_names()
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
    except ImportError:  # this version of vLLM has no tiers
        return
    if TIER not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(TIER, "kvstore.connectors.vllm_tier", TIER)


def _note_packing() -> None:
    """Patch vLLM to keep a summary of each layer's weights before it packs them for a CPU, after
    which they cannot be read. There is no connector yet when vLLM loads weights."""
    from vllm.config import get_current_vllm_config_or_none
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if hasattr(pack, "__wrapped__"):
        return

    @wraps(pack)
    def noted(layer: Any, remove_weight: bool) -> None:
        config = get_current_vllm_config_or_none()
        if config is None or config.kv_transfer_config is not None:
            from kvstore.connectors.vllm.weights.weight_monitor import PACKED, summary

            setattr(layer, PACKED, summary(layer.weight))
        pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = noted


def _note_workers() -> None:
    """Patch workers to record the files that they load. Other processes do not import vLLM's
    loaders, which takes a second."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    start = WorkerWrapperBase.init_device
    if hasattr(start, "__wrapped__"):
        return

    @wraps(start)
    def noted(worker: Any) -> None:
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
        from vllm.model_executor.model_loader.runai_streamer_loader import RunaiModelStreamerLoader

        _note_files(DefaultModelLoader)
        _note_files(RunaiModelStreamerLoader)
        start(worker)

    WorkerWrapperBase.init_device = noted


def _note_files(loader: Any) -> None:
    """Patch a loader class to keep, with the model, the state of each file before it is read: at
    any later time it may be another one."""
    from kvstore.connectors.common.fingerprint import LOADED, LoadedFiles

    begin, choose = loader.get_all_weights, loader._prepare_weights
    if hasattr(begin, "__wrapped__"):
        return

    @wraps(begin)
    def begun(self: Any, model_config: Any, model: Any) -> Any:
        self.kvstore_files = []
        setattr(model, LOADED, self.kvstore_files)
        return begin(self, model_config, model)

    @wraps(choose)
    def chosen(self: Any, *arguments: Any, **more: Any) -> Any:
        found = choose(self, *arguments, **more)
        if hasattr(self, "kvstore_files"):
            files = found[1] if isinstance(found, tuple) else found
            self.kvstore_files.append(LoadedFiles(files))
        return found

    loader.get_all_weights, loader._prepare_weights = begun, chosen
