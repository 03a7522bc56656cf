"""A demonstration as its users run it, and all that it started."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import IO

SECONDS = 120


def _line_of(stream: IO[str], pattern: str) -> re.Match[str]:
    for line in stream:
        if found := re.search(pattern, line):
            return found
    raise AssertionError(f"ended without a line like {pattern}")


class Demonstration:
    """``python -m module`` in its own process, and a way to find all that it started."""

    def __init__(self, module: str, *arguments: str, seconds: float = SECONDS) -> None:
        """
        Args:
            seconds: what it has for everything.
        """
        self._seconds = seconds
        self.mark = f"KV_DEMO_TEST={uuid.uuid4()}"  # inherited by every process below it
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {name: value},
        )

    def line(self, pattern: str) -> re.Match[str]:
        """Read its output up to a line that matches."""
        assert self.process.stdout is not None
        return _line_of(self.process.stdout, pattern)

    def error(self, pattern: str) -> re.Match[str]:
        """The same of its standard error."""
        assert self.process.stderr is not None
        return _line_of(self.process.stderr, pattern)

    def end(self) -> tuple[int, str, str]:
        """Wait for it, check that nothing of it is left; status, the last line, the errors."""
        status, lines, errors = self.output()
        return status, lines[-1], errors

    def output(self) -> tuple[int, list[str], str]:
        """As ``end``, with every line that was not read before."""
        stdout, stderr = self.process.communicate(timeout=self._seconds)
        left = self.left()
        assert not left, left
        return self.process.returncode, stdout.splitlines(), stderr

    def left(self) -> list[str]:
        """Its processes that run."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if self.mark.encode() in (process / "environ").read_bytes().split(b"\0"):
                    found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # it ended, or is not ours to look at
                continue
        return found

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.communicate(timeout=self._seconds)
