"""Tenants of a master that runs, by its file and as its users see them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvstore.errors import NoSpaceError
from tests.support.cluster import Cluster

VALUE = bytes(63 << 10)
TEXT = """
[acme]
namespaces = ["acme/*"]
guarantee = "4MiB"
limit = "{limit}"
pin_limit = "1MiB"
[small]
namespaces = ["small"]
limit = "1MiB"
"""


def write(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def held(cluster: Cluster) -> dict[str, int]:
    return {row.name: row.bytes for row in cluster.status().tenants}


def test_tenants_keep_their_quotas_and_a_changed_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    write(path, TEXT.format(limit="6MiB"))
    with Cluster(tmp_path, settings={"tenants": path}) as cluster:
        cluster.start(memory="16MiB")
        client = cluster.client()
        for number in range(64):
            client.put(f"k{number}", VALUE, namespace="acme/a")
        for number in range(300):  # fills the pool several times
            client.put(f"k{number}", VALUE, namespace="other")
        assert held(cluster)["acme"] >= 4 << 20
        for number in range(40):
            client.put(f"k{number}", VALUE, namespace="small")
        assert held(cluster)["small"] <= 1 << 20
        with pytest.raises(NoSpaceError, match="tenant small may hold at most 1 MiB") as refused:
            client.put("large", bytes(2 << 20), namespace="small", wait_ms=0)
        assert refused.value.fields["tenant"] == "small"
        keys = [f"k{number}" for number in range(64)]
        with pytest.raises(NoSpaceError, match="tenant acme has"):
            client.pin(keys, 60, namespace="acme/a")

        write(path, TEXT.format(limit="2TiB").replace("[small]", "[small"))
        deadline = time.monotonic() + 10
        while "file_refused setting=tenants" not in cluster.master_server.errors:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        write(path, TEXT.format(limit="5MiB"))
        while "tenants_changed tenants=2" not in cluster.master_server.errors:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        for number in range(100):
            client.put(f"n{number}", VALUE, namespace="acme/b")
        assert held(cluster)["acme"] <= 5 << 20

        command = [
            sys.executable,
            "-m",
            "kvstore.cli.main",
            "--master",
            cluster.address,
            "--json",
            "status",
        ]
        told = subprocess.run(command, capture_output=True, check=True, timeout=60).stdout
        rows = {row["name"]: row for row in json.loads(told)["tenants"]}
        assert rows.keys() == {"", "acme", "small"}
        assert rows["acme"]["guarantee_bytes"] == 4 << 20
        assert rows["acme"]["refused"] == rows["small"]["refused"] == 1
