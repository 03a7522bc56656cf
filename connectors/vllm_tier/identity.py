"""Decides which engines share chunks: those whose chunks mean the same.

    outdated ── the workers say what their weights are ──► known, in a namespace of their own
       ▲                                                    │
       └── a call to the workers, or a reset of the caches ─┘        off: for a reason that stays

A chunk's key covers its tokens and nothing else. Everything else is described as for
``kvstore.connectors.vllm``, by the same functions: the live weights on all workers, configuration,
dtypes, hash algorithm and seed; and besides, how vLLM lays out a chunk.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Final

import vllm
from vllm.v1.kv_offload.base import OffloadingSpec

from kvstore.client.sync import Client
from kvstore.connectors.engine.fleet import Announcer
from kvstore.connectors.vllm import fingerprint
from kvstore.connectors.vllm.core import Core, callers
from kvstore.connectors.vllm.identity import identify
from kvstore.connectors.vllm.messages import Hello
from kvstore.connectors.vllm.scheduler import ANNOUNCE_EVERY_S, NO_PREFIX_CACHING
from kvstore.fingerprint import digest
from kvstore.fleet import Record
from kvstore.network.host import host_id

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("vllm.kvstore")

ENGINE: Final = "vllm-offloading"
FORMAT: Final = 1
"""Version of keys, namespaces and descriptions. Each change increments it."""

NO_CORE: Final = (
    "the tier was not created by vLLM's engine core, and cannot ask the workers for their weights. "
    '"model_id" names them instead: give equal names only to equal weights'
)
ADAPTERS: Final = (
    "LoRA adapters are enabled: a chunk's key has the name of an adapter, and not its weights. "
    "KVStoreConnector supports adapters"
)
HOSTS: Final = (
    "its workers are on several hosts, or in containers with a /dev/shm of their own: the pool of "
    "this process does not hold their blocks"
)
NOT_RESET: Final = (
    "the weights have changed since the caches were reset, which may hold blocks of other weights. "
    "No chunk is loaded or saved until reset_prefix_cache(reset_connector=True)"
)


def hello(worker: Any) -> tuple[Hello, str]:
    """A worker's identity, and its host. Called on each worker, by name."""
    answer = Hello("", [], "", rank=worker.rank)
    try:
        identify(answer, worker, worker.vllm_config)
    except Exception as error:  # raised by model code: the engine goes on without the store
        log.exception("weights_not_identified")
        answer.error = repr(error)
    return answer, host_id()


class Identity:
    """What this engine's chunks mean. Threads: the scheduler's, but for ``namespace``."""

    def __init__(
        self, client: Client, spec: OffloadingSpec, chunk_bytes: int, *, model_id: str
    ) -> None:
        """
        Args:
            chunk_bytes: of a row in vLLM's pool.
            model_id: the operator's name for the weights; "": use their digest.
        """
        config = spec.config
        self.namespace = ""
        """Where chunks are; "": none is loaded or saved now."""
        self.is_outdated = True
        """Whether the namespace has to be learned again before it is used."""
        self.is_used = False
        """Whether vLLM's caches may hold blocks of these weights; a reset of the caches ends
        that."""
        self._is_mixed = False
        """Whether they may hold blocks of several."""
        self._off = ""
        self._model_id = model_id
        self._first_weights = ""
        self._mark = ""
        self.announcer = Announcer(client, log, every_s=ANNOUNCE_EVERY_S)
        self._models = [config.model.name]
        self._description: dict[str, Any] = _chunks(spec, chunk_bytes)
        groups = {group.group_id for group in config.groups}
        self._core = Core.above()
        connector: Any = next((each for each in callers() if hasattr(each, "_vllm_config")), None)
        if connector is not None:
            vllm_config, caches = connector._vllm_config, connector._kv_cache_config
            self._models = fingerprint.models_of(vllm_config)
            self._description |= fingerprint.describe(vllm_config, caches)
            for warning in fingerprint.hash_warnings(self._description):
                log.warning("FLEET: %s", warning)
            kinds = [type(group.kv_cache_spec).__mro__ for group in caches.kv_cache_groups]
            full = [any(each.__name__ == "FullAttentionSpec" for each in kind) for kind in kinds]
            groups = {group for group in groups if full[group]}
            self._check(vllm_config)
        elif self._core is not None or not model_id:
            self._switch_off(NO_CORE)
        self.chunk_tokens = {
            group.group_id: group.tokens_per_block * config.cache.blocks_per_chunk
            for group in config.groups
            if group.group_id in groups
        }
        """Of cache groups whose chunks are chains: those that attend to all tokens."""
        if self._core is not None:
            self._core.watch(weights=self._outdate, adapters=lambda: None)
        self.learn()

    def _check(self, vllm_config: VllmConfig) -> None:
        if self._core is None and not self._model_id:
            self._switch_off(NO_CORE)
        elif not vllm_config.cache_config.enable_prefix_caching:
            self._switch_off(NO_PREFIX_CACHING)
        elif vllm_config.lora_config is not None:
            self._switch_off(ADAPTERS)

    def _switch_off(self, reason: str) -> None:
        if not self._off:
            log.warning("this engine neither loads nor saves chunks: %s", reason)
        self._off = reason
        self.namespace = ""
        self.is_outdated = False

    def _outdate(self) -> None:
        """The weights may have changed."""
        if not self._off:
            self.is_outdated = True
            self.namespace = ""

    def reset(self) -> None:
        """vLLM's caches are being reset: what they hold from now on is of the weights that the
        engine has when it computes again."""
        self._outdate()
        self.is_used = self._is_mixed = False

    def learn(self) -> None:
        """Asks the workers what their weights are, if these may have changed; between two steps."""
        if not self.is_outdated or (self._core is not None and self._core.is_paused):
            return
        self.is_outdated = False
        if self._is_mixed:
            return
        answers = [] if self._core is None else self._core.ask(hello)
        hellos = [answer for answer, _ in answers]
        if errors := [each.error for each in hellos if each.error]:
            self._switch_off(f"its weights could not be identified: {errors[0]}")
        elif {host for _, host in answers} - {host_id()}:
            self._switch_off(HOSTS)
        elif not all(each.prefix_caching for each in hellos):
            self._switch_off(NO_PREFIX_CACHING)
        else:
            self._adopt(hellos)

    def _adopt(self, hellos: list[Hello]) -> None:
        weights = fingerprint.identified(self._description, hellos)["weights"]
        self._first_weights = self._first_weights or weights
        name = self._model_id
        if name and weights != self._first_weights:  # the name is that of the first weights
            name = f"{name}, then {weights}"
        identified = fingerprint.identified(self._description, hellos, name=name)
        mark = fingerprint.fingerprint(identified, hellos)
        if mark != self._mark and self._mark:
            if self.is_used:
                self._is_mixed = True
                log.warning("weights_changed: %s", NOT_RESET)
                return
            log.info("weights_changed fingerprint=%s before=%s", mark, self._mark)
        before, self._mark = self._mark, mark
        self.namespace = f"{ENGINE}/{mark}/all"  # a row of the pool holds the parts of all ranks
        self.announcer.announce(
            Record(ENGINE, tuple(self._models), mark, (self.namespace,), identified), former=before
        )


def _chunks(spec: OffloadingSpec, chunk_bytes: int) -> dict[str, Any]:
    """How vLLM lays out a chunk, as plain JSON values."""
    config = spec.config
    parallel = config.parallel
    layers = [
        [group.group_id, group.tokens_per_block, *group.layer_names] for group in config.groups
    ]
    return {
        "tier_format": FORMAT,
        "vllm": ".".join(vllm.__version__.split(".")[:2]),  # it has no number for its layout
        "chunk_bytes": chunk_bytes,
        "chunk_blocks": config.cache.blocks_per_chunk,
        "chunk_dtype": config.model.dtype,
        "chunk_layers": digest(layers)[:16],
        "chunk_layout": str(config.kv_cache_layout),
        "hash_tokens": config.cache.tokens_per_hash,
        "worker_block_bytes": config.worker_kv_bytes_per_block,
        "workers": [
            parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size,
            parallel.dcp_size,
        ],
        "is_canonical": config.canonical_layout,
        "is_replicated": config.replicated_layout,
    }  # fmt: skip
