"""Huge pages, NUMA and locked memory, as the kernel itself says that they are there."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.calls import PutOutcome
from tests.support.cluster import NODE, Cluster, Node, unique_name
from tests.support.network_namespaces import need_own_shm, own_shm
from tests.support.processes import ROOT, Server, run_python
from tests.support.wait import until

MIB = 1 << 20
MEMORY = 32 * MIB
LARGE = os.urandom(3 * MIB + 17)
"""Longer than what is sent in one ``sendmsg`` with others."""

# What a client beside the node sees: by shared memory and by tcp, before and after the page tables
# were filled.
CLIENT = """
import sys
from kvstore import Client
from kvstore.memory import pages
with Client(sys.argv[1], transports=("shm",)) as near, Client(sys.argv[1], transports=("tcp",)) as far:
    value = bytes(range(256)) * 8000
    near.put("from-near", value)
    far.put("from-far", value)
    assert near.get("from-far") == value == far.get("from-near")
    view = near.get("from-near", copy=False, kind="numpy")
    assert bytes(view) == value
    for line in open("/proc/self/smaps"):
        name = line.split()[0]
        if "-" in name and ":" not in name:
            here = "kvstore." in line
        elif here and name in ("ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
            print(name, int(line.split()[1]) << 10)
"""  # noqa: E501


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        cluster.master()
        yield cluster


def kernel_says(pid: int, file: str, entry: str) -> str:
    """Of the mapping of that entry, in ``/proc/<pid>/<file>``."""
    text = Path(f"/proc/{pid}/{file}").read_text()
    if file == "numa_maps":
        return next(line for line in text.splitlines() if entry in line)
    about = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", text)
    return next(part for part in about if entry in part)


def refused(store: Cluster, tmp_path: Path, prefix: list[str], says: str, **settings: str) -> None:
    """It left nothing behind, which the fixtures see."""
    given = {"master": store.address, "name": unique_name(), "memory": "32MiB"} | settings
    server = Cluster(tmp_path, prefix=prefix).launch(NODE, given)
    try:
        assert server.wait() in (1, 2)
        assert says in server.errors
        assert "Traceback" not in server.errors
    finally:
        server.close()


def test_memory_is_bound_to_a_numa_node_and_its_processors(store: Cluster) -> None:
    node = store.node(numa_node=0)
    assert " bind:0 file=/dev/shm/" in kernel_says(node.pid, "numa_maps", node.entry.name)
    there = Path("/sys/devices/system/node/node0/cpulist").read_text().strip()
    allowed = re.search(r"Cpus_allowed_list:\s*(\S+)", Path(f"/proc/{node.pid}/status").read_text())
    assert allowed is not None
    assert allowed[1] == there


def test_memory_is_locked_where_it_is_allowed(store: Cluster) -> None:
    need_own_shm()  # CAP_IPC_LOCK: the limit does not count
    node = store.node()
    lines = kernel_says(node.pid, "smaps", node.entry.name)
    assert f"Locked:            {MEMORY >> 10:>5} kB" in lines
    assert "locked=True" in node.errors


def test_transparent_huge_pages_reach_node_and_clients(store: Cluster, tmp_path: Path) -> None:
    need_own_shm()
    for wish in ("auto", "transparent"):
        inner = Cluster(tmp_path, prefix=own_shm("huge=advise,size=256m"))
        node = inner.launch(
            NODE,
            {"master": store.address, "name": unique_name(), "memory": "32MiB"}
            | {"huge_pages": wish},
        )
        try:
            node.line("serves")
            assert f"huge_bytes={MEMORY} " in node.errors
            assert f"ShmemPmdMapped:    {MEMORY >> 10:>5} kB" in kernel_says(
                node.pid, "smaps", "/dev/shm/kvstore."
            )
            assert seen_by_client(store, node) == {"ShmemPmdMapped:": MEMORY}
            assert node.terminate() == 0
        finally:
            node.close()


@pytest.fixture
def reserved_pages() -> Iterator[None]:
    """Enough of them for one node of 32 MiB and no second one."""
    need_own_shm()
    sysctl = Path("/proc/sys/vm/nr_hugepages")
    before = int(sysctl.read_text())
    wanted = before + MEMORY // (2 * MIB) + 4
    try:
        sysctl.write_text(str(wanted))
        if int(sysctl.read_text()) < wanted:
            pytest.fail("the kernel finds no room for 20 huge pages of 2 MiB")
        yield
    finally:
        sysctl.write_text(str(before))


@pytest.fixture
def hugetlb(tmp_path: Path, reserved_pages: None) -> Iterator[Path]:
    """A hugetlbfs that all processes see, as a host's ``/dev/hugepages``."""
    del reserved_pages
    where = tmp_path / "huge pages"  # a name that /proc/mounts has to quote
    where.mkdir()
    mount = ["mount", "-t", "hugetlbfs", "-o", "pagesize=2M", "none", str(where)]
    subprocess.run(mount, check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_reserved_huge_pages_reach_node_and_clients(hugetlb: Path, store: Cluster) -> None:
    node = store.node(huge_pages="reserved", memory="33MiB")  # rounded down to whole pages
    assert not node.entry.exists()
    path = hugetlb / node.entry.name
    assert path.stat().st_size == MEMORY
    assert f"huge_bytes={MEMORY} " in node.errors
    seen = seen_by_client(store, node)
    assert sum(seen.values()) == MEMORY
    assert set(seen) <= {"Shared_Hugetlb:", "Private_Hugetlb:"}
    far = store.client(transports=("tcp",))
    assert far.put("large", LARGE) is PutOutcome.STORED
    assert far.get("large") == LARGE
    assert store.client().get("large") == LARGE
    assert node.terminate() == 0
    assert not path.exists()


def test_a_killed_node_leaves_reserved_pages_with_what_they_hold(
    hugetlb: Path, store: Cluster
) -> None:
    name = unique_name()
    first = store.node(huge_pages="reserved", name=name)
    path = hugetlb / first.entry.name
    client = store.client(timeout_ms=30_000)
    assert client.put("kept", LARGE) is PutOutcome.STORED
    first.kill()
    left = path.stat().st_ino
    second = store.node(huge_pages="reserved", name=name)
    assert path.stat().st_ino == left
    until(lambda: client.get("kept") == LARGE)
    second.kill()
    other = store.launch(NODE, {"name": name, "memory": "32MiB", "master": store.address})
    assert other.wait() == 1
    assert "memory of /dev/shm was asked for" in other.errors
    assert path.exists()


@pytest.mark.parametrize(
    ("prefix", "settings", "says"),
    [
        ([], {"numa_node": "1000"}, "there is no NUMA node 1000"),
        (own_shm("huge=never,size=256m"), {"huge_pages": "transparent"}, "mount -o remount,huge"),
        (
            ["unshare", "--mount", "sh", "-c", 'umount -a -t hugetlbfs; exec "$@"', "sh"],
            {"huge_pages": "reserved"},
            "no hugetlbfs is mounted",
        ),
    ],
    ids=["numa", "transparent", "reserved"],
)
def test_memory_that_cannot_be_had_is_refused(
    store: Cluster, tmp_path: Path, prefix: list[str], settings: dict[str, str], says: str
) -> None:
    need_own_shm()
    refused(store, tmp_path, prefix, says, **settings)


def test_too_few_reserved_pages_are_refused(hugetlb: Path, store: Cluster, tmp_path: Path) -> None:
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    memory = f"{2 * (free + 1)}MiB"
    refused(store, tmp_path, [], "not enough huge pages", huge_pages="reserved", memory=memory)
    assert list(hugetlb.iterdir()) == []


def seen_by_client(store: Cluster, node: Node | Server) -> dict[str, int]:
    """Bytes by huge pages in the mapping of a client that runs beside the node."""
    beside = ["nsenter", f"--mount=/proc/{node.pid}/ns/mnt", f"--wd={ROOT}"]
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{node.pid}/ns/mnt") == os.readlink("/proc/self/ns/mnt"):
            beside = []
    done = run_python("-c", CLIENT, store.address, prefix=beside)
    assert done.returncode == 0, done.stderr
    rows = (line.split() for line in done.stdout.splitlines())
    return {name: int(size) for name, size in rows if int(size)}
