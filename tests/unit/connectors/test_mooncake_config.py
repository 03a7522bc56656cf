"""Mooncake's keys in dictionaries that also hold this store's settings."""

from __future__ import annotations

import logging

import pytest

from kvstore.config import ClientConfig, ConnectorConfig
from kvstore.connectors.common.mooncake_config import IGNORED, MEANT, translate_config

log = logging.getLogger("kvstore.test")


def test_each_key_is_a_setting_of_a_client_and_of_a_connector() -> None:
    assert set(MEANT.values()) <= set(ClientConfig.model_fields) & set(ConnectorConfig.model_fields)
    assert not set(MEANT) & IGNORED


def test_a_dictionary_of_mooncakes_keys() -> None:
    """As in LMCache's guide, whose values may all be texts."""
    given = {
        "local_hostname": "h", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp",
        "master_server_addr": "m:1", "global_segment_size": "3gb", "rdma_devices": "mlx5_0",
    }  # fmt: skip
    assert translate_config(given, log) == {"master": "m:1", "memory": "3GiB"}
    assert translate_config({**given, "protocol": "rdma"}, log) == {
        "master": "m:1", "memory": "3GiB", "protocol": "rdma", "device_name": "mlx5_0",
        "metadata_server": "P2PHANDSHAKE",
    }  # fmt: skip


def test_own_settings_count_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvstore.test")
    given = {"master": None, "master_server_address": "m:1", "memory": "1GiB", "mode": "embedded"}
    assert translate_config(given, log) == {"master": "m:1", "memory": "1GiB"}
    assert caplog.messages == ["key_ignored key=mode see=docs/from-mooncake.md"]
