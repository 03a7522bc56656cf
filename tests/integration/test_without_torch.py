"""torch is optional: without it numpy and bytes work, and what needs it explains itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cluster import Cluster
from tests.support.processes import ROOT, run_python

PROGRAM = """
import importlib.abc, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "ml_dtypes"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())

import numpy as np
from kvstore import Client, errors

with Client(sys.argv[1]) as client:
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    client.put_many([("array", array), ("bytes", b"abc")])
    back = client.get("array")
    assert back.dtype == array.dtype and (back == array).all()
    assert (client.get("array", copy=False) == array).all()
    assert client.get("bytes") == b"abc"
    into = np.empty_like(array)
    assert client.get_into("array", into) == [12] and (into == array).all()
    room = client.allocate((2, 3), "float16", kind="numpy")
    room[:] = array
    client.put("computed", room)
    assert (client.get("computed") == array).all()
    # What somebody with torch has put:
    for key in ("tensor", "bfloat16"):
        for call in (
            lambda: client.get(key),
            lambda: client.get(key, copy=False),
            lambda: client.get("array", kind="torch"),
            lambda: client.allocate(4),
        ):
            try:
                call()
            except errors.UnsupportedValueError as error:
                assert "torch" in str(error) and error.advice, error
            else:
                raise AssertionError("no error")
    assert client.get("tensor", kind="numpy").tolist() == [0, 1, 2, 3]
    assert len(client.get("bfloat16", kind="bytes")) == 8
    try:
        client.get("bfloat16", kind="numpy")
    except errors.UnsupportedValueError as error:
        assert "ml_dtypes" in str(error)
    else:
        raise AssertionError("no error")
    raw = bytearray(8)
    assert client.get_into("bfloat16", raw) == [8]
    assert "torch" not in sys.modules
    print("done", client.get("array").sum())
"""


def test_everything_but_tensors_works_without_torch(store: Cluster) -> None:
    torch = pytest.importorskip("torch")
    client = store.client()
    client.put("tensor", torch.arange(4))
    client.put("bfloat16", torch.arange(4, dtype=torch.bfloat16))
    done = run_python("-c", PROGRAM, store.address)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done 15.0\n"


def test_a_client_imports_no_torch_of_itself() -> None:
    program = "import sys, kvstore.client.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
