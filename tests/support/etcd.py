"""A real etcd for tests, with TLS where it is asked for, and a relay that can cut the way to it."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from kvstore.errors import KVStoreError, PermissionDeniedError
from kvstore.runtime.addresses import EtcdPlace
from kvstore.runtime.etcd.leader_lookup import find_leader
from tests.support.processes import free_port
from tests.support.programs import need_program
from tests.support.wait import until

START_S: Final = 20.0


class EtcdServer:
    """One etcd of one member. It keeps its port and its data over ``stop`` and ``start``."""

    def __init__(self, directory: Path, *, tls: bool = False, flags: Sequence[str] = ()) -> None:
        need_program("etcd", "etcd-server")
        self.directory = directory
        self._flags = flags
        directory.mkdir(parents=True, exist_ok=True)
        self.certificates = make_certificates(directory / "tls") if tls else None
        self.port, self._peer_port = free_port(), free_port()
        self._has_served = False
        self._process: subprocess.Popen[bytes] | None = None

    def place(self, prefix: str = "kvstore", *, port: int = 0) -> EtcdPlace:
        """``port``: of a relay, instead of its own."""
        files = self.certificates or {}
        return EtcdPlace((f"127.0.0.1:{port or self.port}",), prefix, **files)

    def start(self) -> None:
        while True:
            self._launch()
            until(lambda: self._port_is_taken() or self._answers(), within_s=START_S)
            if not self._port_is_taken():
                self._has_served = True
                return
            self.port, self._peer_port = free_port(), free_port()

    def _port_is_taken(self) -> bool:
        """Another process was quicker. Before its first start it may have another port."""
        assert self._process is not None
        if self._has_served or self._process.poll() is None:
            return False
        return "address already in use" in (self.directory / "etcd.log").read_text()

    def _launch(self) -> None:
        scheme = "https" if self.certificates else "http"
        client, peer = f"{scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{self._peer_port}"
        command = [
            "etcd", "--name", "one", "--data-dir", str(self.directory / "data"),
            "--listen-client-urls", client, "--advertise-client-urls", client,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"one={peer}", "--logger", "zap", "--log-level", "error",
            *self._flags,
        ]  # fmt: skip
        if self.certificates:
            command += [
                "--cert-file", str(self.directory / "tls" / "server.pem"),
                "--key-file", str(self.directory / "tls" / "server.key"),
                "--trusted-ca-file", self.certificates["ca"], "--client-cert-auth",
            ]  # fmt: skip
        mode = "ab" if self._has_served else "wb"
        with (self.directory / "etcd.log").open(mode) as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._answers, within_s=START_S)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self.directory / "etcd.log").read_text()
        try:
            find_leader(self.place("is it there"), time.monotonic() + 1.0)
        except PermissionDeniedError:
            return True
        except KVStoreError:
            return False
        return True

    def stop(self, number: int = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(number)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def control(self, *arguments: str, user: str = "") -> str:
        """``etcdctl``; what it says."""
        need_program("etcdctl", "etcd-client")
        command = ["etcdctl", "--endpoints", f"127.0.0.1:{self.port}", *arguments]
        if user:
            command += ["--user", user]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True,
            env=os.environ | {"ETCDCTL_API": "3"},
        )  # fmt: skip
        return done.stdout


def make_certificates(directory: Path) -> dict[str, str]:
    """An authority, a server's certificate for 127.0.0.1 and a client's; the client's three files
    as fields of ``EtcdPlace``."""
    need_program("openssl", "openssl")
    directory.mkdir(parents=True)

    def openssl(*arguments: str) -> None:
        subprocess.run(
            ["openssl", *arguments], cwd=directory, check=True, capture_output=True, timeout=60
        )

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2",
            "-subj", "/CN=authority")  # fmt: skip
    for name in ("server", "client"):
        extensions = directory / f"{name}.ext"
        extensions.write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n"
        )
        openssl("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr",
                "-subj", f"/CN={name}")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-CAcreateserial", "-out", f"{name}.pem", "-days", "2",
                "-extfile", extensions.name)  # fmt: skip
    files = {"ca": "ca.pem", "cert": "client.pem", "key": "client.key"}
    return {name: str(directory / file) for name, file in files.items()}


class Relay:
    """TCP from its own port to ``target``. While it is ``cut`` nothing passes: connections stay
    open and silent, new ones are taken and silent, too; as when a switch drops every packet."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._passes = threading.Event()
        self._passes.set()
        self._over = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def cut(self) -> None:
        self._passes.clear()

    def mend(self) -> None:
        self._passes.set()
        self._wake.send(b"m")

    def close(self) -> None:
        self._over = True
        self._wake.send(b"x")
        self._thread.join()
        for sock in (self._listener, self._wake, self._woken):
            sock.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ, None)
            selector.register(self._woken, selectors.EVENT_READ, None)
            pairs: dict[socket.socket, socket.socket] = {}
            held: set[socket.socket] = set()
            fresh: list[socket.socket] = []
            while not self._over:
                if self._passes.is_set():
                    for end in held & pairs.keys():
                        selector.register(end, selectors.EVENT_READ, None)
                    held.clear()
                    for near in fresh:
                        with contextlib.suppress(OSError):
                            target = ("127.0.0.1", self._target)
                            far = socket.create_connection(target, timeout=2)
                            pairs |= {near: far, far: near}
                            for end in (near, far):
                                selector.register(end, selectors.EVENT_READ, None)
                            continue
                        near.close()
                    fresh.clear()
                for event, _ in selector.select(1.0):
                    sock: Any = event.fileobj
                    if sock is self._listener:
                        fresh.append(self._listener.accept()[0])
                    elif sock is self._woken:
                        self._woken.recv(64)
                    elif not self._passes.is_set():
                        selector.unregister(sock)
                        held.add(sock)
                    elif sock in pairs:
                        self._pass_on(selector, pairs, sock)
            for end in [*pairs, *fresh]:
                end.close()

    @staticmethod
    def _pass_on(
        selector: selectors.BaseSelector,
        pairs: dict[socket.socket, socket.socket],
        sock: socket.socket,
    ) -> None:
        try:
            data = sock.recv(1 << 16)
            if data:
                pairs[sock].sendall(data)
                return
        except OSError:
            pass
        for end in (sock, pairs[sock]):
            del pairs[end]
            with contextlib.suppress(KeyError, ValueError):
                selector.unregister(end)
            end.close()


@contextlib.contextmanager
def running(directory: Path, *, tls: bool = False) -> Iterator[EtcdServer]:
    server = EtcdServer(directory, tls=tls)
    try:
        server.start()
        yield server
    finally:
        server.stop()
