"""Where the connector's settings come from, and which one wins."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import vllm

from kvstore.config import ConnectorConfig
from kvstore.connectors.common.mooncake_config import MEANT
from kvstore.connectors.vllm.config import (
    MOONCAKE_VARIABLE,
    OF_VLLM,
    RENAMED,
    read_config,
)
from kvstore.errors import ConfigError

NO_FILE = {"KVSTORE_CONFIG": ""}

Mooncake = Callable[..., dict[str, str]]


@pytest.fixture
def mooncake(tmp_path: Path) -> Mooncake:
    """An environment that names a ``mooncake.json`` of a master and of these values."""

    def write(**values: object) -> dict[str, str]:
        path = tmp_path / "mooncake.json"
        path.write_text(json.dumps({"master_server_address": "store:9", **values}))
        return {**NO_FILE, MOONCAKE_VARIABLE: str(path)}

    return write


def toml(tmp_path: Path, text: str) -> dict[str, str]:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    return {"KVSTORE_CONFIG": str(path)}


def test_a_mooncake_file_may_name_an_etcd(mooncake: Mooncake) -> None:
    config = read_config({}, mooncake(master_server_address="etcd://10.0.0.1:2379;10.0.0.2:2379"))
    assert config.master == "etcd://10.0.0.1:2379,10.0.0.2:2379/kvstore"


def test_an_unknown_key_is_named_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError) as raised:
        read_config({"save_decodes": True}, NO_FILE)
    assert "save_decodes" in str(raised.value)
    assert "save_decode" in raised.value.advice.replace("save_decodes", "")
    assert "kv_connector_extra_config" in str(raised.value)


def test_a_wrong_value_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"lookup_deadline_ms.*kv_connector_extra_config"):
        read_config({"lookup_deadline_ms": 0}, NO_FILE)


def test_variables_count_and_extra_config_counts_more() -> None:
    environ = {
        **NO_FILE, "KVSTORE_CONNECTOR_LOOKUP_DEADLINE_MS": "7", "KVSTORE_CONNECTOR_TP_SHARDS": "4",
    }  # fmt: skip
    config = read_config({"tp_shards": 2}, environ)
    assert config.lookup_deadline_ms == 7
    assert config.tp_shards == 2
    assert read_config({}, {**NO_FILE, "KVSTORE_MASTER": "both:1"}).master == "both:1"


def test_a_toml_file_counts_least_but_more_than_mooncake(
    tmp_path: Path, mooncake: Mooncake
) -> None:
    environ = mooncake(master_server_address="mooncake:1", global_segment_size="2mb")
    environ |= toml(tmp_path, '[connector]\nmaster = "toml:1"\nreplicas = 2\n')
    config = read_config({}, environ)
    assert config.master == "toml:1"
    assert config.replicas == 2
    assert config.memory == 2 << 20
    environ["KVSTORE_CONNECTOR_MASTER"] = "variable:1"
    assert read_config({}, environ).master == "variable:1"
    assert read_config({"master": "extra:1"}, environ).master == "extra:1"


# --- mooncake.json --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("4GB", 4 << 30), ("4 g", 4 << 30), ("4GiB", 4 << 30), ("2048k", 2 << 20),
        ("1.5gb", 3 << 29), ("2097152b", 2 << 20), (2097152, 2 << 20), ("0", 0), ("1tb", 1 << 40),
    ],
)  # fmt: skip
def test_sizes_mean_what_they_mean_in_mooncake(
    mooncake: Mooncake, written: str | int, size: int
) -> None:
    assert read_config({}, mooncake(global_segment_size=written)).memory == size


@pytest.mark.parametrize("written", ["gb", [1], -5, "4xb"])
def test_a_size_that_is_none_is_refused_with_its_place(mooncake: Mooncake, written: object) -> None:
    with pytest.raises(ConfigError, match=f"memory.*{MOONCAKE_VARIABLE}"):
        read_config({}, mooncake(global_segment_size=written))


GUIDES: dict[str, dict[str, object]] = {
    "vLLM 0.6, rdma": {
        "prefill_url": "192.168.0.137:13003", "decode_url": "192.168.0.139:13003",
        "metadata_server": "192.168.0.139:2379", "metadata_backend": "etcd", "protocol": "rdma",
        "device_name": "erdma_0",
    },
    "vLLM 0.32": {
        "mode": "embedded", "metadata_server": "P2PHANDSHAKE", "global_segment_size": "80GB",
        "master_server_address": "127.0.0.1:50051", "local_buffer_size": "4GB",
        "protocol": "rdma", "device_name": "", "enable_offload": False, "tenant_id": "default",
    },
    "Ascend": {
        "metadata_server": "P2PHANDSHAKE", "protocol": "ascend", "device_name": "",
        "master_server_address": "127.0.0.1:50088", "global_segment_size": "5GB",
        "local_buffer_size": "5GB", "preferred_segment": False, "use_ascend_direct": True,
        "prefer_alloc_in_same_node": True, "staging_buffer_size": 0,
    },
    "LMCache": {
        "local_hostname": "a", "metadata_server": "http://a:8080/metadata", "protocol": "rdma",
        "device_name": "mlx5_0", "master_server_address": "a:50051", "transfer_timeout": 1,
        "global_segment_size": 32212254720, "local_buffer_size": 1073741824,
        "storage_root_dir": "/x", "prefer_local_alloc": True, "save_chunk_meta": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("guide", GUIDES)
def test_the_files_of_guides_are_understood(
    mooncake: Mooncake, caplog: pytest.LogCaptureFixture, guide: str
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvstore")
    given = GUIDES[guide]
    config = read_config({}, mooncake(**given))
    assert config.master == given.get("master_server_address", "store:9")
    assert config.protocol == ("rdma" if given["protocol"] == "rdma" else "")
    ignored = {key for key in given if given[key] and f"key={key} see" in caplog.text}
    if not config.protocol:
        ignored -= {"metadata_server"}
    assert ignored == {key for key in given if given[key] and key not in MEANT}


def test_a_key_of_another_program_stops_nothing(
    mooncake: Mooncake, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvstore")
    config = read_config({}, mooncake(globl_segment_size=1, save_chunk_meta=False))
    assert config.memory == 0
    assert "key=globl_segment_size reason=unknown did_you_mean=global_segment_size" in caplog.text
    assert caplog.messages.count("key_ignored key=save_chunk_meta reason=unknown") == 1


def test_the_line_for_a_master_is_printed_where_no_source_names_one(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    path.write_text('{"metadata_server": "127.0.0.1:2379", "metadata_backend": "etcd"}')
    environ = {**NO_FILE, MOONCAKE_VARIABLE: str(path)}
    with pytest.raises(ConfigError, match=r"mooncake\.json names no master") as raised:
        read_config({}, environ)
    assert '"master_server_address": "HOST:50001"' in raised.value.advice
    assert read_config({"master": "extra:1"}, environ).master == "extra:1"
    assert read_config({}, {**environ, "KVSTORE_MASTER": "both:1"}).master == "both:1"


@pytest.mark.parametrize(
    ("file", "is_told"),
    [({}, True), ({"global_segment_size": 0}, False), ({"mode": "standalone-store"}, False)],
)
def test_a_missing_segment_size_is_told(
    mooncake: Mooncake, caplog: pytest.LogCaptureFixture, file: dict[str, object], is_told: bool
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvstore")
    read_config({}, mooncake(**file))
    assert ("key_missing key=global_segment_size" in caplog.text) is is_told


def test_options_of_vllms_own_connectors_are_told_and_others_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "vllm.kvstore")
    extra = {"num_workers": 8, "load_async": False, "save_decode_cache": False}
    assert not read_config(extra, NO_FILE).save_decode
    assert read_config({**extra, "save_decode": True}, NO_FILE).save_decode
    assert "key=num_workers see=docs/from-mooncake.md" in caplog.text
    with pytest.raises(ConfigError, match="num_worker "):
        read_config({"num_worker": 8}, NO_FILE)


def test_options_of_the_installed_vllm_are_all_known() -> None:
    where = Path(vllm.__file__).parent / "distributed/kv_transfer/kv_connector/v1/mooncake"
    text = "".join(path.read_text() for path in where.rglob("*.py"))
    read = set(re.findall(r'extra_config(?:\.get|\[|\()\(?\s*"(\w+)"', text))
    assert {"num_workers", "lookup_rpc_port", "bootstrap_server_address"} <= read
    assert read <= {*OF_VLLM, *RENAMED, *ConnectorConfig.model_fields}


def test_a_protocol_that_is_not_there_is_told(
    mooncake: Mooncake, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_config({}, mooncake(protocol="cxl", device_name="mlx5_0"))
    assert "protocol_not_available protocol=cxl" in caplog.text
    assert (config.protocol, config.device_name) == ("", "")


@pytest.mark.parametrize(
    ("backend", "written", "meant"),
    [
        ("etcd", "P2PHANDSHAKE", "P2PHANDSHAKE"),
        ("etcd", "10.0.0.1:2379", "etcd://10.0.0.1:2379"),
        ("etcd", "http://10.0.0.1:8080/metadata", "http://10.0.0.1:8080/metadata"),
        ("etcd", "", "P2PHANDSHAKE"),
        ("redis", "h:6379", "redis://h:6379"),
    ],
)
def test_what_is_said_of_rdma_is_for_the_transfer_engine(
    mooncake: Mooncake, backend: str, written: str, meant: str
) -> None:
    given = {"metadata_server": written, "metadata_backend": backend}
    environ = mooncake(protocol="RDMA", device_name="mlx5_0, mlx5_1", **given)
    config = read_config({}, environ)
    assert config.protocol == "rdma"
    assert config.device_name == "mlx5_0,mlx5_1"
    assert config.metadata_server == meant


@pytest.mark.parametrize("key", ["master_server_address", "device_name", "global_segment_size"])
def test_a_value_of_another_type_is_refused_with_its_place(mooncake: Mooncake, key: str) -> None:
    with pytest.raises(ConfigError, match=MOONCAKE_VARIABLE):
        read_config({}, mooncake(**{"protocol": "rdma", key: [1]}))


def test_an_unreadable_mooncake_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.json"
    for text in (None, "{", "[1]", '"text"'):
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=r"mooncake\.json") as raised:
            read_config({}, {**NO_FILE, MOONCAKE_VARIABLE: str(path)})
        assert MOONCAKE_VARIABLE in raised.value.advice
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match=r"mooncake\.json"):
        read_config({}, {**NO_FILE, MOONCAKE_VARIABLE: str(path)})
