"""Child processes in a parent whose world is unusual: its folder, signals, descriptors, flags."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.errors import ConfigError
from tests.support.cluster import NODE
from tests.support.processes import ROOT

EMBEDDED = """
import os, signal, sys, time
sys.path.insert(0, {root!r})
from kvstore import Client
{before}
with Client.embedded("16MiB", timeout_ms=8_000) as client:
    client.put("key", b"value" * 10_000)
{within}
    assert client.get("key") == b"value" * 10_000
    print("fine", flush=True)
"""

TRAPS = ("click", "rich", "aiohttp", "numpy", "pydantic", "grpc", "token", "kvstore_plugin")


def program(*, before: str = "", within: str = "") -> str:
    inner = textwrap.indent(textwrap.dedent(within), "    ")
    return EMBEDDED.format(root=str(ROOT), before=textwrap.dedent(before), within=inner)


def run(
    flags: Sequence[str] = ("-c",), *, text: str, folder: Path = ROOT, prefix: Sequence[str] = ()
) -> tuple[str, str]:
    done = subprocess.run(
        [*prefix, sys.executable, *flags, text],
        cwd=folder, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.stdout, done.stderr


def trapped(folder: Path) -> Path:
    """A file that any module of ``TRAPS`` in ``folder`` writes to when it is imported."""
    mark = folder / "executed"
    for name in TRAPS:
        text = f"open({str(mark)!r}, 'a').write({name!r} + ' ')\nraise ImportError('not mine')\n"
        (folder / f"{name}.py").write_text(text)
    return mark


def test_an_embedded_store_executes_nothing_of_the_working_folder(tmp_path: Path) -> None:
    mark = trapped(tmp_path)
    out, err = run(("-P", "-c"), text=program(), folder=tmp_path)
    assert out == "fine\n", err
    assert not mark.exists(), mark.read_text()


def test_a_child_hears_its_end_whatever_its_parent_blocks() -> None:
    """The signal mask, and ignored signals, come from the thread that starts a child."""
    text = program(
        before="""
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            os.umask(0o777)
        """,
        within="""
            child, end = client._state.children[0], time.monotonic() + 8
            os.kill(child.pid, signal.SIGTERM)
            while os.path.exists(f"/proc/{child.pid}") and time.monotonic() < end:
                time.sleep(0.02)
            print("deaf" if os.path.exists(f"/proc/{child.pid}") else "gone", flush=True)
            os._exit(0)
        """,
    )
    out, err = run(text=text)
    assert out == "gone\n", err


@pytest.mark.parametrize("flags", [("-OO",), ("-W", "error"), ("-X", "dev"), ("-I",)])
def test_a_store_serves_under_any_flags_of_python(flags: tuple[str, ...]) -> None:
    out, err = run((*flags, "-c"), text=program())
    assert out == "fine\n", err
    assert "Warning" not in err


def test_the_error_of_a_childs_settings_reaches_the_caller(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ConfigError, match="64"):
        Client.embedded("64")
    assert capfd.readouterr().err == "", "it is told once"


def test_a_node_tells_its_parent_that_it_waits_for_a_master() -> None:
    ours, theirs = socket.socketpair()
    command = [
        sys.executable, "-m", NODE, "--config", "", "--parent-fd", str(theirs.fileno()),
        "--memory", "16MiB", "--master", "127.0.0.1:9", "--host", "127.0.0.1", "--no-keep",
    ]  # fmt: skip
    fds = [theirs.fileno()]
    with ours, subprocess.Popen(command, cwd=ROOT, pass_fds=fds, stderr=subprocess.DEVNULL) as node:
        theirs.close()
        ours.settimeout(60)
        with ours.makefile("rb") as lines:
            steps = [json.loads(lines.readline())["step"] for _ in range(2)]
        node.terminate()
    assert steps[0] == "reserves 16 MiB of memory"
    assert steps[1].startswith("waits for its master: ")
    assert "connection refused" in steps[1]


def test_a_parent_that_is_killed_ends_its_children() -> None:
    """They are in groups of their own: nothing but the end of the link reaches them."""
    text = program(within="print(client._state.children[0].pid, flush=True); time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        fd = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            assert select.select([fd], [], [], 20)[0]
        finally:
            os.close(fd)
