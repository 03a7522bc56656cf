"""The parts of each block that one worker holds, by name: one, or one for each shard. The pages of
a draft model are separate parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from kvstore.connectors.vllm.worker.layout import PageSplit
from kvstore.connectors.vllm.worker.pages import Pages, inspect_caches, pages_of
from kvstore.device.device import Device

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

Caches = Mapping[str, "torch.Tensor"]
"""The paged caches, by layer."""


class WorkerParts:
    def __init__(
        self, caches: Caches, names: Sequence[str], vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig, split: PageSplit, device_of: Callable[[str], Device],
    ) -> None:  # fmt: skip
        """
        Args:
            names: as returned by ``PageSplit.parts``.
            device_of: ``Client.device`` of the client that will copy.

        Raises:
            ConfigError: a layout that this connector does not understand, or cannot split.
        """
        self.names = list(names)
        self.draft_layers: frozenset[str] | None = None
        """Layers with separate pages; None: there is no draft model, or its pages are not
        separate."""
        self.of_drafts: dict[str, Pages] = {}
        self._caches = caches
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._split = split
        self._device_of = device_of
        self.of_model = self._part_of(caches)

    def divide(self, layers: Collection[str]) -> None:
        """Separate these layers of a draft model, unless a cache group has no others: a block of
        such a group would have no part that shows whether it is stored. The pages of a layer that
        reads the model's (Gemma 4 MTP) stay the model's.

        Raises:
            ConfigError: nothing is separated.
        """
        drafts, caches = frozenset(layers), self._caches
        groups = [set(group.layer_names) for group in self._kv_cache_config.kv_cache_groups]
        if any(names and names <= drafts for names in groups):
            return
        own: set[str] = set()
        for names in groups:
            models = {caches[name].data_ptr() for name in names - drafts if name in caches}
            mine = names & drafts & caches.keys()
            own |= {name for name in mine if caches[name].data_ptr() not in models}
        of_model = self._part_of({name: caches[name] for name in caches if name not in drafts})
        self.of_drafts = self._part_of({name: caches[name] for name in caches if name in own})
        self.of_model, self.draft_layers = of_model, drafts

    def _part_of(self, caches: Caches) -> dict[str, Pages]:
        if not caches:
            return {}
        config, split = self._kv_cache_config, self._split
        layers = self._vllm_config.compilation_config.static_forward_context
        of_states = layers if split.shards else None
        found: list[Pages] = []
        for shard in range(split.each):
            geometry = inspect_caches(caches, config, shard, split.each, layers=of_states)
            found.append(pages_of(geometry, self._device_of))
        return dict(zip(self.names, found, strict=True))
