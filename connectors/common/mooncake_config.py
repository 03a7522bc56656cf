"""Translates Mooncake's configuration: the keys of a ``mooncake.json``, and of the dictionaries
that engines and ``setup`` take instead.

Other programs read them too, so a key without an effect here is ignored with a log line that gives
the reason, and an unknown key is ignored.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvstore.config import P2P

MEANT: Final = {
    "master_server_address": "master",
    "master_server_addr": "master",
    "global_segment_size": "memory",
    "replica_num": "replicas",
    "protocol": "protocol",
    "device_name": "device_name",
    "rdma_devices": "device_name",
    "metadata_server": "metadata_server",
    "metadata_backend": "metadata_server",
}
"""The setting for each key."""

MASTER_KEYS: Final = tuple(key for key, setting in MEANT.items() if setting == "master")

_IN_MEMORY: Final = "all objects are in memory"
_PLACED: Final = "the master places an object, on the writer's host first"
_NODE: Final = "kvstore-node holds memory outside of engines"
_METRICS: Final = "the master's HTTP port has the metrics of all"
_ASCEND: Final = "transfers are those of kvstore"

IGNORED: Final = {
    "prefill_url": "engines meet in the store; kvstore-proxy names prefillers",
    "decode_url": "engines meet in the store; kvstore-proxy names decoders",
    "local_hostname": "nodes report their own addresses",
    "mode": "a worker contributes memory when global_segment_size says so",
    "tenant_id": "blocks are apart by model and weights; the setting tenant (KVSTORE_TENANT) keeps "
    "teams apart",
    "local_buffer_size": "a transfer engine's buffer has 64 MiB",
    "transfer_timeout": "5 s (vLLM) or timeout_ms bounds a transfer",
    "enable_offload": _IN_MEMORY,
    "enable_ssd_offload": _IN_MEMORY,
    "enable_ssd_prefetch": _IN_MEMORY,
    "ssd_get_wait_ms": _IN_MEMORY,
    "ssd_offload_path": _IN_MEMORY,
    "ssd_prefetch_cooldown_sec": _IN_MEMORY,
    "ssd_prefetch_dedup_ttl_sec": _IN_MEMORY,
    "storage_root_dir": _IN_MEMORY,
    "prefer_alloc_in_same_node": _PLACED,
    "prefer_local_alloc": _PLACED,
    "preferred_segment": _PLACED,
    "client_server_address": _NODE,
    "standalone_storage": _NODE,
    "client_http_port": _METRICS,
    "enable_client_http_server": _METRICS,
    "master_metrics_port": _METRICS,
    "check_server": "kvstore doctor checks the master",
    "device_name_per_gpu": "device_name has the cards of all GPUs",
    "memory_fabric": _ASCEND,
    "staging_buffer_size": _ASCEND,
    "use_ascend_direct": _ASCEND,
}
"""The reason why a key has no effect."""

_OF_THE_ENGINE: Final[dict[str, str]] = dict.fromkeys(
    ("metadata_server", "metadata_backend", "device_name", "rdma_devices"),
    "tcp needs no transfer engine",
)
"""The reason why a key has no effect without a transfer engine."""

_DISCOVERED: Final = "auto-discovery"
"""A ``device_name`` that means all RDMA devices, as the empty one does."""

_CUTOFF: Final = 0.8
"""Minimum similarity of a key to the one suggested."""


def settings_of(given: Mapping[str, Any], log: logging.Logger) -> dict[str, Any]:
    """Return the settings for Mooncake's keys in ``given``, and log each of its keys that has a
    value and no effect; ignore other keys."""
    tell_ignored(given, IGNORED, log)
    values: dict[str, Any] = {}
    if address := next((given[key] for key in MASTER_KEYS if given.get(key)), None):
        values["master"] = address
    if size := given.get("global_segment_size"):
        values["memory"] = size_of(size)
    if count := given.get("replica_num"):
        values["replicas"] = count
    return values | _of_the_engine(given, log)


def translate_config(given: Mapping[str, Any], log: logging.Logger) -> dict[str, Any]:
    """Replace Mooncake's keys in a dictionary of settings by settings. Keys that are both
    (``protocol``) are Mooncake's if the master is named by Mooncake's key."""
    is_theirs = any(given.get(key) for key in MASTER_KEYS)
    shared = set() if is_theirs else {key for key, setting in MEANT.items() if key == setting}
    theirs = {
        key: value
        for key, value in given.items()
        if (key in MEANT or key in IGNORED) and key not in shared
    }
    own = {key: value for key, value in given.items() if key not in theirs and value is not None}
    if is_theirs and "memory" not in own:
        warn_if_no_memory(given, log)
    return settings_of(theirs, log) | own


def tell_ignored(given: Mapping[str, Any], reasons: Mapping[str, str], log: logging.Logger) -> None:
    for key in given:
        if key in reasons and given[key]:
            log.info("key_ignored key=%s reason=%s", key, reasons[key])


def tell_unknown(keys: Iterable[str], known: Iterable[str], log: logging.Logger) -> None:
    """Log that these keys are ignored, each with the most similar known key."""
    names = list(known)
    for key in keys:
        if near := difflib.get_close_matches(str(key), names, n=1, cutoff=_CUTOFF):
            log.warning("key_ignored key=%s reason=unknown did_you_mean=%s", key, near[0])
        else:
            log.info("key_ignored key=%s reason=unknown", key)


def warn_if_no_memory(given: Mapping[str, Any], log: logging.Logger) -> None:
    """Log that without ``global_segment_size`` no memory is pooled. Mooncake's connectors of vLLM
    and SGLang would pool 4 GiB in each worker."""
    if "global_segment_size" not in given and given.get("mode") != "standalone-store":
        log.info(
            "key_missing key=global_segment_size reason=no worker pools memory here; with Mooncake "
            'each would pool 4 GiB: for that write "global_segment_size": "4GB"'
        )


def size_of(size: int | str) -> int | str:
    """Return a size in Mooncake's format, where ``4gb`` and ``4g`` are binary units."""
    text = str(size).strip().lower().removesuffix("b").rstrip()
    return f"{text[:-1].strip()}{text[-1].upper()}iB" if text[-1:] in ("k", "m", "g", "t") else size


def _of_the_engine(given: Mapping[str, Any], log: logging.Logger) -> dict[str, Any]:
    """Return the settings of a transfer engine, which only ``rdma`` needs."""
    protocol = str(given.get("protocol") or "tcp").lower()
    if protocol != "rdma":
        if protocol != "tcp":
            log.warning("protocol_not_available protocol=%s used=shm,tcp", given["protocol"])
        tell_ignored(given, _OF_THE_ENGINE, log)
        return {}
    values: dict[str, Any] = {"protocol": protocol}
    if server := given.get("metadata_server"):
        values["metadata_server"] = _with_scheme(str(server), given.get("metadata_backend"))
    devices = str(given.get("device_name") or given.get("rdma_devices") or "").replace(" ", "")
    if devices not in ("", _DISCOVERED):
        values["device_name"] = devices
    return values


def _with_scheme(server: str, backend: str | None) -> str:
    """Return an address with Mooncake's ``metadata_backend`` as its scheme if it has none; the
    default is etcd."""
    return server if "://" in server or server == P2P else f"{backend or 'etcd'}://{server}"
