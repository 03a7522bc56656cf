"""The connector's settings: ``kv_connector_extra_config``, ``KVSTORE_*``, or a ``mooncake.json``.

``MOONCAKE_CONFIG_PATH`` names a JSON file in Mooncake's format; its values apply to options that
are not set otherwise. Unknown keys are refused by name.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.config import P2P, ConnectorConfig, load
from kvstore.errors import ConfigError

log = logging.getLogger("vllm.kvstore")

MOONCAKE_VARIABLE: Final = "MOONCAKE_CONFIG_PATH"
ABORT_VARIABLE: Final = "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
"""Seconds, as in the demos of vLLM's own Mooncake connectors."""

_WITHOUT_MEANING: Final = {
    "local_hostname": "nodes report their own addresses",
    "mode": "a worker contributes memory when global_segment_size says so",
}
_OF_THE_ENGINE: Final = ("metadata_server", "device_name", "local_buffer_size")
_KNOWN: Final = (
    "master_server_address", "global_segment_size", "protocol", *_OF_THE_ENGINE, *_WITHOUT_MEANING,
)  # fmt: skip


def read_config(
    extra: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> ConnectorConfig:
    """The connector's settings.

    Args:
        extra: ``kv_connector_extra_config``.

    Raises:
        ConfigError: an unknown, misspelt or wrong setting; names it, and where it is set.
    """
    environ = os.environ if environ is None else environ
    config = load(ConnectorConfig, dict(extra), environ=environ, origin="kv_connector_extra_config")
    given = config.model_fields_set
    more: dict[str, Any] = {}
    if path := environ.get(MOONCAKE_VARIABLE):
        more |= _from_mooncake(Path(path))
    if seconds := environ.get(ABORT_VARIABLE):
        more["pin_timeout_ms"] = _milliseconds(seconds)
    more = {key: value for key, value in more.items() if key not in given}
    if not more:
        return config
    return load(
        ConnectorConfig, {**extra, **more}, environ=environ, origin=f"{MOONCAKE_VARIABLE}: {{key}}"
    )


def _from_mooncake(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", advice=f"Check {MOONCAKE_VARIABLE}."
        ) from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} is not a JSON object", advice=f"Check {MOONCAKE_VARIABLE}.")
    for key in read:
        if key not in _KNOWN:
            raise ConfigError(
                f"unknown key {key!r} in {path}",
                advice=f"Known keys: {', '.join(_KNOWN)}.",
                key=key,
                origin=str(path),
            )
        if key in _WITHOUT_MEANING and read[key]:
            log.info("mooncake_key_ignored key=%s reason=%s", key, _WITHOUT_MEANING[key])
    values: dict[str, Any] = {}
    if address := read.get("master_server_address"):
        values["master"] = address
    if size := read.get("global_segment_size"):
        values["memory"] = _mooncake_size(size)
    protocol = str(read.get("protocol") or "tcp").lower()
    if protocol != "rdma":
        if protocol != "tcp":
            log.warning("protocol_not_available protocol=%s used=shm,tcp", read["protocol"])
        for key in _OF_THE_ENGINE:
            if read.get(key):
                log.info("mooncake_key_ignored key=%s reason=tcp needs no transfer engine", key)
        return values
    values["protocol"] = protocol
    if server := read.get("metadata_server"):
        # In Mooncake's format an address without a scheme is an etcd.
        is_plain = "://" not in server and server != P2P
        values["metadata_server"] = f"etcd://{server}" if is_plain else server
    if devices := read.get("device_name"):
        values["device_name"] = str(devices).replace(" ", "")
    if size := read.get("local_buffer_size"):
        values["engine_buffer"] = _mooncake_size(size)
    return values


def _mooncake_size(size: int | str) -> int | str:
    """A size in Mooncake's format, where ``4gb`` and ``4g`` are binary units."""
    text = str(size).strip().lower().removesuffix("b").rstrip()
    return f"{text[:-1].strip()}{text[-1].upper()}iB" if text[-1:] in ("k", "m", "g", "t") else size


def _milliseconds(seconds: str) -> int:
    """The value in ms, within the bounds of ``pin_timeout_ms``, which the variable's users do not
    know."""
    try:
        wanted = min(float(seconds) * 1000, 3_600_000.0)
        return max(100, int(wanted))
    except ValueError:
        raise ConfigError(
            f"{ABORT_VARIABLE} is {seconds!r}, not a number of seconds", key=ABORT_VARIABLE
        ) from None
