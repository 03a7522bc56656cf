"""Programs of ``test_names.py``: each runs in namespaces of its own, with names of its own.

unshare --mount --net --uts python -m tests.integration.names_apart silent|own_name
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from kvstore import Client
from kvstore.errors import KVStoreError
from tests.support.name_server import ADDRESS, HERE, NameServer

MASTER, NODE = 26011, 26013
TIMEOUT_MS = 2_000
LATE_S = 0.6
"""What a call may take longer than its time-out, on a busy machine."""


def run(*command: str) -> None:
    subprocess.run(command, check=True)


def replace(folder: Path, path: str, text: str) -> None:
    """Puts another file in the place of ``path``, in this namespace."""
    file = folder / Path(path).name
    file.write_text(text)
    run("mount", "--bind", str(file), path)


@contextmanager
def server(module: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yields the process and its first line."""
    command = [sys.executable, "-m", module, "--config", "", "--http-port=0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, process.stdout.readline()
        finally:
            process.terminate()


def master() -> AbstractContextManager[tuple[subprocess.Popen[str], str]]:
    return server("kvstore.cli.master", f"--host={HERE}", f"--port={MASTER}")


def within_the_timeout(what: str, call: Callable[[], object], *, fails: str = "") -> None:
    started, said = time.monotonic(), ""
    try:
        call()
    except KVStoreError as error:
        said = str(error)
    took = time.monotonic() - started
    assert took < TIMEOUT_MS / 1000 + LATE_S, f"{what}: {took:.1f} s {said}"
    assert re.search(fails, said) if fails else not said, f"{what}: {said}"
    print(f"{what}: {took:.2f} s")


def client(address: str) -> Client:
    return Client(address, transports=("tcp",), timeout_ms=TIMEOUT_MS)


def silent(folder: Path) -> None:
    """The name server stops answering, and the master is started again."""
    replace(folder, "/etc/resolv.conf", f"nameserver {ADDRESS}\n")
    names = NameServer()
    threading.Thread(target=names.serve, daemon=True).start()
    with ExitStack() as stack:
        running, _ = stack.enter_context(master())
        stack.enter_context(
            server("kvstore.cli.node", f"--master={HERE}:{MASTER}", f"--host={HERE}",
                   f"--port={NODE}", f"--advertise=kv-node.test:{NODE}", "--memory=16MiB",
                   "--name=silent", "--no-keep")
        )  # fmt: skip
        old = stack.enter_context(client(f"kv-master.test:{MASTER}"))
        old.put("a", b"1" * 1000)
        assert old.get("a") == b"1" * 1000
        names.muted.set()
        within_the_timeout("a client that is connected", lambda: old.get("a"))
        for name in ("kv-master.test", HERE):
            new = stack.enter_context(client(f"{name}:{MASTER}"))
            within_the_timeout(f"a new client of {name}", lambda new=new: new.get("a"))  # type: ignore[misc]
        unknown = stack.enter_context(client(f"never-asked.test:{MASTER}"))
        within_the_timeout(
            "a name without an address yet", lambda: unknown.get("a"),
            fails="no name server has answered for 'never-asked.test'",
        )  # fmt: skip
        running.kill()
        running.wait()
        stack.enter_context(master())
        within_the_timeout("a client after the master's restart", lambda: old.exists("a"))


def own_name(folder: Path) -> None:
    """The host's own name is a loopback address, as on Debian."""
    run("hostname", "deb-host")
    run("ip", "address", "add", "10.99.1.2/32", "dev", "lo")
    replace(folder, "/etc/hosts", "127.0.0.1 localhost\n127.0.1.1 deb-host\n")
    with server("kvstore.cli.master", "--host=deb-host", f"--port={MASTER}") as (_, said):
        assert "this host only" in said, said
    with server("kvstore.cli.master", "--host=10.99.1.2", f"--port={MASTER}"):
        command = [sys.executable, "-m", "kvstore.cli.node", "--config", "", "--name=own"]
        command += ["--host=deb-host", f"--master=10.99.1.2:{MASTER}", "--memory=16MiB"]
        node = subprocess.run(command, check=False, capture_output=True, text=True, timeout=20)
        assert node.returncode == 1, node
        assert "deb-host is 127.0.1.1 here" in node.stderr, node.stderr
        assert "--host 10.99.1.2" in node.stderr, node.stderr


def main() -> None:
    run("ip", "link", "set", "lo", "up")
    run("mount", "--make-rprivate", "/")
    with tempfile.TemporaryDirectory() as folder:
        {"silent": silent, "own_name": own_name}[sys.argv[1]](Path(folder))


if __name__ == "__main__":
    main()
