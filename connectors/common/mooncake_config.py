"""Translates Mooncake's configuration: the keys of a ``mooncake.json``, and of the dictionaries
that engines and ``setup`` take instead.

Other programs read them too, so a key without an effect here is ignored with a log line, and an
unknown key is ignored.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable, Mapping
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

IGNORED: Final = frozenset((
    "prefill_url", "decode_url", "local_hostname", "mode", "tenant_id", "local_buffer_size",
    "transfer_timeout", "enable_offload", "enable_ssd_offload", "enable_ssd_prefetch",
    "ssd_get_wait_ms", "ssd_offload_path", "ssd_prefetch_cooldown_sec",
    "ssd_prefetch_dedup_ttl_sec", "storage_root_dir", "prefer_alloc_in_same_node",
    "prefer_local_alloc", "preferred_segment", "client_server_address", "standalone_storage",
    "client_http_port", "enable_client_http_server", "master_metrics_port", "check_server",
    "device_name_per_gpu", "memory_fabric", "staging_buffer_size", "use_ascend_direct",
))  # fmt: skip
"""Keys without effect; ``docs/from-mooncake.md`` has the reasons."""

_OF_THE_ENGINE: Final = frozenset(
    ("metadata_server", "metadata_backend", "device_name", "rdma_devices")
)
"""Keys without effect if there is no transfer engine."""

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


def tell_ignored(given: Mapping[str, Any], ignored: Collection[str], log: logging.Logger) -> None:
    for key in given:
        if key in ignored and given[key]:
            log.info("key_ignored key=%s see=docs/from-mooncake.md", key)


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
