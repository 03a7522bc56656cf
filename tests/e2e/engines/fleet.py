"""``vllm serve`` processes and a ``kvstore-proxy`` in front of them, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from examples import fleet as servers
from examples.fleet import MODEL, RequestError, counters
from tests.e2e.engines.engine import transfer_config
from tests.e2e.engines.preloaded import Fork, ForkServer
from tests.support.processes import free_port
from tests.support.wait import until

START_S = 240.0
REQUEST_S = 120.0
SHM = Path("/dev/shm")
LEFT_BY_ENGINES = ("psm_", "sem.mp-")
"""How Python's multiprocessing names shared memory and semaphores."""


class Process:
    """A server with a port and a health page. Its log is a file."""

    def __init__(
        self, preloaded: ForkServer, module: str, arguments: Sequence[str], log: Path, health: str
    ) -> None:
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.log = log
        self._preloaded = preloaded
        self._module = module
        self._arguments = [*arguments, "--port", str(self.port)]
        self._health = health
        self.process: Fork
        self.start()

    def start(self) -> None:
        """Again, where it was killed."""
        with self.log.open("ab") as log, Path(os.devnull).open() as nothing:
            files = (nothing.fileno(), log.fileno(), log.fileno())
            self.process = self._preloaded.start(self._module, self._arguments, files)

    def ready(self) -> None:
        until(self._healthy, within_s=START_S, every_s=0.2)

    def _healthy(self) -> bool:
        if self.process.poll() is not None:
            pytest.fail(f"{self._module} has ended: {self._end_of_log()}")
        with contextlib.suppress(OSError, http.client.HTTPException):
            return ask(self.address, "GET", self._health)[0] == 200
        return False

    def kill(self) -> None:
        """-9, it and all of its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        until(lambda: not self._listens())  # its engine, a fork, ends after it

    def _listens(self) -> bool:
        with socket.socket() as asking:
            return asking.connect_ex(("127.0.0.1", self.port)) == 0

    def close(self) -> None:
        """As its users would; by force where that takes long."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.kill()

    def counters(self) -> dict[str, float]:
        """The connector's, from ``/metrics``."""
        try:
            return counters(self.address)
        except RequestError as error:
            state = "runs" if self.process.poll() is None else "has ended"
            pytest.fail(f"{error}; {self.log.name} {state}: {self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-6_000:]


class Fleet:
    """Starts them all at once; ``close`` ends them."""

    def __init__(self, preloaded: ForkServer, model: Path, master: str, directory: Path) -> None:
        self._preloaded = preloaded
        self._model = model
        self._master = master
        self._directory = directory
        self.engines: list[Process] = []
        self.proxy: Process
        self._shared_before = set(SHM.iterdir())

    def engine(self, role: str) -> Process:
        arguments = servers.engine_arguments(self._model, transfer_config(self._master, role))
        log = self._directory / f"{role}-{len(self.engines)}.log"
        engine = Process(
            self._preloaded, servers.SERVE, [*arguments, "--enable-scale-out"], log, "/health"
        )
        self.engines.append(engine)
        return engine

    def start_proxy(self, prefill: list[Process], decode: list[Process]) -> Process:
        """Once all engines are ready."""
        for engine in self.engines:
            engine.ready()
        addresses = [[engine.address for engine in engines] for engines in (prefill, decode)]
        arguments = servers.proxy_arguments(self._master, *addresses)
        log = self._directory / "proxy.log"
        self.proxy = Process(self._preloaded, "kvstore.cli.proxy", arguments, log, "/healthz")
        self.proxy.ready()
        return self.proxy

    def proxy_uses_all(self) -> bool:
        """Whether the proxy takes every engine for well."""
        _, text = ask(self.proxy.address, "GET", "/healthz")
        instances: list[dict[str, Any]] = json.loads(text)["instances"]
        return all(each["healthy"] and each["breaker"] != "open" for each in instances)

    def complete(self, prompt: list[int], tokens: int) -> list[int]:
        """Greedy token ids, from the proxy. Fails unless it answers 200."""
        body = {
            "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        status, text = ask(self.proxy.address, "POST", "/v1/completions", body)
        assert status == 200, (status, text)
        answer: dict[str, Any] = json.loads(text)
        return list(answer["choices"][0]["token_ids"])

    def close(self) -> None:
        processes = [*self.engines, *([self.proxy] if hasattr(self, "proxy") else [])]
        for each in processes:
            each.process.terminate()
        for each in processes:
            each.close()
        # What engines that were killed leave behind: memory that their own processes shared.
        left = {path for path in SHM.iterdir() if path.name.startswith(LEFT_BY_ENGINES)}
        for path in left - self._shared_before - _mapped():
            path.unlink(missing_ok=True)


def ask(
    address: str,
    method: str,
    path: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Status and text."""
    connection = http.client.HTTPConnection(address, timeout=REQUEST_S)
    try:
        data = None if body is None else json.dumps(body)
        headers = {"Content-Type": "application/json", **(headers or {})}
        connection.request(method, path, data, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def _mapped() -> set[Path]:
    """What of /dev/shm some running process has mapped."""
    found: set[Path] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            found.update(
                Path(line.split(maxsplit=5)[5].strip())
                for line in maps.read_text().splitlines()
                if "/dev/shm/" in line
            )
    return found
