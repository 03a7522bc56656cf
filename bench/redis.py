"""Driver for Redis: Debian's server, and redis-py with hiredis.

The server runs with its defaults, except that it keeps nothing on disk. The client has the fastest
settings for each size: reads of 1 MiB; hiredis, which reads replies and packs commands; and for
commands with objects of 1 MiB or more redis-py's own packer, because hiredis copies their bytes
twice. A client connects by TCP (``tcp``) or by the server's Unix socket (``shm``, the mode of
clients on the same host).
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Sequence
from typing import Any

from kvstore.bench.processes import Children, Servers, free_port
from kvstore.bench.session import EXIST, GET, MATCH, PUT, StoreDriver, Work
from kvstore.bench.timing import memory, require

PROGRAM = "redis-server"
PACKAGES = ("redis", "hiredis")
HOST = "127.0.0.1"
READ_BYTES = LARGE_BYTES = 1 << 20
BUFFER_CUTOFF = 6_000
"""redis-py's default: shorter arguments of a command are joined before they are sent."""
READY_SECONDS = 30.0


def missing() -> str | None:
    """Return the reason why Redis cannot be used here, with a remedy, or None."""
    if shutil.which(PROGRAM) is None:
        return f"there is no {PROGRAM}; on Debian: apt-get install {PROGRAM}"
    if any(importlib.util.find_spec(package) is None for package in PACKAGES):
        return "The client of Redis is not installed: pip install 'redis[hiredis]'"
    return None


def start(children: Children, *flags: str) -> Servers:
    """Start a server with these ``flags``, and wait until it accepts connections. By default its
    memory is not limited.

    Raises:
        ChildError: it did not start.
    """
    port, socket = free_port(), str(children.directory / "redis.socket")
    server = children.start_command(
        "redis", PROGRAM, "--bind", HOST, "--port", str(port), "--unixsocket", socket,
        "--save", "", "--appendonly", "no", "--dir", str(children.directory), *flags,
    )  # fmt: skip
    children.ready(server, "Ready to accept connections", READY_SECONDS)
    return Servers({"tcp": f"{HOST}:{port}", "shm": socket}, {"storage": server.process.pid})


class RedisDriver(StoreDriver):
    def __init__(self, address: str, mode: str, memory_bytes: int) -> None:
        """
        Args:
            mode: ``tcp``, or ``shm`` for the Unix socket; ``address`` belongs to it.
            memory_bytes: size of the caller's memory to put from, and of that to get into.
        """
        module: Any = importlib.import_module("redis.connection")  # if it is installed
        self.source, self.target = memory(memory_bytes)
        self._client = _connected(address, mode)
        encode = self._client.get_encoder().encode
        packer = module.PythonRespSerializer(BUFFER_CUTOFF, encode)
        self._large = _connected(address, mode, command_packer=packer)

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        keys, count = [[key.encode() for key in batch] for batch in batches], len(batches)
        client, length = self._client, len(batches[0])
        if op == EXIST:
            return Work(
                lambda i: client.exists(*keys[i % count]),
                lambda found: require(found == length, "was not there in Redis"),
            )
        if op == MATCH:
            return Work(
                lambda i: self._call_for_each(keys[i % count]),
                lambda found: require(sum(found) == length, "was not there in Redis"),
            )
        if op == PUT:
            client = self._large if size >= LARGE_BYTES else client
            pieces = [self.source[i * size : (i + 1) * size].data for i in range(length)]
            stored = [dict(zip(some, pieces, strict=True)) for some in keys]
            if length > 1:
                return Work(lambda i: client.mset(stored[i % count]), _stored)
            return Work(lambda i: client.set(keys[i % count][0], pieces[0]), _stored)
        assert op == GET, op
        if length > 1:
            return Work(lambda i: client.mget(keys[i % count]), self._copy)
        return Work(lambda i: client.get(keys[i % count][0]), lambda value: self._copy([value]))

    def remove(self, keys: Sequence[str]) -> None:
        if keys:
            self._client.delete(*keys)

    def close(self) -> None:
        self._client.close()
        self._large.close()

    def _call_for_each(self, keys: Sequence[bytes]) -> Any:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.exists(key)
        return pipeline.execute()

    def _copy(self, values: list[bytes]) -> None:
        """Copy the values of a get, which redis-py has made, into ``target``; is not timed."""
        require(None not in values, "was not there in Redis")
        at = 0
        for value in values:
            self.target[at : at + len(value)] = memoryview(value)
            at += len(value)


def _connected(address: str, mode: str, **more: Any) -> Any:
    redis: Any = importlib.import_module("redis")
    if mode == "shm":
        where = {"connection_class": redis.UnixDomainSocketConnection, "path": address}
    else:
        host, _, port = address.rpartition(":")
        where = {"host": host, "port": int(port)}
    pool = redis.ConnectionPool(**where, socket_read_size=READ_BYTES, **more)
    return redis.Redis.from_pool(pool)


def _stored(result: Any) -> None:
    require(result is True, "was not stored by Redis")
