"""Names of hosts: a silent name server, and a host's own name that is a loopback address."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.programs import skip

pytestmark = pytest.mark.netns


@pytest.mark.parametrize("program", ["silent", "own_name"])
def test_names(program: str) -> None:
    if os.geteuid():
        skip("needs root: namespaces with names of their own were not tested")
    command = ["unshare", "--mount", "--net", "--uts", sys.executable, "-m"]
    done = subprocess.run(
        [*command, "tests.integration.names_apart", program],
        check=False,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stdout + done.stderr
