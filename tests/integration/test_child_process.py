"""Child processes of a program: under any flags of Python, and when it is killed."""

from __future__ import annotations

import os
import select
import subprocess
import sys

import pytest

from kvstore import Client
from kvstore.errors import ConfigError
from tests.support.processes import ROOT

EMBEDDED = f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
from kvstore import Client
with Client.embedded("16MiB", timeout_ms=8_000) as client:
    client.put("key", b"value" * 10_000)
    assert client.get("key") == b"value" * 10_000
    print(client._state.children[0].pid, flush=True)
    time.sleep(float(sys.argv[1]))
"""


@pytest.mark.parametrize("flags", [("-OO",), ("-W", "error"), ("-X", "dev"), ("-I",)])
def test_a_store_serves_under_any_flags_of_python(flags: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, *flags, "-c", EMBEDDED, "0"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr


def test_the_error_of_a_childs_settings_reaches_the_caller(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match="64"):
        Client.embedded("64")
    assert capfd.readouterr().err == "", "it is told once"


def test_a_parent_that_is_killed_ends_its_children() -> None:
    """They are in groups of their own: nothing but the end of the link reaches them."""
    command = [sys.executable, "-c", EMBEDDED, "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        fd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            assert select.select([fd], [], [], 20)[0]
        finally:
            os.close(fd)
