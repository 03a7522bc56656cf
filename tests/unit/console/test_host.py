"""What is said of hosts that are not like this one: with RDMA, with two NUMA nodes, with limits."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.console.diagnostics import host
from kvstore.errors import ConfigError
from kvstore.memory import numa

GIB = 1 << 30


@pytest.fixture
def rdma(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with one card of one port, whose files everybody may open; as sysfs shows it."""
    port = tmp_path / "class" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("InfiniBand\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    files = tmp_path / "dev"
    files.mkdir()
    (files / "uverbs0").touch()
    monkeypatch.setattr(host, "RDMA_DEVICES", tmp_path / "class")
    monkeypatch.setattr(host, "RDMA_FILES", files)
    return tmp_path


def test_a_card_that_is_well(rdma: Path) -> None:
    card, files, *libraries = host.rdma()
    assert card.found == "mlx5_0: port 1 active (InfiniBand, 400 Gb/sec (4X NDR))"
    assert (card.state, files.state) == ("ok", "ok")
    assert all("apt-get install" in each.advice for each in libraries), "where they are missing"
    assert rdma.exists()


def test_a_container_without_the_device_files(rdma: Path) -> None:
    (rdma / "dev" / "uverbs0").unlink()
    _, found, *_ = host.rdma()
    assert found.state == "problem"
    assert "--device=/dev/infiniband" in found.advice


@pytest.fixture
def lock_limit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """1 MiB of locked memory, for a user without rights."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    monkeypatch.setattr(host, "may_lock_all", lambda: False)
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.mark.parametrize(
    ("cards", "swap", "state"),
    [(False, False, "ok"), (False, True, "warning"), (True, False, "problem")],
)
def test_a_limit_of_locked_memory_matters_with_rdma_or_swap(
    lock_limit: None, monkeypatch: pytest.MonkeyPatch, cards: bool, swap: bool, state: str
) -> None:
    monkeypatch.setattr(host, "rdma_devices", lambda: [Path("mlx5_0")] if cards else [])
    monkeypatch.setattr(host, "has_swap", lambda: swap)
    [found] = host.locked_memory(GIB)
    assert found.state == state
    assert "limited to 1.00 MiB" in found.found
    assert found.state == "ok" or "ulimit -l unlimited" in found.advice
    assert lock_limit is None


def test_two_numa_nodes_want_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "has_memory").write_text("0-1,4\n")
    monkeypatch.setattr(numa, "NODES", tmp_path)
    [found] = host.numa_nodes()
    assert found.advice.endswith("--numa-node 0; --numa-node 1; --numa-node 4")
    numa.check_node(4)
    with pytest.raises(ConfigError) as caught:
        numa.check_node(2)
    assert "There are: 0, 1, 4." in caught.value.advice
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("0-1023\n")
    assert numa.processors_of(1) == os.sched_getaffinity(0)
    assert numa.processors_of(4) == set(), "memory without processors"
