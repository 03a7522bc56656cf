"""A store of real processes for tests: started on free ports, watched, ended whatever happened.

A test that uses it says what is to be there (``master``, ``node``), breaks it (``kill``,
``freeze``) and asks through real clients (``client``). At the end ``finish`` finds out whether the
master still serves, whether every process stops when it is told to, and whether any of them logged
a traceback.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from kvstore import Client
from kvstore.calls import ClusterStatus
from kvstore.limits import FLEET_NAMESPACE, of_tenant
from kvstore.memory.shm_entries import SHM_PREFIX, key_path, socket_name
from kvstore.runtime.host import SHM_DIRECTORY
from tests.support.certificates import Identities
from tests.support.processes import Server, flags_of, let_others_leave

SHORT: Final = {
    "lease_ms": 1_000,
    "put_deadline_ms": 1_000,
    "late_write_ms": 0,
    "dead_ms": 1_500,
}
"""Of a master, for tests that wait until a promise ends."""

CONSTANTS: Final = {
    "put_deadline_ms": "kvstore.master.times:PUT_DEADLINE_MS",
    "late_write_ms": "kvstore.master.times:LATE_WRITE_MS",
    "repair_after_ms": "kvstore.master.times:REPAIR_AFTER_MS",
    "etcd_lease_s": "kvstore.master.times:ETCD_LEASE_S",
    "master_connections_max": "kvstore.master.grpc_server:CONNECTIONS_MAX",
    "node_connections_max": "kvstore.transport.tcp_server:CONNECTIONS_MAX",
}
"""What is no setting, but may stand among the settings of a process here."""

MASTER: Final = "kvstore.cli.master"
NODE: Final = "kvstore.cli.node"
FAKE_NODE: Final = "tests.support.fake_node"
"""A node that knows the tests' fake GPU."""

OVER_TCP_NODE: Final = "tests.support.over_tcp_node"
"""As ``FAKE_NODE``; it copies objects over tcp alone."""

_numbers = itertools.count(1)


def unique_name() -> str:
    """Of a node; no other run on this machine uses it."""
    return f"it-{os.getpid()}-{next(_numbers)}"


def constants_of(given: dict[str, Any]) -> dict[str, object]:
    """Takes what is no setting out of ``given``."""
    return {CONSTANTS[key]: given.pop(key) for key in list(given) if key in CONSTANTS}


def entry(node: str) -> Path:
    """The node's segment in the file system."""
    return Path(SHM_DIRECTORY, SHM_PREFIX + node)


class Node(Server):
    """A ``kvstore-node``."""

    name = ""

    @property
    def entry(self) -> Path:
        return entry(self.name)

    @property
    def socket(self) -> Path:
        """Where it hands over its memory."""
        return Path(SHM_DIRECTORY, socket_name(SHM_PREFIX + self.name))

    @property
    def key(self) -> Path:
        """The key of its memory's stamps."""
        return Path(key_path(SHM_PREFIX + self.name))


class Cluster:
    """See the module. Settings of the master are given once and kept over its restarts."""

    def __init__(
        self,
        directory: Path,
        *,
        settings: Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
        reached_at: str = "127.0.0.1",
        identities: Identities | None = None,
    ) -> None:
        """
        Args:
            directory: for logs.
            settings: of the master.
            prefix: what the commands of all processes begin with.
            reached_at: the master's host, as we see it.
            identities: with them all processes have one; clients are admins unless they say else.
        """
        self._identities = identities
        self.node_module = NODE
        """What nodes run that serve memory of the host."""
        self.reached_at = reached_at
        self.directory = directory
        self.prefix = list(prefix)
        usual = {"host": "127.0.0.1", "port": 0, "http_port": 0}
        self.settings: dict[str, Any] = usual | dict(settings or {})
        if identities is not None:
            self.settings.setdefault("auth", identities.file("master"))
            self.settings.setdefault("auth_revoked", identities.revoked_file)
        self._master: Server | None = None
        self.nodes: list[Node] = []
        self._servers: list[Server] = []
        self._clients: list[Client] = []
        self._asker: Client | None = None
        self.lane_port = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ends all, and checks after a block that did not fail that nothing is left."""
        try:
            if kind is None:
                self.finish()
        finally:
            self.close()

    # --- the processes ------------------------------------------------------------------------

    @property
    def master_server(self) -> Server:
        assert self._master is not None, "start a master first"
        return self._master

    @master_server.setter
    def master_server(self, server: Server | None) -> None:
        """None: it is not to serve any more."""
        self._master = server

    @property
    def address(self) -> str:
        return f"{self.reached_at}:{self.settings['port']}"

    def start(self, nodes: int = 1, **settings: Any) -> None:
        """A master and nodes, all at once where the port is known, and wait until they serve."""
        self.master()
        started = [self.launch_node(**settings) for _ in range(nodes)]
        for node in started:
            self.ready(node)

    def master(self, **more: Any) -> Server:
        """Start it, or start it again on the port it had."""
        if not self.prefix:
            let_others_leave(self.settings.get("port", 0), self.settings.get("lane_port", 0))
        server = self.launch(MASTER, self.settings | more)
        self.master_server = server
        ready = server.line(r"listening on \S*?:(\d+) \(gRPC\) and port (\d+) \(lane\)")
        self.settings["port"] = int(ready[1])
        self.settings["lane_port"] = self.lane_port = int(ready[2])
        if self._asker is None:
            self._asker = Client(self.address, timeout_ms=5_000, auth=self._auth("admin"))
        self._asker.exists("connect now")
        return server

    def node(self, **settings: Any) -> Node:
        """Start one and wait until it has joined."""
        return self.ready(self.launch_node(**settings))

    def launch_node(self, **settings: Any) -> Node:
        """Start one; it need not be able to join."""
        given: dict[str, Any] = {
            "master": self.address,
            "name": unique_name(),
            "memory": "32MiB",
            "http_port": 0,
        }
        given |= {"auth": self._auth("node")} | settings
        keep = "--keep" if given.pop("keep", False) else "--no-keep"
        is_fake = str(given.get("device", "")).startswith("fake:")
        module = FAKE_NODE if is_fake and self.node_module == NODE else self.node_module
        constants = constants_of(given)
        node = Node(
            module, [*flags_of(given), keep], log=self._new_log("node"), prefix=self.prefix,
            constants=constants,
        )  # fmt: skip
        node.name = given["name"]
        self._servers.append(node)
        self.nodes.append(node)
        return node

    def ready(self, node: Node) -> Node:
        node.line(rf"kvstore-node {re.escape(node.name)} serves")
        return node

    def launch(self, module: str, settings: dict[str, Any]) -> Server:
        log = self._new_log(module.rpartition(".")[2])
        given = dict(settings)
        constants = constants_of(given)
        server = Server(module, flags_of(given), log=log, prefix=self.prefix, constants=constants)
        self._servers.append(server)
        return server

    # --- asking -------------------------------------------------------------------------------

    def client(self, **settings: Any) -> Client:
        """A client that ``finish`` closes."""
        settings.setdefault("auth", self._auth("admin"))
        client = Client(self.address, **settings)
        self._clients.append(client)
        return client

    def status(self) -> ClusterStatus:
        assert self._asker is not None, "start a master first"
        return self._asker.status()

    def spaces(self) -> list[str]:
        """The beginnings of the namespaces that have objects."""
        return sorted({each.name.split("/")[0] for each in self.status().namespaces})

    def clear(self) -> None:
        assert self._asker is not None, "start a master first"
        self._asker.clear()

    def state_of(self, node: Node) -> str:
        """As the master sees it; gone when it does not know it."""
        states = {each.name: each.state for each in self.status().nodes}
        return states.get(node.name, "gone")

    def fleet_records(self, tenant: str = "") -> list[bytes]:
        """What engines have told and others can read: a listing also shows what is being
        written."""
        assert self._asker is not None, "start a master first"
        space = of_tenant(tenant, FLEET_NAMESPACE)
        rows = self._asker.list_objects(namespace=space)
        keys = [row.key for row in rows if row.state == "complete"]
        values = self._asker.get_many(keys, namespace=space, kind="bytes")
        return [bytes(value) for value in values if isinstance(value, bytes)]

    def used_bytes(self) -> int:
        return sum(each.used for node in self.status().nodes for each in node.segments)

    # --- the end ------------------------------------------------------------------------------

    def check(self) -> None:
        """The master is alive and serves; nobody's log holds a traceback."""
        for server in self._servers:
            assert "Traceback" not in server.errors, server.errors
        if self._master is not None:
            assert self._master.process.poll() is None, self._master.errors
            assert self.status().epoch > 0

    def finish(self) -> None:
        """``check``, then end everything as its users would, and see that nothing is left."""
        try:
            self.check()
            self.close_clients()
            self._stop_asking()
            running = [server for server in self._servers if server.process.poll() is None]
            for server in running:
                server.process.terminate()
            for server in running:
                assert server.wait() == 0, server.errors
            for server in self._servers:
                assert "Traceback" not in server.errors, server.errors
            for node in self.nodes:
                killed = node.process.returncode == -signal.SIGKILL
                for left in (node.entry, node.socket, node.key):
                    assert killed or not left.exists(), f"{left} is left behind"
        finally:
            self.close()

    def close(self) -> None:
        """End everything by force; remove what killed nodes leave."""
        self.close_clients()
        self._stop_asking()
        for server in self._servers:
            server.close()
        for node in self.nodes:
            node.entry.unlink(missing_ok=True)
            node.socket.unlink(missing_ok=True)
            node.key.unlink(missing_ok=True)

    def close_clients(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            client.close()

    def _stop_asking(self) -> None:
        if self._asker is not None:
            self._asker.close()

    def _auth(self, role: str) -> str:
        return "" if self._identities is None else self._identities.file(role)

    def _new_log(self, kind: str) -> Path:
        return self.directory / f"{kind}-{len(self._servers)}.log"
