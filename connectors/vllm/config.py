"""The connector's settings: ``kv_connector_extra_config``, ``KVSTORE_*``, or a ``mooncake.json``.

``MOONCAKE_CONFIG_PATH`` names a JSON file in Mooncake's format; its values apply to options that
are not set otherwise. Unknown options in ``kv_connector_extra_config`` are errors, unless vLLM's
own Mooncake connectors have them. Unknown keys in ``mooncake.json`` are ignored, because other
programs read it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

from kvstore.config import DEFAULT_PORT, ConnectorConfig, load
from kvstore.connectors.common import mooncake_config
from kvstore.errors import ConfigError

log = logging.getLogger("vllm.kvstore")

MOONCAKE_VARIABLE: Final = "MOONCAKE_CONFIG_PATH"

RENAMED: Final = {"save_decode_cache": "save_decode", "store_tp_size": "tp_shards"}
"""Options of vLLM's own Mooncake connectors that have another name here."""

OF_VLLM: Final = frozenset((
    "load_async", "lookup_async", "enable_lookup", "lookup_rpc_port", "cache_prefix",
    "preferred_segment", "enable_group_semantics", "custom_mem_pool",
    "enable_cross_layers_blocks", "enable_store_tp_lcm", "prefill_tp_sizes", "num_workers",
    "mooncake_protocol", "bootstrap_server_address", "prefill_side_swa_replay",
))  # fmt: skip
"""Other options of vLLM's own Mooncake connectors, without effect; ``docs/from-mooncake.md`` has
the reasons."""


def read_config(
    extra: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> ConnectorConfig:
    """Return the connector's settings.

    Args:
        extra: ``kv_connector_extra_config``.

    Raises:
        ConfigError: an unknown, misspelt or wrong setting, with its source. Or a ``mooncake.json``
            is used, and no source names a master.
    """
    environ = os.environ if environ is None else environ
    mooncake_config.tell_ignored(extra, OF_VLLM, log)
    own = {RENAMED.get(key, key): extra[key] for key in extra if key not in OF_VLLM}
    config = load(ConnectorConfig, own, environ=environ, origin="kv_connector_extra_config")
    path = environ.get(MOONCAKE_VARIABLE)
    if not path:
        return config
    given = config.model_fields_set
    values = _from_mooncake(Path(path), given)
    more = {key: value for key, value in values.items() if key not in given}
    return load(
        ConnectorConfig, {**own, **more}, environ=environ, origin=f"{MOONCAKE_VARIABLE}: {{key}}"
    )


def _from_mooncake(path: Path, given: Collection[str]) -> dict[str, Any]:
    """Return the settings in the file. ``given``: those that are set otherwise."""
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}", advice=f"Check {MOONCAKE_VARIABLE}."
        ) from error
    if not isinstance(read, dict):
        raise ConfigError(f"{path} is not a JSON object", advice=f"Check {MOONCAKE_VARIABLE}.")
    known = {*mooncake_config.MEANT, *mooncake_config.IGNORED}
    mooncake_config.tell_unknown((key for key in read if key not in known), known, log)
    if "memory" not in given:
        mooncake_config.warn_if_no_memory(read, log)
    values = mooncake_config.settings_of(read, log)
    if "master" not in values and "master" not in given:
        raise ConfigError(
            f"{path} names no master of kvstore",
            advice=f'Add the line "master_server_address": "HOST:{DEFAULT_PORT}".',
            key="master",
            origin=str(path),
        )
    return values
