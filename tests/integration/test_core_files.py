"""Keys and blocks stay out of core files, and out of reach of other processes of the same user."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.memory.mapping import Mapping
from kvstore.memory.segment import OwnedSegment
from tests.support.certificates import Identities
from tests.support.cluster import Cluster
from tests.support.processes import children_of, free_port, run_python
from tests.support.programs import skip
from tests.support.wait import until

WITHOUT_TRACING = ["setpriv", "--bounding-set", "-sys_ptrace"] if os.geteuid() == 0 else []
"""As root a process may look into every other one, unless it gives up that right."""

DIES = """
import os, resource, sys
from kvstore.runtime import memory_protection
os.chdir(sys.argv[2])
child = os.fork()
if not child:
    resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    if sys.argv[1] == "hidden":
        memory_protection.hide_memory()
    os.abort()
_, status = os.waitpid(child, 0)
assert os.WIFSIGNALED(status)
print(os.WCOREDUMP(status))
"""


def test_a_hidden_process_leaves_no_core_file(tmp_path: Path) -> None:
    dumped = [
        run_python("-c", DIES, how, str(tmp_path), check=True).stdout.strip()
        for how in ("plain", "hidden")
    ]
    if dumped[0] == "False":
        skip("this host writes no core files at all")
    assert dumped == ["True", "False"]


def can_look_into(pid: int) -> bool:
    """Whether another process of this user can read the process's memory."""
    code = f"open('/proc/{pid}/mem', 'rb')"
    done = subprocess.run(
        [*WITHOUT_TRACING, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or "PermissionError" in done.stderr, done.stderr
    return done.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("has_identities", [False, True])
def test_servers_with_identities_are_hidden(tmp_path: Path, has_identities: bool) -> None:
    identities = Identities(tmp_path) if has_identities else None
    settings = {"http_port": free_port()}
    with Cluster(
        tmp_path, settings=settings, identities=identities, prefix=WITHOUT_TRACING
    ) as cluster:
        cluster.start()
        master = cluster.master_server.process.pid
        [web] = until(lambda: children_of(master))
        for pid in (master, web, cluster.nodes[0].process.pid):
            assert can_look_into(pid) is not has_identities
        client = cluster.client()
        client.put("k", b"v")
        assert client.get("k", kind="bytes") == b"v"


def test_blocks_are_not_dumped() -> None:
    """Neither by the node nor by a client that maps its memory, also once its entry is gone."""
    segment = OwnedSegment.create(f"core-{os.getpid()}", 1 << 20)
    mapping = None
    try:
        mapping = Mapping.attach(segment.shm_name, segment.uuid)
        assert mapping.readonly_view() is not None
        each = re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())
        ours = [mapped for mapped in each if f"/{segment.shm_name}\n" in mapped]
        assert len(ours) == 3, "the node's, the client's to write and the client's to show"
        for mapped in ours:
            assert re.search(r"^VmFlags:.* dd( |$)", mapped, re.MULTILINE), mapped
    finally:
        if mapping is not None:
            mapping.close()
        segment.close()
