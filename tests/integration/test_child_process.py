"""Child processes of a program: under any flags of Python, and when it is killed."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.errors import ConfigError
from tests.support.processes import ROOT, Server, children_of, is_running
from tests.support.wait import until

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


def test_a_plan_that_is_killed_ends_its_processes(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(
        json.dumps({"timestamp": 9 * number, "input_length": 20_480,
                    "hash_ids": [*range(first, first + 40)]}) + "\n"
        for number in range(20_000) for first in (number % 800 * 40,)
    ))  # fmt: skip
    arguments = ["plan", str(trace), "--memory", "1GiB,9GiB", "--block-bytes", "1MiB", "--sample=1"]
    plan = Server("kvstore.cli.main", arguments, log=tmp_path / "log")
    try:
        processes = until(lambda: children_of(plan.pid), within_s=30)
        plan.kill()
        until(lambda: not any(map(is_running, processes)), within_s=20)
    finally:
        plan.close()
