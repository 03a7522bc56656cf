"""The benchmark of a GPU, on the tests' fake: ``python -m tests.gpu.bench_on_a_fake --quick``.

It tests that the benchmark works; its numbers mean nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from bench.gpu import GPU, main
from kvstore.bench.ours import Store, own_master
from kvstore.process.children import Child
from tests.support import fake_device

NOTE = "The GPU is a fake, made of the host's memory: these numbers mean nothing."


class FakeGPU(GPU):
    name = "fake:0"
    note = NOTE

    @property
    def title(self) -> str:
        return "none"

    def batch_bytes(self, *, quick: bool) -> int:
        return 12 << 20

    @contextlib.contextmanager
    def store_on_it(self, pool_bytes: int) -> Iterator[Store]:
        with own_master("--lease-ms", "1000") as (address, pid):
            node = Child.start(
                "tests.support.fake_node", "--master", address, "--memory", str(pool_bytes),
                "--port", "0", "--no-keep", "--device", self.name,
            )  # fmt: skip
            try:
                yield Store(address, {"master": pid, "storage": node.pid})
            finally:
                node.stop()

    def page_locked(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def wait(self) -> None:
        pass

    def products(self) -> Callable[[], float]:
        return self.products_of(torch.randn(2, 64, 64), 200)


if __name__ == "__main__":
    fake_device.add()
    main(obj=FakeGPU)
