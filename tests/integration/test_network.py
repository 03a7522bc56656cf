"""Two hosts, as far as the kernel can make them: network namespaces with links that can be cut.

    "near"                                              "far"
    master, nodes  ──── control 10.231.1.0/30 ────  client
                   ──── data    10.231.2.0/30 ────
          │
          └──────────── watch   198.18.*.0/30 ───── this process

Both ends see one ``/dev/shm``, which no two hosts do: so the clients are told to use tcp alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import SHORT, Cluster
from tests.support.network_namespaces import ip
from tests.support.remote_clients import Remote, RemoteError
from tests.support.wait import until

pytestmark = pytest.mark.netns

CONTROL, DATA, WATCH = "10.231.1", "10.231.2", f"198.18.{os.getpid() % 256}"
BOUNDED = ("deadline_exceeded", "master_unreachable", "node_unreachable", "put_refused", "no_space")
TIMEOUT_MS = 3_000
LONGEST_S = TIMEOUT_MS / 1000 + 1.0

LARGE = 8 << 20


class Net:
    """The namespaces and their links."""

    def __init__(self) -> None:
        self.near, self.far = f"kvs-near-{os.getpid()}", f"kvs-far-{os.getpid()}"
        self.watch = f"kvsw{os.getpid() % 10**7}"

    def make(self) -> None:
        for name in (self.near, self.far):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        for link, subnet in (("control", CONTROL), ("data", DATA)):
            ends = ["link", "add", link, "netns", self.near, "type", "veth"]
            ip(*ends, "peer", "name", link, "netns", self.far)
            for end, name in enumerate((self.near, self.far), start=1):
                ip("-n", name, "address", "add", f"{subnet}.{end}/30", "dev", link)
                ip("-n", name, "link", "set", link, "up")
        ip("link", "add", self.watch, "type", "veth", "peer", "name", "watch", "netns", self.near)
        ip("-n", self.near, "address", "add", f"{WATCH}.1/30", "dev", "watch")
        ip("-n", self.near, "link", "set", "watch", "up")
        ip("address", "add", f"{WATCH}.2/30", "dev", self.watch)
        ip("link", "set", self.watch, "up")

    def cut(self, link: str) -> None:
        ip("-n", self.far, "link", "set", link, "down")

    def mend(self, link: str) -> None:
        ip("-n", self.far, "link", "set", link, "up")

    def received_bytes(self, link: str) -> int:
        """By the far end."""
        path = f"/sys/class/net/{link}/statistics/rx_bytes"
        command = ["ip", "netns", "exec", self.far, "cat", path]
        return int(subprocess.run(command, check=True, capture_output=True, timeout=20).stdout)

    def remove(self) -> None:
        with contextlib.suppress(subprocess.CalledProcessError):
            ip("link", "del", self.watch)
        for name in (self.near, self.far):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


@pytest.fixture(scope="module")
def net() -> Iterator[Net]:
    net = Net()
    try:
        try:
            net.make()
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", "") or str(error)
            pytest.skip(
                "needs root and iproute2: tcp across a real interface, and networks that are "
                f"cut, were not tested ({why.strip()})"
            )
        yield net
    finally:
        net.remove()


@pytest.fixture
def near(net: Net, tmp_path: Path) -> Iterator[Cluster]:
    """A master, and a node that clients reach over the data link."""
    with Cluster(
        tmp_path,
        settings=SHORT | {"host": "0.0.0.0", "lease_ms": 3_000},
        prefix=["ip", "netns", "exec", net.near],
        reached_at=f"{WATCH}.1",
    ) as cluster:
        cluster.master()
        start_node(cluster, f"{DATA}.1")
        yield cluster


def start_node(cluster: Cluster, host: str) -> None:
    port = cluster.settings["port"]
    cluster.node(host=host, master=f"{CONTROL}.1:{port}", memory="64MiB")


@pytest.fixture
def far(net: Net, near: Cluster) -> Iterator[Remote]:
    """A client on the other side; both links are up again afterwards."""
    settings: dict[str, Any] = {"transports": ["tcp"], "timeout_ms": TIMEOUT_MS}
    address = f"{CONTROL}.1:{near.settings['port']}"
    remote = Remote(address, settings, ["ip", "netns", "exec", net.far])
    try:
        yield remote
    finally:
        for link in ("control", "data"):
            net.mend(link)
        remote.close()


def put(remote: Remote, key: str, size: int, **options: Any) -> str:
    named = "".join(f", {name}={value!r}" for name, value in options.items())
    return str(remote.ask(f"client.put({key!r}, content({key!r}, {size}){named}).name"))


def get(remote: Remote, key: str, size: int) -> str:
    """right, miss, or the code of a typed error; in bounded time."""
    expression = f"(lambda v: 'miss' if v is None else v == content({key!r}, {size}))"
    try:
        found = remote.ask(f"{expression}(client.get({key!r}))")
    except RemoteError as error:
        if error.code not in BOUNDED:
            raise
        found = error.code
    assert found is not False, "wrong bytes"
    assert remote.took_s < LONGEST_S
    return "right" if found is True else str(found)


def work(remote: Remote, keys: list[str]) -> None:
    """Begin to get these again and again, beside whatever is asked."""
    remote.ask(
        "workers.update(reader=traffic.Worker(traffic.getter(client, "
        f"{keys!r}), longest_s={LONGEST_S}))"
    )


def worked(remote: Remote) -> dict[str, int]:
    counts: dict[str, int] = remote.ask("workers['reader'].finish()")
    return counts


def test_everything_crosses_the_wire(net: Net, near: Cluster, far: Remote) -> None:
    before = net.received_bytes("data"), net.received_bytes("control")
    for size in (0, 1, 1_000, 1 << 20, LARGE):
        assert put(far, f"k{size}", size) == "STORED"
        assert get(far, f"k{size}", size) == "right"
    after = net.received_bytes("data"), net.received_bytes("control")
    assert after[0] - before[0] > LARGE
    assert after[1] - before[1] < LARGE // 8, "the master carries no payload"
    many = "[(f'm{n}', content(f'm{n}', 50_000)) for n in range(200)]"
    assert far.ask(f"{{outcome.name for outcome in client.put_many({many})}} == {{'STORED'}}")
    assert far.ask(f"client.get_many([k for k, _ in {many}]) == [v for _, v in {many}]")
    assert far.ask("client.match_prefix(['k0', 'none'])") == 1
    assert far.ask("client.get('k1', copy=False) == content('k1', 1)")
    assert far.ask("client._stub.joined.lane_port") == near.lane_port


def test_with_two_replicas_a_cut_costs_time_and_no_error(
    net: Net, near: Cluster, far: Remote
) -> None:
    start_node(near, f"{CONTROL}.1")  # the second replica is reached over the other link
    keys = [f"k{number}" for number in range(10)]
    for key in keys:
        assert put(far, key, 100_000, replicas=2) == "STORED"
    work(far, keys)
    until(lambda: far.ask("workers['reader'].counts").get("right", 0) > 20)
    net.cut("data")
    before = far.ask("workers['reader'].counts")["right"]
    until(lambda: far.ask("workers['reader'].counts")["right"] > before + 50, within_s=20)
    net.mend("data")
    until(lambda: far.ask("workers['reader'].counts")["right"] > before + 100, within_s=20)
    assert set(worked(far)) == {"right"}
