"""A client in a process of its own, for tests that put it elsewhere: another network, say.

``Remote`` is this side. The other is this file run as a program: it evaluates one expression per
line of its standard input, with ``client``, ``content`` and ``workers`` at hand.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvstore.errors import KVStoreError
from tests.support.processes import ROOT


class RemoteError(Exception):
    """What the expression raised: a code of ``kvstore.errors``, and how long it took."""

    def __init__(self, code: str, message: str, took_s: float) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.took_s = took_s


class Remote:
    """Starts the process; ``close`` ends it."""

    def __init__(self, address: str, settings: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        self.took_s = 0.0
        """By the last expression."""
        command = [*prefix, sys.executable, "-m", "tests.support.remote_clients", address]
        self._process = subprocess.Popen(
            [*command, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )

    def ask(self, expression: str) -> Any:
        """Its value, which JSON must be able to say. Raises RemoteError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(expression + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the remote client ended at {expression}"
        reply = json.loads(line)
        self.took_s = reply["took_s"]
        if "error" in reply:
            raise RemoteError(reply["error"], reply["message"], self.took_s)
        return reply["value"]

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def main() -> None:
    from kvstore import Client
    from tests.support import workload

    settings = json.loads(sys.argv[2])
    names: dict[str, Any] = {"content": workload.content, "traffic": workload, "workers": {}}
    with Client(sys.argv[1], **settings) as client:
        names["client"] = client
        for line in sys.stdin:
            started = time.monotonic()
            reply: dict[str, Any]
            try:
                reply = {"value": eval(line, names)}
            except KVStoreError as error:
                reply = {"error": error.code, "message": str(error)}
            except Exception as error:
                reply = {"error": type(error).__name__, "message": str(error)}
            reply["took_s"] = time.monotonic() - started
            print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
