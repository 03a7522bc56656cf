"""``kvstore quickstart`` in a terminal of its own."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvstore.memory.shm_entries import SHM_PREFIX
from kvstore.runtime.host import SHM_DIRECTORY
from tests.support.processes import ROOT
from tests.support.wait import until

READY = re.compile(rb"Dashboard: http://127\.0\.0\.1:(\d+)/\n")


class Quickstart:
    """One in a terminal of its own, as its foreground job."""

    def __init__(
        self,
        *arguments: str,
        python: str = sys.executable,
        at: Path = ROOT,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """``variables``: its environment; None: this process's."""
        self.terminal, theirs = os.openpty()
        self.process = subprocess.Popen(
            [
                shutil.which("setsid") or "setsid",  # not by the PATH of ``variables``
                "--ctty",
                python,
                "-m",
                "kvstore.cli.main",
                "quickstart",
                *arguments,
            ],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=at,
            env={
                **(os.environ if variables is None else variables),
                "KVSTORE_CONFIG": "",
                "COLUMNS": "400",
            },
        )
        os.close(theirs)
        self._said = b""
        self.port = self.http_port = 0

    def ready(self) -> None:
        try:
            found = until(self._ready_or_ended, within_s=60)
        except pytest.fail.Exception as error:
            pytest.fail(f"{error}: {self.text}")
        self.http_port = int(found[0])
        self.port = int(re.findall(r"ready at 127\.0\.0\.1:(\d+)", self.text)[0])

    def _ready_or_ended(self) -> list[bytes]:
        found = READY.findall(self.said())
        if not found and self.process.poll() is not None:
            pytest.fail("it has ended")
        return found

    def said(self) -> bytes:
        os.set_blocking(self.terminal, False)
        with contextlib.suppress(BlockingIOError, OSError):  # EIO: it has ended
            while data := os.read(self.terminal, 1 << 16):
                self._said += data.replace(b"\r\n", b"\n")
        return self._said

    @property
    def text(self) -> str:
        return self.said().decode()

    def line(self, first: str) -> str:
        (found,) = re.findall(rf"^  ({re.escape(first)}.*)$", self.text, re.MULTILINE)
        return str(found)

    def group(self) -> list[int]:
        """All processes of its session."""
        found = []
        for each in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                if int(each.read_text().rpartition(")")[2].split()[3]) == self.process.pid:
                    found.append(int(each.parent.name))
        return found

    def end(self) -> None:
        """Ends it by force, and removes what it had no time to remove."""
        for pid in self.group():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.close_terminal()
        if self.port:
            for entry in self.entries():
                entry.unlink()

    def close_terminal(self) -> None:
        terminal, self.terminal = self.terminal, -1
        if terminal >= 0:
            os.close(terminal)

    def entries(self) -> list[Path]:
        return list(Path(SHM_DIRECTORY).glob(f"{SHM_PREFIX}quickstart-*-{self.port}"))
