"""An entry of ``/dev/shm`` that another program removes while its node runs, as systemd does."""

from __future__ import annotations

from pathlib import Path

from tests.support.cluster import SHORT, Cluster
from tests.support.processes import KVSTORE, run_python
from tests.support.wait import until

KEYS = [f"k{number}" for number in range(20)]


def test_a_removed_entry_is_told_and_costs_speed_alone(tmp_path: Path) -> None:
    with Cluster(tmp_path, settings=SHORT) as cluster:
        cluster.start()
        (node,) = cluster.nodes
        client = cluster.client()
        for key in KEYS:
            client.put(key, key.encode())
        assert not cluster.status().nodes[0].shm_entry_missing
        node.entry.unlink()
        until(lambda: cluster.status().nodes[0].shm_entry_missing)
        assert node.errors.count("shm_entry_missing") == 1
        assert "RemoveIPC" in node.errors
        assert "node_shm_entry_missing" in cluster.master_server.errors
        newcomer = cluster.client()
        for each in (client, newcomer):
            assert [each.get(key) for key in KEYS] == [key.encode() for key in KEYS]
        doctor = run_python(*KVSTORE, "doctor", "--master", cluster.address, within_s=120)
        assert doctor.returncode == 1
        assert "has no entry in /dev/shm any more" in doctor.stdout
        assert "RemoveIPC" in doctor.stdout
