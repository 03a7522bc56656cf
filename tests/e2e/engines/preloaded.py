"""Processes of vLLM that need not import it: forks of one that has.

Importing vLLM is most of what a small engine's start costs: 8 s of CPU out of 11, and once more for
each process that ``vllm serve`` starts. ``ForkServer`` starts ``python -m
tests.e2e.engines.preloaded SOCKET``, which imports it once, touches no tensor, imports nothing of
kvstore that runs in an engine, and forks a process for each one that is asked for. What is forked
runs a module as ``python -m`` would, with an environment, descriptors and a session of its own.
``test_demo.py`` starts vLLM as its users do.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing.context
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples import fleet as servers

ROOT = Path(__file__).parents[3]
MESSAGE_BYTES_MAX = 1 << 17
YIELD_S = 0.0002
ENVIRONMENT = {**servers.environment(), "OMP_NUM_THREADS": "1"}
"""Tests that run side by side keep the cores busy; a second thread of each would only wait for the
first."""

IMPORTED = (
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.warmup.kernel_warmup",
)
"""What every engine here needs; what else it needs it imports itself."""


class ForkServer:
    """The process that is forked; ``close`` ends it, and what it forked lives on."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvstore-vllm-")
        """Of vLLM's own sockets, which its processes leave behind."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", __spec__.name, str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=ENVIRONMENT, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            )  # fmt: skip

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        files: tuple[int, int, int],
        environ: Mapping[str, str] | None = None,
    ) -> Fork:
        """``python -m module``, in a session of its own.

        Args:
            files: descriptors of its standard input, output and errors; they stay the caller's.
            environ: more than ``ENVIRONMENT``.
        """
        environ = {
            **ENVIRONMENT, "VLLM_RPC_BASE_PATH": self._directory.name, **(environ or {}),
        }  # fmt: skip
        asked = json.dumps({"module": module, "arguments": arguments, "environ": environ})
        socket.send_fds(self._socket, [asked.encode()], files)
        answer, pidfds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, 1)
        assert answer, "the process that has imported vLLM has ended"
        return Fork(int(answer), *pidfds)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()
        self._directory.cleanup()


class Fork:
    """As ``subprocess.Popen``, of what another process has started; its status is not known."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._ended = False

    def poll(self) -> int | None:
        """0 if it has ended."""
        return self._has_ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if self._has_ended(timeout) is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return 0

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)

    def _has_ended(self, timeout: float | None) -> int | None:
        if not self._ended and select.select([self._pidfd], [], [], timeout)[0]:
            self._ended = True
            os.close(self._pidfd)
        return 0 if self._ended else None


def main() -> None:
    asked = socket.socket(fileno=int(sys.argv[1]))
    os.sched_yield = _yield
    for each in IMPORTED:
        __import__(each)
    gc.collect()
    gc.freeze()  # a fork's collections pass over what it shares
    while True:
        message, fds, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 3)
        while _reap():
            pass
        if not message:
            return
        pid = os.fork()
        if not pid:
            asked.close()
            _become(fds, **json.loads(message))
        pidfd = os.pidfd_open(pid)
        socket.send_fds(asked, [str(pid).encode()], [pidfd])
        for fd in (*fds, pidfd):
            os.close(fd)


def _yield() -> None:
    """How the ranks of an engine wait for each other, instead of ``sched_yield``: two ranks that
    call that in a loop, on two cores, kept every other process of the host waiting for up to ten
    seconds (Linux 6.18), the master and its clients as well."""
    time.sleep(YIELD_S)


def _reap() -> bool:
    with contextlib.suppress(ChildProcessError):
        return os.waitpid(-1, os.WNOHANG)[0] != 0
    return False


def _become(fds: list[int], module: str, arguments: list[str], environ: dict[str, str]) -> None:
    """Never returns."""
    os.setsid()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None
    # vLLM's own processes are forks, too, as vLLM has it by default but on CPUs.
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
