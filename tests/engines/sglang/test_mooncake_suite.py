"""SGLang's own tests of its Mooncake back-end, on this store in Mooncake's place.

They are the module that SGLang ships, run as its authors run it: as a program, in a process of its
own. It prints a line for each test that has passed.
"""

from __future__ import annotations

import os
import subprocess
import sys

import kvstore.connectors.mooncake_shim
from tests.support.cluster import Cluster
from tests.support.processes import ROOT

MODULE = "sglang.srt.mem_cache.storage.mooncake_store.test_mooncake_store"
LIMIT_S = 150


def test_the_tests_that_sglang_ships(store: Cluster) -> None:
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [kvstore.connectors.mooncake_shim.python_path(os.environ), str(ROOT)]
        ),
        "MOONCAKE_MASTER": store.address,
        "MOONCAKE_PROTOCOL": "tcp",
        "MOONCAKE_GLOBAL_SEGMENT_SIZE": "0",
    }
    ran = subprocess.run(
        [sys.executable, "-m", MODULE], env=environ, cwd=ROOT, capture_output=True, text=True,
        timeout=LIMIT_S, check=False,
    )  # fmt: skip
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    assert "mooncake.store is kvstore" in said
    assert said.count("Single operation passed") == 1
    assert said.count("Batch operation passed") == 4  # MHA and MLA, alone and among ranks
    assert "All tests passed" in said
    assert store.used_bytes() > 0
