"""SGLang's HiCache on this store and on Mooncake Store: ``python -m kvstore.bench.hicache``.

Set, get and exists of 64 pages, as SGLang's cache controller calls them. SGLang's own class,
``MooncakeStore``, runs on Mooncake's client, and on kvstore's ``mooncake.store`` in its place; this
project's class, ``KVStoreHiCache``, is compared with the former, too. The pages are those of one
host pool of latent attention (MLA, ``page_first``): one object of the page's size each.

Needs SGLang, whose environment ``make test-engines`` makes:
``.venv-sglang/bin/python -m kvstore.bench.hicache``.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from kvstore.bench import mooncake, report
from kvstore.bench.driver import EXIST, GET, PUT, Work
from kvstore.bench.machine import machine, today
from kvstore.bench.ours import OurDriver
from kvstore.bench.rows import KIB, MIB, Row
from kvstore.bench.session import require
from kvstore.bench.show import bar, ended_by_signals, exit_with, out_option, output, write_page
from kvstore.bench.side_by_side import Plan, compare, steps
from kvstore.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvstore.bench.driver import Bytes

NAME: Final = "hicache"
TITLE: Final = "SGLang's HiCache on kvstore and on Mooncake Store"
COMMAND: Final = "python -m kvstore.bench.hicache"
PAGES: Final = 64
POOL_BYTES: Final = 2 << 30
DROP_IN: Final = "drop-in"
NATIVE: Final = "native"
NATIVE_SHM: Final = "native, shm"
MODES: Final = (DROP_IN, NATIVE, NATIVE_SHM)
"""What runs on kvstore, and its transport; Mooncake always runs SGLang's class over TCP."""
NOTES: Final = {
    DROP_IN: "SGLang's MooncakeStore on both sides, over TCP: on kvstore's mooncake.store and on"
    " Mooncake's.",
    NATIVE: "KVStoreHiCache, over TCP, beside SGLang's MooncakeStore on Mooncake.",
    NATIVE_SHM: "KVStoreHiCache as it runs by default on the node's host: shared memory."
    " Not the same path: SGLang's MooncakeStore, over TCP here, shares memory only with a pool of"
    " Mooncake's own allocator.",
}  # fmt: skip

ROWS: Final = tuple(
    Row(op=op, mode=mode, size=size, batch=PAGES, goal=1, notes=(NOTES[mode],))
    for mode in MODES
    for op, size in ((PUT, 64 * KIB), (GET, 64 * KIB), (PUT, MIB), (GET, MIB), (EXIST, 0))
)

TOKEN_BYTES: Final = 4 * KIB
"""Of the pool: 16 layers of 128 bfloat16 values."""
LAYERS: Final = 16
LATENT: Final = 64


class HiCacheDriver:
    """Back-ends of SGLang on one host pool; one back-end per size of pages."""

    def __init__(self, address: str, mode: str, memory_bytes: int, *, on_mooncake: bool) -> None:
        """
        Args:
            address: of the master.
            mode: one of ``MODES``.
            memory_bytes: size of the pages to put from, and of those to get into.
        """
        import numpy as np

        self._address, self._mode = address, mode
        self._is_native = not on_mooncake and mode != DROP_IN
        self._ours: OurDriver | None = None
        if not on_mooncake:
            os.environ["KVSTORE_CLIENT_TRANSPORTS"] = "shm" if mode == NATIVE_SHM else "tcp"
            self._ours = OurDriver(address, "shm", 1)
        if not on_mooncake and mode == DROP_IN:
            import kvstore.mooncake

            kvstore.mooncake.install()
        self._tokens = memory_bytes // TOKEN_BYTES
        self._pool = _host_pool(2 * self._tokens)
        whole = self._pool.kv_buffer.view(-1).view(_torch().uint8).numpy()
        self.source: Bytes = whole[:memory_bytes]
        self.target: Bytes = whole[memory_bytes : 2 * memory_bytes]
        self.source[:] = np.random.default_rng(0).integers(0, 255, memory_bytes, dtype=np.uint8)
        self.target[:] = 1
        self._backends: dict[int, Any] = {}

    def work(self, op: str, batches: Sequence[Sequence[str]], size: int) -> Work:
        keys, count = [[_page_hash(key) for key in batch] for batch in batches], len(batches)
        backend = self._backend(size or TOKEN_BYTES)
        pages = len(keys[0])
        if op == EXIST:
            return Work(lambda i: backend.batch_exists(keys[i % count]), _found(pages))
        arange = _torch().arange
        used = pages * size // TOKEN_BYTES
        if op == PUT:
            sources = arange(used)
            return Work(lambda i: backend.batch_set_v1(keys[i % count], sources), _all_well)
        assert op == GET, op
        targets = arange(self._tokens, self._tokens + used)
        return Work(lambda i: backend.batch_get_v1(keys[i % count], targets), _all_well)

    def put_chain(self, keys: Sequence[str], size: int) -> None:
        raise InvalidArgumentError("HiCache has no match_prefix")

    def remove(self, keys: Sequence[str]) -> None:
        hashes = [_page_hash(key) for key in keys]
        if self._is_native:
            assert self._ours is not None
            for row in self._ours.plain.status().namespaces:
                if row.name.startswith("sglang/"):
                    self._ours.plain.remove_many(hashes, namespace=row.name)
            return
        for backend in self._backends.values():
            names = [f"{each}_{backend.mla_suffix}_k" for each in hashes]
            backend.store.batch_remove(names, True)

    def settle(self) -> None:
        if self._ours is not None:
            self._ours.settle()

    def close(self) -> None:
        for backend in self._backends.values():
            backend.close()
        if self._ours is not None:
            self._ours.close()

    def _backend(self, size: int) -> Any:
        if size not in self._backends:
            pool = copy.copy(self._pool)  # the same memory, in pages of another size
            pool.page_size = size // TOKEN_BYTES
            backend = self._backends[size] = self._attached(pool)
            backend.register_mem_pool_host(pool)
        return self._backends[size]

    def _attached(self, pool: Any) -> Any:
        """A back-end as SGLang's cache controller makes it."""
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
        from sglang.srt.mem_cache.storage import StorageBackendFactory

        name, extra = "mooncake", {
            "master_server_address": self._address, "metadata_server": mooncake.METADATA,
            "local_hostname": mooncake.HOST, "protocol": "tcp", "global_segment_size": 0,
        }  # fmt: skip
        if self._is_native:
            name, extra = "dynamic", {
                "backend_name": "kvstore", "module_path": "kvstore.connectors.sglang",
                "class_name": "KVStoreHiCache", "interface_v1": 1, "master": self._address,
                "model_id": "bench",
            }  # fmt: skip
        config = HiCacheStorageConfig(
            tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1,
            is_mla_model=True, enable_storage_metrics=False, is_page_first_layout=True,
            model_name=None, extra_config=extra,
        )  # fmt: skip
        return StorageBackendFactory.create_backend(name, config, pool)


def _host_pool(tokens: int) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = MLATokenToKVPool(
        size=1, page_size=1, dtype=_torch().bfloat16, kv_lora_rank=LATENT, qk_rope_head_dim=LATENT,
        layer_num=LAYERS, device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    with host_memory_budget_scope(2 * tokens * TOKEN_BYTES):
        pool = MLATokenToKVPoolHost(
            device._mla_buffer_info(), float(tokens), 0, 1, "page_first", pin_memory=False,
            device="cpu", device_capacity_tokens=1, start_layer=0, end_layer=LAYERS,
            target_layer_num=LAYERS,
        )  # fmt: skip
    assert pool.kv_buffer.nbytes >= tokens * TOKEN_BYTES, pool.kv_buffer.shape
    return pool


def _torch() -> Any:
    import torch

    return torch


def _page_hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _all_well(result: Sequence[bool]) -> None:
    require(all(result), "was not moved")


def _found(pages: int) -> Callable[[int], None]:
    return lambda found: require(found == pages, "was not there")


@click.command()
@click.option("--rounds", type=click.IntRange(1, 1000), default=5, show_default=True,
              help="Rounds, each with new processes on both sides.")  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0.01), default=1.0, show_default=True,
              help="Seconds per row, round and system.")  # fmt: skip
@out_option
def main(rounds: int, seconds: float, out: Path | None) -> None:
    """Measure SGLang's HiCache on this store and on Mooncake Store, row by row, in turn.

    Writes hicache.md and hicache.json.
    """
    if reason := mooncake.missing():
        raise click.ClickException(reason)
    plan = Plan(rounds=rounds, seconds=seconds, pool_bytes=POOL_BYTES)
    with ended_by_signals(), exit_with("bench"), bar(steps(ROWS, plan)) as progress:
        measured = compare(ROWS, plan, progress)
    measured.machine = machine((mooncake.PACKAGE, "sglang", "torch")) | {"date": today()}
    report.show(measured, output())
    if out is not None:
        page = report.as_markdown(measured, title=TITLE, command=COMMAND)
        write_page(out, NAME, page, measured.as_json())


if __name__ == "__main__":
    main()
