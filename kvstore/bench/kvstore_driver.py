"""The driver of this store: the public client, with a separate master and node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvstore.bench.processes import Children, Servers, start_store
from kvstore.bench.session import EXIST, GET, GET_AGAIN, GET_VIEW, MATCH, PUT, StoreDriver, Work
from kvstore.bench.timing import memory, require
from kvstore.calls import PutOutcome
from kvstore.config import ClientConfig
from kvstore.memory.header import HEADER_BYTES

if TYPE_CHECKING:
    from kvstore import Client

NAMESPACE = "kvstore-bench"
SHORT_LEASES = ("--lease-ms=1000",)
"""Memory of removed objects is free one lease later, and the benchmark waits for that."""
SETTLE_SECONDS = 60.0
SETTLED_PART = 0.1
"""Share of the memory that removed objects may still use."""
OBJECT_BYTES_MORE = 2 * HEADER_BYTES
"""Maximum overhead of an object's extent: header and alignment."""
PAUSE_SECONDS = 0.02
TIMEOUT_MS = 60_000


@contextlib.contextmanager
def own_store(
    pool_bytes: int, node_flags: Sequence[str] = (), *, flags: Sequence[str] = SHORT_LEASES
) -> Iterator[Servers]:
    """Run a store, which ends with the block. Its memory has been touched.

    Args:
        flags: of the master.
    """
    with Children() as children:
        yield start_store(children, pool_bytes, flags=flags, node_flags=node_flags)


class KVStoreDriver(StoreDriver):
    """Makes the calls by two clients: one calls the master at each get; the other caches locations
    while they are leased (``GET_AGAIN``)."""

    def __init__(
        self,
        address: str,
        mode: str,
        memory_bytes: int,
        *,
        pool_bytes: int | None = None,
        **settings: Any,
    ) -> None:
        """
        Args:
            mode: transport.
            memory_bytes: size of the caller's memory to put from, and of that to get into.
            pool_bytes: bytes of a running store's memory that the benchmark uses; it then removes
                all objects of ``NAMESPACE`` before and after. None: all of the memory.
            settings: more fields of ``ClientConfig``.
        """
        from kvstore import Client

        self._pool_bytes = pool_bytes
        self.source, self.target = memory(memory_bytes)
        caching = ClientConfig(
            master=address, transports=(mode,), namespace=NAMESPACE, timeout_ms=TIMEOUT_MS,
            **settings,
        )  # fmt: skip
        plain = caching.model_copy(update={"placements_max": 0})
        with contextlib.ExitStack() as stack:
            self.plain: Client = stack.enter_context(Client(config=plain))
            self.caching: Client = stack.enter_context(Client(config=caching))
            if pool_bytes is not None:
                self.clear()
                stack.callback(self.clear)
            self._clients = stack.pop_all()

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        keys = [[key.encode() for key in batch] for batch in batches]
        count = len(keys)
        plain, caching = self.plain, self.caching
        if op == EXIST:
            return Work(lambda i: plain.exists_many(keys[i % count]), _all_there)
        if op == MATCH:
            length = len(keys[0])
            return Work(
                lambda i: plain.match_prefix(keys[i % count]),
                lambda matched: require(matched == length, "of the chain was not matched"),
            )
        pieces = range(0, size * len(keys[0]), size)
        sources = [self.source[at : at + size] for at in pieces]
        targets = [self.target[at : at + size] for at in pieces]
        if len(keys[0]) > 1:
            pairs = [list(zip(some, sources, strict=True)) for some in keys]
            calls: dict[str, Callable[[int], Any]] = {
                PUT: lambda i: plain.put_many(pairs[i % count]),
                GET: lambda i: plain.get_into(keys[i % count], targets),
                GET_AGAIN: lambda i: caching.get_into(keys[i % count], targets),
                GET_VIEW: lambda i: plain.get_many(keys[i % count], copy=False),
            }
        else:
            single, source, target = [key for [key] in keys], sources[0], targets[0]
            calls = {
                PUT: lambda i: plain.put(single[i % count], source),
                GET: lambda i: plain.get_into(single[i % count], target),
                GET_AGAIN: lambda i: caching.get_into(single[i % count], target),
                GET_VIEW: lambda i: plain.get(single[i % count], copy=False),
            }
        return Work(calls[op], {PUT: _stored, GET_VIEW: _not_none}.get(op, _all_there))

    def put_chain(self, keys: Sequence[str], size: int) -> None:
        piece = self.source[:size]
        _stored(self.plain.put_chain([key.encode() for key in keys], [piece] * len(keys)))

    def remove(self, keys: Sequence[str]) -> None:
        encoded = [key.encode() for key in keys]
        for start in range(0, len(encoded), 1024):
            self.plain.remove_many(encoded[start : start + 1024])

    def clear(self) -> None:
        """Remove objects of this and earlier benchmarks, and wait until their memory is free."""
        self.plain.clear(NAMESPACE)
        self.wait_until_free()

    def wait_until_free(self) -> None:
        end = time.monotonic() + SETTLE_SECONDS
        while not self._is_free() and time.monotonic() < end:
            time.sleep(PAUSE_SECONDS)

    def wait_until_written(self) -> None:
        last = -1
        while last != (written := self._written()):
            last = written
            time.sleep(PAUSE_SECONDS)

    def _written(self) -> int:
        return sum(disk.written for node in self.plain.status().nodes for disk in node.disks)

    def close(self) -> None:
        self._clients.close()

    def _is_free(self) -> bool:
        """Return whether the used memory is hardly more than the existing objects need."""
        status = self.plain.status()
        objects = sum(
            namespace.objects * OBJECT_BYTES_MORE + namespace.size
            for namespace in status.namespaces
        )
        pool = status.size if self._pool_bytes is None else self._pool_bytes
        return status.used <= objects + pool * SETTLED_PART


def _stored(result: Any) -> None:
    outcomes = result if isinstance(result, list) else [result]
    require(all(outcome == PutOutcome.STORED for outcome in outcomes), "was not stored")


def _all_there(result: Any) -> None:
    require(all(result), "was not there")


def _not_none(result: Any) -> None:
    values = result if isinstance(result, list) else [result]
    require(all(value is not None for value in values), "was not there")
