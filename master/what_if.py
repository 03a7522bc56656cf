"""The child process of the live what-if: ``kvstore.planner.what_if``."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from kvstore.calls import WhatIfEstimate
from kvstore.runtime.clock import uptime
from kvstore.runtime.tasks import start_thread

log = logging.getLogger("kvstore.master")

WRITE_S: Final = 2.0
"""Time in which the child must take what was recorded, or it is killed."""

RESTART_S: Final = 60.0


class WhatIfProcess:
    """Gets the recorded requests, and has the last estimates. A ``TraceSink``: except for
    ``estimates``, the thread of its recorder calls it. The child ends with this process, because
    it reads to the end of its input."""

    def __init__(self, policies: dict[str, str], pool_bytes: Callable[[], int]) -> None:
        """``policies``: their paths by name, the present one first."""
        self._policies = policies
        self._pool_bytes = pool_bytes
        self._child: subprocess.Popen[bytes] | None = None
        self._input: socket.socket | None = None
        self._started = -RESTART_S
        self._reported_bytes = 0
        self._estimates: list[WhatIfEstimate] = []

    def estimates(self) -> list[WhatIfEstimate]:
        """Return the last estimates; empty: none yet."""
        return self._estimates

    def write(self, lines: Sequence[bytes]) -> None:
        pool_bytes = self._pool_bytes()
        if not pool_bytes or not lines or (self._input is None and not self._start()):
            return
        assert self._input is not None
        if pool_bytes != self._reported_bytes:
            lines = [json.dumps({"m": pool_bytes}).encode() + b"\n", *lines]
            self._reported_bytes = pool_bytes
        try:
            self._input.sendall(b"".join(lines))
        except OSError:
            self.close()
            raise

    def _start(self) -> bool:
        if uptime() - self._started < RESTART_S:
            return False
        self._started, self._reported_bytes = uptime(), 0
        arguments = [f"{name}={path}" for name, path in self._policies.items()]
        ours, theirs = socket.socketpair()
        with theirs:
            child = self._child = subprocess.Popen(
                [sys.executable, "-m", "kvstore.planner.what_if", *arguments],
                stdin=theirs.fileno(), stdout=subprocess.PIPE,
            )  # fmt: skip
        ours.settimeout(WRITE_S)
        self._input = ours
        start_thread("what-if", partial(self._read, child))
        return True

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        with contextlib.suppress(ValueError):
            for line in child.stdout:
                self._estimates = [WhatIfEstimate(*row) for row in json.loads(line)]
        self._estimates = []
        status = child.wait()
        log.log(logging.WARNING if status else logging.INFO, "what_if_ended status=%d", status)

    def close(self) -> None:
        """End the child."""
        child, self._child = self._child, None
        if self._input is not None:
            self._input.close()
            self._input = None
        if child is not None:
            child.kill()
