"""``mooncake_master`` as guides start it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import kvstore.connectors.mooncake_shim
from kvstore.cli import as_mooncake
from kvstore.cli.as_mooncake import MEANT, translate_arguments
from kvstore.cli.master import command
from kvstore.config import MasterConfig
from tests.support.processes import KVSTORE, run_python


def config_of(typed: str) -> tuple[MasterConfig, set[str]]:
    """The settings of the master that is started, and the flags that are named as ignored."""
    own, ignored = translate_arguments(typed.split())
    given = command.make_context("kvstore-master", list(own)).params
    fields = {key: value for key, value in given.items() if key in MasterConfig.model_fields}
    settings = MasterConfig(**{key: value for key, value in fields.items() if value is not None})
    return settings, set(ignored)


@pytest.mark.parametrize(
    ("typed", "meant", "ignored"),
    [
        ("", {"host": "0.0.0.0", "port": 50051}, ""),
        ("--port 50001", {"port": 50001}, ""),
        ("-port=50001 -rpc_address 10.0.0.7", {"host": "10.0.0.7", "port": 50001}, ""),
        (
            "-v=1 --rpc_port=50052 --port 1 --metrics_port=9003 --enable_http_metadata_server=true "
            "--http_metadata_server_host=0.0.0.0 --http_metadata_server_port=8080",
            {"port": 50052, "http_port": 9003},
            "v enable_http_metadata_server http_metadata_server_host http_metadata_server_port",
        ),
        (
            "--rpc_port 0 --port 50088 --eviction_high_watermark_ratio 0.9 --eviction_ratio 0.1 "
            "--rpc_thread_num 8 --max_threads 4 --root_fs_dir /x --cluster_id c",
            {"port": 50088},
            "eviction_high_watermark_ratio eviction_ratio rpc_thread_num max_threads root_fs_dir "
            "cluster_id",
        ),
        ("--default_kv_lease_ttl 11000", {"lease_ms": 11_000}, ""),
        ("--default_kv_lease_ttl=5s", {"lease_ms": 5_000}, ""),
        ("--default_kv_lease_ttl=0", {"lease_ms": as_mooncake.LEASE_MS_MIN}, ""),
        ("--default_kv_lease_ttl=1h", {"lease_ms": as_mooncake.LEASE_MS_MAX}, ""),
        (
            "--enable_ha --etcd_endpoints=10.0.1.1:2379;10.0.1.2:2379 --rpc_address=10.0.0.7",
            {"etcd": "etcd://10.0.1.1:2379,10.0.1.2:2379/kvstore"},
            "",
        ),
        ("--enable_ha=false --etcd_endpoints=10.0.1.1:2379", {"etcd": ""}, ""),
        (
            "--enable_kv_events --kv_events_bind_endpoint tcp://*:5557",
            {"events": "tcp://*:5557"},
            "",
        ),
        ("--enable_kv_events=1", {"events": "on"}, ""),
        ("--kv_events_bind_endpoint tcp://*:5557", {"events": ""}, ""),
        ("--host 10.0.0.7 --memory 1GiB --dead-ms 7000", {"host": "10.0.0.7", "dead_ms": 7000}, ""),
        ("--enable_snapshot --quota_bytes 7 --port 1", {"port": 1}, "enable_snapshot quota_bytes"),
    ],
)
def test_the_flags_of_guides(typed: str, meant: dict[str, object], ignored: str) -> None:
    settings, told = config_of(typed)
    assert {key: getattr(settings, key) for key in meant} == meant
    assert told == set(ignored.split())


def test_flags_are_settings() -> None:
    assert {flag[2:].replace("-", "_") for flag in MEANT.values()} <= set(MasterConfig.model_fields)


def test_what_is_started_is_told() -> None:
    done = run_python(*KVSTORE, "as-mooncake", "mooncake_master", "--port", "x", "--max_threads=4")
    assert done.returncode == 2
    assert "--max_threads has no effect" in done.stderr
    assert "mooncake_master is kvstore-master --host 0.0.0.0 --port x" in done.stderr
    assert "port" in done.stderr.splitlines()[-1]


def test_no_password_is_told() -> None:
    typed = "--enable_ha --etcd_endpoints=me:secret1@10.0.1.1:2379 --port x"
    done = run_python(*KVSTORE, "as-mooncake", "--", "mooncake_master", *typed.split())
    assert done.returncode == 2
    assert "--etcd 10.0.1.1:2379" in done.stderr
    assert "secret" not in done.stderr


def test_a_script_finds_the_commands(tmp_path: Path) -> None:
    """``kvstore`` itself may be in no folder of ``PATH``; here a stand-in for it is in one."""
    stand_in = tmp_path / "kvstore"
    stand_in.write_text('#!/bin/sh\necho "$@"\n')
    stand_in.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.defpath}"}
    assert kvstore.connectors.mooncake_shim.path(
        {**environ, "PATH": kvstore.connectors.mooncake_shim.path(environ)}
    ) == (kvstore.connectors.mooncake_shim.path(environ))
    script = "mooncake_master --port 1; mooncake_http_metadata_server"
    done = subprocess.run(
        ["/bin/sh", "-c", script], env={"PATH": kvstore.connectors.mooncake_shim.path(environ)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        "as-mooncake -- mooncake_master --port 1",
        "as-mooncake -- mooncake_http_metadata_server",
    ]
