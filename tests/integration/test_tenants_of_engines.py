"""Two teams whose engines have equal weights, told apart by the setting ``tenant``: what each of
them, and who operates the store, can see of their engines."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.connectors.engine.fleet import FleetRecords
from kvstore.errors import PermissionDeniedError
from kvstore.fleet import Record
from kvstore.limits import FLEET_NAMESPACE, of_tenant
from tests.support.cluster import Cluster
from tests.support.issuing import Identities
from tests.support.processes import free_port

TENANTS = ("acme", "globex")
BLOCKS = [bytes([number]) * 32 for number in range(1, 9)]
FINGERPRINT = "ab" * 16


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def store(tmp_path: Path, identities: Identities, port: int) -> Iterator[Cluster]:
    """Each tenant's engine has announced itself; that of acme has stored a prompt, and that of
    globex has asked for the same one. Each has a file for its own namespaces only."""
    with Cluster(tmp_path, settings={"http_port": port}, identities=identities) as cluster:
        cluster.start(1)
        for tenant in TENANTS:
            auth = identities.engine(tenant, f"{tenant}/*")
            space = of_tenant(tenant, f"vllm/{FINGERPRINT}/g0/p0t0")
            record = Record("vllm", ("/models/m",), FINGERPRINT, (space,), {"dtype": "float16"})
            with cluster.client(name=f"engine-of-{tenant}", auth=auth, tenant=tenant) as client:
                FleetRecords(client, logging.getLogger("test")).announce(record)
                if tenant == "acme":
                    client.put_chain(BLOCKS, [b"x"] * len(BLOCKS), namespace=space)
                assert client.match_prefix(BLOCKS, namespace=space) == (
                    len(BLOCKS) if tenant == "acme" else 0
                )
        yield cluster


def why(store: Cluster, auth: str, *arguments: str, **variables: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-m", "kvstore.cli.main", "why", "--json", *arguments],
        capture_output=True,
        env={**os.environ, "KVSTORE_MASTER": store.address, "KVSTORE_AUTH": auth, **variables},
        timeout=60,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_why_says_to_each_tenant_what_its_engines_do(
    store: Cluster, identities: Identities
) -> None:
    for tenant, code in (("acme", "fine"), ("globex", "only_readers")):
        told = why(store, identities.file(tenant), KVSTORE_TENANT=tenant)
        assert [each["name"] for each in told["parties"]] == [f"{tenant}/vllm {FINGERPRINT[:8]}"]
        assert [each["code"] for each in told["causes"]] == [code]
        assert not [name for name in TENANTS if name != tenant and name in json.dumps(told)]


def test_a_tenant_cannot_read_the_fleet_of_another_one_nor_write_into_it(
    store: Cluster, identities: Identities
) -> None:
    with store.client(auth=identities.file("acme"), tenant="acme") as client:
        for space in ("globex/vllm-fleet", FLEET_NAMESPACE):
            with pytest.raises(PermissionDeniedError):
                list(client.list_objects(namespace=space))
            with pytest.raises(PermissionDeniedError):
                client.put("m/" + FINGERPRINT, b"x" * 64, namespace=space)
