"""An etcd of three members, one of which hangs; what the doctor says of it; where passwords are."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import Client
from kvstore.errors import KVStoreError
from kvstore.master import times
from kvstore.runtime.addresses import EtcdPlace
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd.leader_lookup import MemberStatus, find_leader, look_at
from tests.support.cluster import MASTER, Cluster
from tests.support.etcd import START_S, EtcdServer
from tests.support.processes import KVSTORE, Server, children_of, free_port, run_python
from tests.support.programs import need_program
from tests.support.wait import until

LEASE_S = times.ETCD_LEASE_S
HANGS_S = 2.5 * LEASE_S


class Member:
    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.directory = directory / name
        self.directory.mkdir()
        self.address = f"127.0.0.1:{free_port()}"
        self.peer = f"http://127.0.0.1:{free_port()}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, cluster: str) -> None:
        client = f"http://{self.address}"
        command = [
            "etcd", "--name", self.name, "--data-dir", str(self.directory / "data"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer,
            # As docs/high-availability.md recommends.
            "--pre-vote", "--heartbeat-interval", "50", "--election-timeout", "500",
            "--initial-cluster", cluster, "--logger", "zap", "--log-level", "error",
        ]  # fmt: skip
        with (self.directory / "log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class Members:
    """Three of them."""

    def __init__(self, directory: Path) -> None:
        need_program("etcd", "etcd-server")
        directory.mkdir()
        self.all = [Member(name, directory) for name in ("one", "two", "three")]

    def start(self) -> None:
        cluster = ",".join(f"{each.name}={each.peer}" for each in self.all)
        for each in self.all:
            each.start(cluster)
        until(self._are_well, within_s=START_S)

    def _are_well(self) -> bool:
        try:
            return sum(self.look(each).leads for each in self.all) == 1
        except KVStoreError:
            return False

    def look(self, member: Member) -> MemberStatus:
        return look_at(self.place(), member.address, uptime() + 1.0)

    def place(self, *first: Member) -> EtcdPlace:
        """``first``: the members that are named first, so that they are asked first."""
        others = [each for each in self.all if each not in first]
        return EtcdPlace(tuple(each.address for each in (*first, *others)))

    def leader(self) -> Member:
        [leader] = [each for each in self.all if self.look(each).leads]
        return leader

    def follower(self) -> Member:
        return next(each for each in self.all if not self.look(each).leads)

    def close(self) -> None:
        for each in self.all:
            each.close()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Members]:
    members = Members(tmp_path_factory.mktemp("members") / "etcd")
    try:
        members.start()
        yield members
    finally:
        members.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as cluster:
        yield cluster


def lead(cluster: Cluster, place: EtcdPlace, prefix: str) -> tuple[Server, str]:
    """A master that leads, and its address."""
    settings = cluster.settings | {
        "etcd": str(place._replace(prefix=prefix)),
    }
    server = cluster.launch(MASTER, settings)
    port = server.line(r"listening on \S*?:(\d+) \(gRPC\)")[1]
    until(lambda: "leading epoch=" in server.errors or "standby leader=" in server.errors)
    return server, f"127.0.0.1:{port}"


@pytest.mark.parametrize("hangs", ["follower", "leader"])
def test_a_member_that_hangs_costs_the_leader_nothing(
    cluster: Cluster, members: Members, hangs: str
) -> None:
    """The one that the master asks, for longer than the master's lease."""
    member = members.follower() if hangs == "follower" else members.leader()
    place = members.place(member)._replace(prefix=f"hangs-{hangs}")
    server, address = lead(cluster, place, place.prefix)
    with Client(address) as client:
        before = client.status()
        member.signal(signal.SIGSTOP)
        try:
            time.sleep(HANGS_S)  # nothing happens, which is what is to be seen
            asked = uptime()
            assert find_leader(place, uptime() + 10.0) == address
            assert uptime() - asked < 3.0
            took_s = []
            for _ in range(3):
                asked = uptime()
                assert find_leader(place, uptime() + 10.0) == address
                took_s.append(uptime() - asked)
            assert min(took_s) < 0.5, "it remembers who answered"
        finally:
            member.signal(signal.SIGCONT)
        after = client.status()
    assert (after.epoch, after.leader) == (before.epoch, address)
    assert dict(after.counters)["leadership_lost"] == 0, server.errors


# --- doctor ------------------------------------------------------------------------------------


def doctor(*arguments: str) -> tuple[int, list[dict[str, str]]]:
    done = run_python(*KVSTORE, "doctor", "--json", *arguments, within_s=90)
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def about(rows: list[dict[str, str]], *subjects: str) -> list[dict[str, str]]:
    return [row for row in rows if row["subject"].startswith(subjects)]


def test_the_doctor_looks_at_an_etcd_and_at_who_leads_by_it(
    cluster: Cluster, members: Members
) -> None:
    place = members.place()._replace(prefix="doctor")
    code, rows = doctor("--master", str(place), "--timeout-ms", "5000")
    assert code == 1
    assert [row["state"] for row in about(rows, "etcd ")] == ["ok"] * 3
    assert [row["found"] for row in about(rows, "leader")] == [
        "no leader under the prefix 'doctor'"
    ]

    _, leader = lead(cluster, place, "doctor")
    _, standby = lead(cluster, place, "doctor")
    cluster.ready(cluster.launch_node(master=str(place)))
    code, rows = doctor("--master", str(place), "--timeout-ms", "5000")
    assert code == 0, rows
    found = [row["found"] for row in about(rows, "etcd ")]
    assert [text.endswith("leads the etcd") for text in found].count(True) == 1
    assert f"{leader} leads the masters" in [row["found"] for row in about(rows, "leader")]
    assert about(rows, f"master {leader}")[0]["state"] == "ok"
    assert about(rows, "node ")

    # A list of masters: the standby is as well as the leader.
    for listed in (f"{standby},{leader}", standby):
        code, rows = doctor("--master", listed, "--timeout-ms", "5000")
        assert code == 0, rows
        seen = about(rows, "master ", "lane", "node ", "nodes", "leader")
        assert {row["state"] for row in seen} == {"ok"}, seen
        [row] = about(rows, f"master {standby}")
        assert row["found"] == f"answers, and stands by; {leader} leads"

    member = members.follower()
    member.signal(signal.SIGSTOP)
    try:
        code, rows = doctor("--master", str(place), "--timeout-ms", "3000")
    finally:
        member.signal(signal.SIGCONT)
    assert code == 1
    [row] = about(rows, f"etcd {member.address}")
    assert row["state"] == "problem"
    assert about(rows, f"master {leader}")[0]["state"] == "ok"


# --- passwords ---------------------------------------------------------------------------------


def test_no_command_line_of_a_child_holds_the_password(tmp_path: Path) -> None:
    etcd = EtcdServer(tmp_path / "etcd")
    variable = f"KVSTORE_MASTER_ETCD=etcd://root:s3cret@127.0.0.1:{etcd.port}"
    cluster = Cluster(tmp_path, prefix=["env", variable])
    try:
        etcd.start()
        etcd.control("user", "add", "root", "--new-user-password", "s3cret")
        etcd.control("user", "grant-role", "root", "root")
        etcd.control("auth", "enable")
        server = cluster.launch(MASTER, cluster.settings | {"memory": "32MiB"})
        port = server.line(r"listening on \S*?:(\d+) \(gRPC\)")[1]
        with Client(f"127.0.0.1:{port}") as client:
            until(lambda: client.status().nodes)
        children = children_of(server.pid)
        assert children, "the node is one"
        for pid in [server.pid, *children]:
            assert b"s3cret" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        cluster.finish()
        assert "s3cret" not in server.errors
    finally:
        cluster.close()
        etcd.stop()
