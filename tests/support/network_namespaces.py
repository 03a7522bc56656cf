"""Other hosts, as far as the kernel makes them: a network namespace whose links can be cut, and a
``/dev/shm`` that no other process sees. Both need root."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.cluster import SHORT, Cluster
from tests.support.programs import skip


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=20)


class IsolatedNetwork:
    """A namespace whose processes this process reaches at addresses of their own."""

    def __init__(self, *subnets: str) -> None:
        """``subnets``: ``.1`` of each is the island's end, ``.2`` ours."""
        self.name = f"kvs-island-{os.getpid()}"
        self.prefix = ["ip", "netns", "exec", self.name]
        self._subnets = subnets
        self._link = f"kvsi{os.getpid() % 10**7}"

    def make(self) -> None:
        ip("netns", "add", self.name)
        ip("-n", self.name, "link", "set", "lo", "up")
        ip("link", "add", self._link, "type", "veth", "peer", "name", "out", "netns", self.name)
        for subnet in self._subnets:
            ip("-n", self.name, "address", "add", f"{subnet}.1/30", "dev", "out")
            ip("address", "add", f"{subnet}.2/30", "dev", self._link)
        ip("-n", self.name, "link", "set", "out", "up")
        ip("link", "set", self._link, "up")

    def cluster(self, directory: Path, **settings: Any) -> Cluster:
        """One that is started there; its master is reached by the first subnet."""
        given = SHORT | {"host": "0.0.0.0"} | settings
        at = f"{self._subnets[0]}.1"
        return Cluster(directory, settings=given, prefix=self.prefix, reached_at=at)

    def cut(self, subnet: str) -> None:
        """What we send arrives; no answer does, nor any sign that there is none."""
        ip("-n", self.name, "route", "add", "blackhole", f"{subnet}.2/32")

    def mend(self) -> None:
        for subnet in self._subnets:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("-n", self.name, "route", "del", "blackhole", f"{subnet}.2/32")

    def remove(self) -> None:
        for arguments in (("link", "del", self._link), ("netns", "del", self.name)):
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
                ip(*arguments)


@contextlib.contextmanager
def island_with(*subnets: str) -> Iterator[IsolatedNetwork]:
    """Skips where it cannot be made."""
    island = IsolatedNetwork(*subnets)
    try:
        try:
            island.make()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or str(error)
            skip(
                f"needs root and iproute2: networks of other hosts were not tested ({why.strip()})"
            )
        yield island
    finally:
        island.remove()


def own_shm(options: str) -> list[str]:
    """A prefix of a command: with a ``/dev/shm`` of its own, no other process sees a change."""
    script = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh"]


def need_own_shm() -> None:
    command = [*own_shm("size=1m"), "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        skip(f"needs unshare: {error}")
    if done.returncode:
        skip(f"needs root, to mount and to reserve huge pages: {done.stderr.strip()}")
