"""Runs commands of ``kvstore`` under one circumstance; a program of ``test_hurried``.

It imports everything once, and forks a process for each command: a start of Python per command and
circumstance would take minutes. It reads ``{name: (module, arguments)}`` as JSON,
and prints what became of each.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import select
import signal
import struct
import sys
import termios
import time
from typing import Final

CIRCUMSTANCES: Final = (
    "no terminal", "pipe closed", "both closed", "terminal", "narrow", "full disk",
)  # fmt: skip
NARROW: Final = 36
LIMIT_S: Final = 60.0


def main() -> None:
    circumstance, modules = sys.argv[1], sys.argv[2:]
    asked = json.load(sys.stdin)
    for module in {*modules, *(each[0] for each in asked.values())}:
        importlib.import_module(module)
    done = {name: run(circumstance, *each) for name, each in asked.items()}
    json.dump(done, sys.stdout)


def run(circumstance: str, module: str, arguments: list[str]) -> dict[str, object]:
    on_terminal = circumstance in ("terminal", "narrow")
    if on_terminal:
        ours, theirs = os.openpty()
        columns = NARROW if circumstance == "narrow" else 200
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
        os.write(ours, b"n\n")
        read = {"out": ours}
        given = [theirs, theirs, theirs]
    else:
        nothing = os.open(os.devnull, os.O_RDONLY)
        (out, out_end), (err, err_end) = os.pipe(), os.pipe()
        read = {"out": out, "err": err}
        given = [nothing, out_end, err_end]
        if circumstance in ("pipe closed", "both closed"):
            os.close(read.pop("out"))
        if circumstance == "both closed":
            os.close(read.pop("err"))
        if circumstance == "full disk":
            os.close(out_end)
            given[1] = os.open("/dev/full", os.O_WRONLY)
    pid = os.fork()
    if not pid:
        os.setsid()
        for fd, at in enumerate(given):
            os.dup2(at, fd)
        os.closerange(3, 64)
        sys.argv = arguments
        importlib.import_module(module).main()
    for fd in set(given):
        os.close(fd)
    said, status = _wait(pid, read)
    for fd in read.values():
        os.close(fd)
    return {"code": os.waitstatus_to_exitcode(status), **said}


def _wait(pid: int, read: dict[str, int]) -> tuple[dict[str, str], int]:
    said: dict[str, bytes] = dict.fromkeys(("out", "err"), b"")
    began = time.monotonic()
    left = dict(read)
    gone, status = 0, 0
    while True:
        if not gone and time.monotonic() - began > LIMIT_S:
            os.kill(pid, signal.SIGKILL)
        if not gone:
            gone, status = os.waitpid(pid, os.WNOHANG)
        ready = select.select(list(left.values()), [], [], 0 if gone else 0.02)[0]
        for name, fd in list(left.items()):
            if fd in ready:
                data = b""
                with contextlib.suppress(OSError):  # EIO: no process has the terminal any more
                    data = os.read(fd, 1 << 16)
                said[name] += data
                if not data:
                    del left[name]
        if gone and not ready:
            return {name: data.decode(errors="replace") for name, data in said.items()}, status


if __name__ == "__main__":
    main()
