"""A Docker of our own, in namespaces of its own, and containers that hold only this checkout.

The image is empty: the host's ``/usr``, the interpreter and the checkout are mounted in it, for
reading only. So nothing is downloaded, and a container starts within a second.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
IMAGE = "kvstore-tests"
LONG_S = 60.0

LINKS = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}
FOLDERS = ("usr", "etc", "proc", "sys", "dev", "run", "root")
USERS = "root:x:0:0::/root:/bin/sh\n"
GROUPS = "root:x:0:\n"


def missing() -> str:
    """Why there is no Docker here; empty: there is."""
    if os.getuid():
        return "containers are started by root"
    absent = [name for name in ("dockerd", "docker", "unshare") if shutil.which(name) is None]
    return f"missing: {', '.join(absent)} (apt install docker.io)" if absent else ""


def mounted() -> list[str]:
    """What Python needs, without what lies in another of them."""
    wanted = {
        "/usr",
        "/etc/alternatives",
        sys.prefix,
        sys.base_prefix,
        str(ROOT),
        *map(os.path.realpath, sys.path),
    }
    folders = sorted(folder for folder in wanted if folder and Path(folder).is_dir())
    kept: list[str] = []
    for folder in folders:
        if not any(Path(folder).is_relative_to(other) for other in kept):
            kept.append(folder)
    return kept


def _image() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name in FOLDERS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(entry)
        entry = tarfile.TarInfo("tmp")
        entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(entry)
        for name, target in LINKS.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, text in (("etc/passwd", USERS), ("etc/group", GROUPS)):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    return stream.getvalue()


class Container:
    """A running one; removed with its Docker."""

    def __init__(self, docker: Docker, name: str) -> None:
        self.name = name
        self._docker = docker

    @property
    def address(self) -> str:
        """On the bridge."""
        networks = self._inspect()["NetworkSettings"]["Networks"]
        return str(next(iter(networks.values()))["IPAddress"])

    @property
    def health(self) -> str:
        """``starting``, ``healthy`` or ``unhealthy``."""
        return str(self._inspect()["State"]["Health"]["Status"])

    def stop(self) -> int:
        """``docker stop``; the status by which it ended."""
        self._docker("stop", "--time", "30", self.name)
        return int(self._inspect()["State"]["ExitCode"])

    def start(self) -> None:
        self._docker("start", self.name)

    @property
    def killed_for_memory(self) -> bool:
        return bool(self._inspect()["State"]["OOMKilled"])

    def _inspect(self) -> dict[str, Any]:
        return dict(json.loads(self._docker("inspect", self.name).stdout)[0])

    def said(self) -> str:
        """On both streams so far."""
        done = self._docker("logs", self.name)
        return done.stdout + done.stderr

    def says(self, text: str) -> str:
        """Waits until it has said this; returns all that it has said."""
        deadline = time.monotonic() + LONG_S
        while text not in (said := self.said()):
            state = self._inspect()["State"]
            assert state["Running"], f"{self.name} has ended with {state['ExitCode']}: {said}"
            assert time.monotonic() < deadline, f"{self.name} does not say {text!r}: {said}"
            time.sleep(0.1)
        return said

    def ended(self) -> int:
        """Waits for its end; its status."""
        return int(self._docker("wait", self.name).stdout)

    def run(
        self, *command: str, user: str = "0", check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Another process in it."""
        return self._docker("exec", "--user", user, self.name, *command, check=check)

    def python(self, program: str, *arguments: str) -> Any:
        """What a program prints, which is JSON."""
        done = self.run(sys.executable, "-c", program, *arguments, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)


class Docker:
    """Its daemon and what it has started; the host's own network and daemon are not touched."""

    def __init__(self, directory: Path) -> None:
        """Raises AssertionError: it does not come up."""
        self._socket = f"unix://{directory}/docker.sock"
        self._names = 0
        self._log = directory / "dockerd.log"
        command = [
            "dockerd", "--host", self._socket, "--data-root", f"{directory}/data",
            "--exec-root", f"{directory}/exec", "--pidfile", f"{directory}/pid",
        ]  # fmt: skip
        apart = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc"]
        inner = 'mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@"'
        with self._log.open("wb") as log:
            self._daemon = subprocess.Popen(
                [*apart, "--kill-child=SIGKILL", "sh", "-c", inner, "sh", *command],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            self._wait_for_daemon()
            imported = ["docker", "--host", self._socket, "import", "-", IMAGE]
            subprocess.run(imported, input=_image(), check=True, capture_output=True)
        except BaseException:
            self.close()
            raise

    def _wait_for_daemon(self) -> None:
        deadline = time.monotonic() + LONG_S
        while self("version", check=False).returncode:
            assert self._daemon.poll() is None, self._log.read_text()[-3_000:]
            assert time.monotonic() < deadline, self._log.read_text()[-3_000:]
            time.sleep(0.1)

    def __call__(
        self, *arguments: str, check: bool = True, timeout_s: float = LONG_S
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["docker", "--host", self._socket, *arguments],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0 or not check, f"{arguments}: {done.stderr}"
        return done

    def start(self, *command: str, options: Sequence[str] = ()) -> Container:
        """A container that runs this command.

        Args:
            options: of ``docker run``.
        """
        self._names += 1
        name = f"c{self._names}"
        volumes = [word for each in mounted() for word in ("--volume", f"{each}:{each}:ro")]
        # Scratch space for iptables' lock and whatever else wants to write.
        variables = ("PYTHONDONTWRITEBYTECODE=1", "KVSTORE_CONFIG=", f"PYTHONPATH={ROOT}")
        given = ["--tmpfs", "/run", *(word for each in variables for word in ("--env", each))]
        self(
            "run", "--detach", "--name", name, "--hostname", name, "--workdir", "/tmp",
            *given, *volumes, *options, IMAGE, *command,
        )  # fmt: skip
        return Container(self, name)

    def kvstore(self, program: str, *arguments: str, options: Sequence[str] = ()) -> Container:
        """``master`` or ``node`` in a container of its own."""
        command = [sys.executable, "-m", f"kvstore.cli.{program}", *arguments]
        return self.start(*command, options=options)

    def idle(self, options: Sequence[str] = ()) -> Container:
        """One in which ``run`` finds room for a client."""
        return self.start("sleep", "infinity", options=options)

    def run(self, *command: str, options: Sequence[str] = (), image: str) -> Container:
        """A container of an image that was built."""
        self._names += 1
        name = f"c{self._names}"
        self("run", "--detach", "--name", name, "--hostname", name, *options, image, *command)
        return Container(self, name)

    def compose(self, file: Path, *arguments: str, **variables: str) -> str:
        """What ``docker-compose`` prints."""
        done = subprocess.run(
            ["docker-compose", "--file", str(file), *arguments],
            env={**os.environ, **variables, "DOCKER_HOST": self._socket},
            capture_output=True,
            text=True,
            check=False,
            timeout=3 * LONG_S,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def clear(self) -> None:
        """Remove all containers."""
        names = self("ps", "--all", "--quiet", check=False).stdout.split()
        if names:
            self("rm", "--force", *names, check=False)

    def close(self) -> None:
        self.clear()
        parent = self._daemon.pid  # unshare, which waits for the daemon
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            os.kill(int(child), signal.SIGTERM)
        try:
            self._daemon.wait(LONG_S)
        finally:
            self._daemon.kill()
            self._daemon.wait()
