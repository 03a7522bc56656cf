"""LMCache's remote storage, side by side: this store, this store in Mooncake's place, and Mooncake
Store.

    make bench-lmcache

Each system is behind LMCache's own ``RemoteBackend`` and memory, in a process of its own, and
stores in another process: ``kvstore`` through this project's plug-in, ``drop-in`` and ``mooncake``
through LMCache's own ``MooncakestoreConnector``. In each step the systems do the same call directly
after each other, in an order that changes from round to round; the pools are written through
before. Every byte is compared once a round. A row compares medians of rounds; its ratio is the
median of the rounds' ratios to Mooncake's time.

LMCache 0.5.6 has no way to Mooncake's shared-memory client, so Mooncake's bytes travel by TCP.
Where ``transport`` is ``tcp``, so do this store's.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final, NamedTuple

import rich.console

import kvstore.mooncake
from kvstore.bench import mooncake
from kvstore.bench.ours import own_store
from kvstore.bench.worker import environment
from kvstore.config import parse_size
from kvstore.demo.processes import Children
from kvstore.errors import StartupError

PLUGIN: Final = "kvstore"
DROP_IN: Final = "drop-in"
MOONCAKE: Final = "mooncake"
SYSTEMS: Final = (PLUGIN, DROP_IN, MOONCAKE)
OPERATIONS: Final = ("put", "contains", "get")

CHUNKS: Final = 64
"""Of one call: what LMCache stores of a prompt of 16,384 tokens."""

CALLS: Final = 3
"""Of an operation, in each round."""

TOKENS: Final = 256
"""Of a chunk: LMCache's default."""

POOL_BYTES: Final = 1 << 30
MEMORY_GIB: Final = 0.4
"""LMCache's own memory, in each process: more than two calls' chunks."""

PATIENCE_S: Final = 300.0


class Mode(NamedTuple):
    """What a table's rows have in common."""

    transport: str
    """Of this store: ``shm``, which a client takes on one host by itself, or ``tcp``."""
    save_chunk_meta: bool
    """LMCache's setting for ``MooncakestoreConnector``; the plug-in has no such choice."""


MODES: Final = (Mode("shm", False), Mode("shm", True), Mode("tcp", False))


class Row(NamedTuple):
    mode: Mode
    chunk_bytes: int
    operation: str
    milliseconds: dict[str, float]
    """Per system, of a call: the median of its rounds' medians."""
    ratios: dict[str, float]
    """Mooncake's time over that of each other system: above 1 that is faster."""

    def __str__(self) -> str:
        meta = "with metadata" if self.mode.save_chunk_meta else "without"
        times = "  ".join(f"{self.milliseconds[system]:9.2f}" for system in SYSTEMS)
        ratios = "  ".join(f"{self.ratios[system]:7.2f}" for system in (PLUGIN, DROP_IN))
        what = f"{self.operation} {CHUNKS} x {self.chunk_bytes >> 10} KiB"
        return f"{self.mode.transport:4} {meta:14} {what:22} {times}  {ratios}"


HEADER: Final = (
    f"{'':4} {'':14} {'milliseconds a call':22} "
    + "  ".join(f"{system:>9}" for system in SYSTEMS)
    + f"  {'kvstore':>7}  {DROP_IN:>7} (times as fast as mooncake)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--chunk", type=parse_size, nargs="+", default=[64 << 10, 1 << 20])
    parser.add_argument("--json", help="also write the rows into this file")
    arguments = parser.parse_args()
    if (problem := mooncake.missing()) is not None:
        sys.exit(problem)
    rows = []
    say = rich.console.Console(soft_wrap=True, highlight=False).print
    say(HEADER)
    for mode in MODES:
        for chunk_bytes in arguments.chunk:
            for row in measure(mode, chunk_bytes, arguments.rounds):
                say(row)
                rows.append(row)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump([{**row._asdict(), "mode": row.mode._asdict()} for row in rows], file)
    if slower := [row for row in rows if row.ratios[PLUGIN] < 1]:
        sys.exit(f"slower than Mooncake in {len(slower)} of {len(rows)} rows")


def measure(mode: Mode, chunk_bytes: int, rounds: int) -> list[Row]:
    """All operations on chunks of one size.

    Raises:
        StartupError, ChildError: a process failed.
    """
    per_round: dict[str, dict[str, list[float]]] = {
        operation: {system: [] for system in SYSTEMS} for operation in OPERATIONS
    }
    with (
        own_store(POOL_BYTES) as ours,
        Children(environment()) as children,
        contextlib.ExitStack() as stack,
    ):
        theirs = mooncake.start(children, POOL_BYTES)
        addresses = {PLUGIN: ours.address, DROP_IN: ours.address, MOONCAKE: theirs.master}
        workers = {
            system: stack.enter_context(_worker(system, addresses[system], mode, chunk_bytes))
            for system in SYSTEMS
        }
        for worker in workers.values():
            worker.ask("warm")
        for number in range(rounds):
            order = SYSTEMS[number % len(SYSTEMS) :] + SYSTEMS[: number % len(SYSTEMS)]
            for operation in OPERATIONS:
                for system in order:
                    samples = workers[system].ask(operation)
                    per_round[operation][system].append(statistics.median(samples))
            for worker in workers.values():
                worker.ask("clear")
    return [
        Row(
            mode,
            chunk_bytes,
            operation,
            {system: 1e3 * statistics.median(times) for system, times in by_system.items()},
            {
                system: statistics.median(
                    [
                        peer / own
                        for peer, own in zip(by_system[MOONCAKE], by_system[system], strict=True)
                    ]
                )
                for system in (PLUGIN, DROP_IN)
            },
        )
        for operation, by_system in per_round.items()
    ]


class _Worker:
    """The parent's side of a process: one line of JSON each way."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[str]) -> None:
        self._process = process
        self._errors = errors

    def ask(self, what: str) -> list[float]:
        """Seconds of each call. Raises StartupError: the process failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            print(what, file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            self._errors.seek(0)
            raise StartupError(f"a process of LMCache failed: {self._errors.read()[-4000:]}")
        samples: list[float] = json.loads(line)
        return samples


@contextlib.contextmanager
def _worker(system: str, address: str, mode: Mode, chunk_bytes: int) -> Iterator[_Worker]:
    env = environment() | {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false"}
    if system == DROP_IN:
        env["PYTHONPATH"] = kvstore.mooncake.python_path(env)
        env["KVSTORE_TRANSPORTS"] = mode.transport
    settings = json.dumps([system, address, mode, chunk_bytes])
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            [sys.executable, "-m", "kvstore.bench.lmcache", settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=env,
            text=True,
        ) as process,
    ):
        try:
            yield _Worker(process, errors)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()


# --- inside a process ----------------------------------------------------------------------------


class _Engine:
    """LMCache as in an engine's process, with one of the systems as its remote storage."""

    def __init__(self, system: str, address: str, mode: Mode, chunk_bytes: int) -> None:
        import asyncio
        import threading

        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
        from lmcache.v1.storage_backend.remote_backend import RemoteBackend

        name = "kvstore" if system == PLUGIN else "mooncakestore"
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=TOKENS,
            local_cpu=False,
            max_local_cpu_size=MEMORY_GIB,
            remote_storage_plugins=[name],
            blocking_timeout_secs=int(PATIENCE_S),
            extra_config=_plugin(address, mode) if system == PLUGIN else _connector(address, mode),
        )
        self._dtype = torch.bfloat16
        layers, heads, head_bytes = 4, 1, chunk_bytes // TOKENS // 2 // 4
        metadata = LMCacheMetadata(
            model_name="kvstore/bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=self._dtype,
            kv_shape=(layers, 2, TOKENS, heads, head_bytes // self._dtype.itemsize),
            chunk_size=TOKENS,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self._backend = RemoteBackend(config, metadata, self._loop, memory, "cpu", plugin_name=name)
        if self._backend.connection is None:
            raise StartupError(f"LMCache has not made a connector of {system}")
        found = memory.batched_allocate(metadata.get_shapes(), metadata.get_dtypes(), CHUNKS)
        assert found is not None, "LMCache's memory is too small"
        self._chunks = found
        for number, chunk in enumerate(self._chunks):
            assert chunk.get_size() == chunk_bytes
            chunk.raw_tensor.random_(0, 255, generator=torch.Generator().manual_seed(number))
        self._batches: list[list[Any]] = []
        self._warm_batches = int(POOL_BYTES * 0.85) // chunk_bytes // CHUNKS
        self._number = 0

    def warm(self) -> list[float]:
        """Writes the pool through, and removes that."""
        for _ in range(self._warm_batches):
            self._put()
        return self.clear()

    def put(self) -> list[float]:
        return [self._put() for _ in range(CALLS)]

    def contains(self) -> list[float]:
        return [self._contains(keys) for keys in self._batches]

    def get(self) -> list[float]:
        return [self._get(keys) for keys in self._batches]

    def clear(self) -> list[float]:
        """Removes what there is, and waits until this store has its memory back."""
        connector = self._backend.connection.getWrappedConnector()
        for keys in self._batches:
            if hasattr(connector, "store"):
                connector.store.batch_remove([key.to_string() for key in keys], True)
            else:
                for key in keys:
                    connector.remove_sync(key)
        self._batches = []
        time.sleep(1.2)  # a lease of the benchmark's master
        return []

    def close(self) -> None:
        self._backend.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _put(self) -> float:
        import asyncio

        keys = self._new_keys()
        for chunk in self._chunks:
            chunk.ref_count_up()  # as RemoteBackend does, for a put
        start = time.perf_counter()
        put = self._backend.connection.batched_put(keys, self._chunks)
        asyncio.run_coroutine_threadsafe(put, self._loop).result(PATIENCE_S)
        self._batches.append(keys)
        return time.perf_counter() - start

    def _contains(self, keys: list[Any]) -> float:
        start = time.perf_counter()
        found = self._backend.batched_contains(keys)
        took = time.perf_counter() - start
        assert found == CHUNKS, f"only {found} chunks are there"
        return took

    def _get(self, keys: list[Any]) -> float:
        import torch

        start = time.perf_counter()
        found = self._backend.batched_get_blocking(keys)
        took = time.perf_counter() - start
        for chunk, got in zip(self._chunks, found, strict=True):
            assert got is not None, "a miss"
            if keys is self._batches[-1]:
                assert torch.equal(chunk.raw_tensor, got.raw_tensor), "other bytes"
            got.ref_count_down()
        return took

    def _new_keys(self) -> list[Any]:
        from lmcache.utils import CacheEngineKey

        keys = []
        for _ in range(CHUNKS):
            self._number += 1
            digest = hashlib.sha256(f"{os.getpid()} {self._number}".encode()).digest()
            number = int.from_bytes(digest[:8], "big") >> 1
            keys.append(CacheEngineKey("kvstore/bench", 1, 0, number, self._dtype))
        return keys


def _plugin(address: str, mode: Mode) -> dict[str, Any]:
    return {
        "remote_storage_plugin.kvstore.module_path": "kvstore.connectors.lmcache",
        "remote_storage_plugin.kvstore.class_name": "KVStoreConnectorAdapter",
        "remote_storage_plugin.kvstore.master": address,
        "remote_storage_plugin.kvstore.transports": mode.transport,
        "save_chunk_meta": mode.save_chunk_meta,
    }


def _connector(address: str, mode: Mode) -> dict[str, Any]:
    return {
        "metadata_server": mooncake.METADATA,
        "master_server_address": address,
        "mooncake_master_server_addr": address,  # what Mooncake 0.3.13 calls it
        "local_hostname": mooncake.HOST,
        "protocol": "tcp",
        "global_segment_size": 0,
        "local_buffer_size": 256 << 20,
        "transfer_timeout": int(PATIENCE_S),
        "save_chunk_meta": mode.save_chunk_meta,
    }


def _serve(settings: Sequence[Any]) -> None:
    system, address, mode, chunk_bytes = settings
    # Mooncake's client prints; what is not an answer goes to the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine = _Engine(system, address, Mode(*mode), chunk_bytes)
    try:
        for line in sys.stdin:
            print(json.dumps(getattr(engine, line.strip())()), file=answers, flush=True)
    finally:
        engine.close()


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("["):
        _serve(json.loads(sys.argv[1]))
    else:
        main()
