"""The GPU, and a store of real processes for all tests of this folder."""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvstore import Client
from kvstore.device.drivers import driver_of
from tests.gpu.machine import GPU, IS_REAL, NAME, POOL_BYTES, VARIABLE, machine
from tests.support.cluster import Cluster

if IS_REAL and not torch.cuda.is_available():
    raise pytest.UsageError(f"{VARIABLE}=1, but torch sees no GPU here")

collect_ignore = [] if IS_REAL else ["real"]


def pytest_report_header() -> str:
    if not IS_REAL:
        return "tests/gpu: with a fake GPU; make test-gpu uses a real one"
    return f"tests/gpu: {torch.cuda.get_device_name(NAME)}, CUDA {torch.version.cuda}"


@pytest.fixture(scope="session", autouse=True)
def context() -> None:
    """What CUDA opens once per process is open before the first test."""
    if IS_REAL:
        torch.ones(64, 64, device=NAME).matmul(torch.ones(64, 64, device=NAME))
        driver_of(NAME)
        torch.cuda.synchronize()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A master and a node. Each test has a namespace of its own."""
    with Cluster(tmp_path_factory.mktemp("store"), settings={"lease_ms": 4_000}) as cluster:
        cluster.start(memory=str(POOL_BYTES))
        yield cluster


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> Iterator[GPU]:
    """On the fake, each test has its own order of copies and kernels."""
    with machine(seed=zlib.crc32(request.node.name.encode())) as gpu:
        yield gpu


@pytest.fixture
def namespace() -> str:
    return f"gpu-{uuid.uuid4()}"


@pytest.fixture(params=["shm", "tcp"])
def transport(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def connect(
    gpu: GPU, store: Cluster, namespace: str, transport: str
) -> Iterator[Callable[..., Client]]:
    """Makes clients of one namespace and transport, closed before the GPU is checked."""
    with ExitStack() as stack:

        def new(**settings: Any) -> Client:
            given: dict[str, Any] = {
                "transports": (transport,),
                "namespace": namespace,
                "timeout_ms": 60_000,
            }
            return stack.enter_context(Client(store.address, **(given | settings)))

        yield new


@pytest.fixture
def client(connect: Callable[..., Client]) -> Iterator[Client]:
    """After the test, nothing of the ring is taken."""
    client = connect()
    yield client
    assert client.device(NAME).ring.taken == 0
