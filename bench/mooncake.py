"""Driver for Mooncake Store: its own servers and its own client, used as documented.

The package is ``mooncake-transfer-engine-non-cuda``. Its client transfers bytes over TCP to a
storage process (``tcp``), or as a *dummy* client next to a storage process on the same host,
through shared memory (``shm``). Objects are put from and got into memory that is registered with
the client, so that it copies as little as it can.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.bench.processes import Children, Program, Servers, connects, free_port
from kvstore.bench.session import EXIST, GET, PUT, StoreDriver, Work
from kvstore.bench.timing import Bytes, fill_randomly, memory, require
from kvstore.errors import NoSpaceError, StartupError
from kvstore.runtime import interpreter

PACKAGE = "mooncake-transfer-engine-non-cuda"
DEBIAN = "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2"
HOST = "127.0.0.1"
METADATA = "P2PHANDSHAKE"
READY_SECONDS = 60.0
PAUSE_SECONDS = 0.05
FIRST = "is-there-room"
THREADS = 2
NO_SPACE = -200
"""Code of Mooncake's client while the memory is full: eviction follows in the background."""
OFFLOAD_SECONDS = 1
"""Between two requests of the storage process for objects to write. The default is 10."""
BUFFER_BYTES = 64 << 20
"""The client's own buffer for unregistered memory; all measured memory is registered."""


def missing() -> str | None:
    """Return the reason why Mooncake cannot be used here, with a remedy, or None."""
    if importlib.util.find_spec("mooncake") is None:
        return f"Mooncake is not installed: pip install {PACKAGE}"
    # In a separate process: the import starts threads, and may fail for lack of a system library.
    asked = interpreter.command("-c", "import mooncake.store")
    environ = interpreter.environment()
    answer = subprocess.run(asked, capture_output=True, text=True, check=False, env=environ)
    if answer.returncode == 0:
        return None
    reason = (answer.stderr.strip().splitlines() or ["it cannot be imported"])[-1]
    return f"Mooncake cannot be imported ({reason}). On Debian: {DEBIAN}"


def start(children: Children, memory_bytes: int, disk: Path | None = None) -> Servers:
    """Start a master and a process with so much memory; wait until they listen.

    Args:
        disk: directory to which objects are offloaded when they are evicted.

    Raises:
        ChildError: a process did not start.
    """
    master_port, metrics_port = free_port(), free_port()
    address = f"{HOST}:{master_port}"
    master = children.start_command(
        "mooncake-master", str(_program("mooncake_master")),
        f"--rpc_address={HOST}", f"--rpc_port={master_port}",
        f"--metrics_host={HOST}", f"--metrics_port={metrics_port}", "--logtostderr",
        f"--enable_offload={disk is not None}", "--offload_on_evict=true",
    )  # fmt: skip
    _listens(children, master, master_port)
    port = free_port()
    storage = children.start_command(
        "mooncake-memory", str(_program("mooncake_client")),
        f"--master_server_address={address}", f"--metadata_server={METADATA}",
        f"--host={HOST}", f"--port={port}", "--protocol=tcp",
        f"--global_segment_size={memory_bytes}", f"--threads={THREADS}", "--logtostderr",
        f"--enable_offload={disk is not None}",
        environment={
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(disk),
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": str(OFFLOAD_SECONDS),
        },
    )  # fmt: skip
    _listens(children, storage, port)
    pids = {"master": master.process.pid, "storage": storage.process.pid}
    return Servers({"tcp": address, "shm": f"{HOST}:{port}"}, pids)


class MooncakeDriver(StoreDriver):
    """Makes the calls of Mooncake's Python client."""

    def __init__(self, address: str, mode: str, memory_bytes: int) -> None:
        """
        Args:
            mode: ``tcp``, or ``shm`` for the dummy client.
            address: for ``tcp`` the master's address, for ``shm`` that of the storage process.
            memory_bytes: size of the caller's memory to put from, and of that to get into.

        Raises:
            StartupError: Mooncake's client failed.
        """
        module: Any = importlib.import_module("mooncake.store")  # exists only if it is installed
        self._store = module.MooncakeDistributedStore()
        if mode == "shm":
            self._well(self._store.setup_dummy(4 * memory_bytes, BUFFER_BYTES, address), "set up")
            self.source, self.target = self._borrowed(memory_bytes), self._borrowed(memory_bytes)
            fill_randomly(self.source)
            self.target[:] = 1
        else:
            failed = self._store.setup(HOST, METADATA, 0, BUFFER_BYTES, "tcp", "", address)
            self._well(failed, "set up")
            self.source, self.target = memory(memory_bytes)
        for buffer in (self.source, self.target):
            self._well(self._store.register_buffer(buffer.ctypes.data, memory_bytes), "register")
        self._wait_for_space()

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        keys, count = [list(batch) for batch in batches], len(batches)
        store = self._store
        if op == EXIST:
            return Work(
                lambda i: store.batch_is_exist(keys[i % count]),
                lambda found: require(set(found) == {1}, "was not there in Mooncake"),
            )
        memory = {PUT: self.source, GET: self.target}[op]
        first = memory.ctypes.data
        if len(keys[0]) == 1:
            single = [key for [key] in keys]
            if op == PUT:
                return Work(lambda i: store.put_from(single[i % count], first, size), _all_well)
            return Work(lambda i: store.get_into(single[i % count], first, size), _sizes(size))
        pointers = [first + i * size for i in range(len(keys[0]))]
        sizes = [size] * len(pointers)
        if op == PUT:
            return Work(lambda i: store.batch_put_from(keys[i % count], pointers, sizes), _all_well)
        return Work(lambda i: store.batch_get_into(keys[i % count], pointers, sizes), _sizes(size))

    def remove(self, keys: Sequence[str]) -> None:
        self._store.batch_remove(list(keys), True)

    def close(self) -> None:
        self._store.close()

    def _borrowed(self, size: int) -> Bytes:
        """Return memory that the client shares with its storage process."""
        address = self._store.alloc_from_mem_pool(size)
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))

    def _wait_for_space(self) -> None:
        """Wait until a put succeeds: the storage process listens before its memory is mounted."""
        deadline = time.monotonic() + READY_SECONDS
        while failed := self._store.put_from(FIRST, self.source.ctypes.data, 1):
            if time.monotonic() > deadline:
                self._well(failed, "put")
            time.sleep(PAUSE_SECONDS)
        self._store.remove(FIRST, True)

    def _well(self, failed: int, what: str) -> None:
        if failed:
            raise StartupError(f"Mooncake's client cannot {what}: {failed}")


class OffloadDriver(MooncakeDriver):
    """A client of a store that offloads: a put waits for space, and a get reads files, which no
    page cache holds."""

    def __init__(self, address: str, mode: str, memory_bytes: int) -> None:
        """``address``: that of ``MooncakeDriver``, a space, and the directory of the files."""
        address, self._disk = address.split()
        super().__init__(address, mode, memory_bytes)

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        work = super().work(op, batches, size)
        if op == PUT:

            def put(i: int) -> Any:
                while NO_SPACE in _codes(result := work.call(i)):
                    time.sleep(PAUSE_SECONDS)
                return result

            return Work(put, work.check)
        for path in Path(self._disk).iterdir():
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return Work(lambda i: [code == size for code in _codes(work.call(i))], work.check)


def _program(name: str) -> Path:
    """Return the package's own binary; the script that pip installs only runs it."""
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(next(iter(spec.submodule_search_locations)), name)


def _listens(children: Children, child: Program, port: int) -> None:
    children.until(child, lambda: connects(HOST, port), READY_SECONDS)


def _codes(result: Any) -> list[int]:
    return result if isinstance(result, list) else [result]


def _all_well(result: Any) -> None:
    codes = _codes(result)
    if NO_SPACE in codes:
        raise NoSpaceError(
            "Mooncake's memory is full",
            advice="Give it more memory, or wait until it has evicted objects of others.",
        )
    require(all(code == 0 for code in codes), "was not stored by Mooncake")


def _sizes(size: int) -> Any:
    def check(result: Any) -> None:
        require(all(each == size for each in _codes(result)), "did not come from Mooncake")

    return check
