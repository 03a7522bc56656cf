"""Real engines against a real store. Skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.engines import models
from tests.e2e.engines.engine import Engine
from tests.e2e.engines.preloaded import ForkServer
from tests.support.cluster import Cluster

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    with warnings.catch_warnings():  # of vLLM and torch, to each other
        warnings.simplefilter("ignore")
        import vllm.v1.core.sched.scheduler  # noqa: F401  # once, before the tests do

TIMEOUT_S = 400
"""Of a test that says nothing else: two engines at a time start on two cores, each for a minute."""

MakeModel = Callable[..., Path]
StartEngine = Callable[..., Engine]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def preloaded() -> Iterator[ForkServer]:
    preloaded = ForkServer()
    yield preloaded
    preloaded.close()


@pytest.fixture(scope="session")
def make_model(preloaded: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """A tiny model on disk; each kind is made once. Arguments: as of ``models``."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*options: str, name: str = "model") -> Path:
        if (name, *options) not in made:
            directory = tmp_path_factory.mktemp("models") / name
            with directory.with_suffix(".log").open("w+b") as log:
                files = (log.fileno(), log.fileno(), log.fileno())
                tiny = preloaded.start(models.__name__, [str(directory), *options], files)
                tiny.wait()
                assert (directory / "tokenizer_config.json").exists(), log.read()
            made[name, *options] = directory
        return made[name, *options]

    return make


@pytest.fixture(scope="session")
def llama(make_model: MakeModel) -> Path:
    return make_model()


@pytest.fixture(scope="session")
def plain(preloaded: ForkServer, make_model: MakeModel) -> Iterator[Engine]:
    """An engine of the same model without any connector: what is right."""
    with Engine(preloaded, make_model(), None) as plain:
        yield plain


@pytest.fixture
def engine(preloaded: ForkServer) -> Iterator[StartEngine]:
    """Starts engines, which end with the test."""
    started: list[Engine] = []

    def start(*arguments: object, **more: object) -> Engine:
        started.append(Engine(preloaded, *arguments, **more))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Cluster]:
    """A master and a node, with the promises that they make by default."""
    with Cluster(tmp_path) as cluster:
        cluster.start(memory="256MiB")
        yield cluster


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One store for the tests of a file, which use prompts of their own."""
    with Cluster(tmp_path_factory.mktemp("shared")) as cluster:
        cluster.start(memory="256MiB")
        yield cluster


def prompt(seed: int | str, tokens: int = 600) -> list[int]:
    """Token ids of ordinary bytes."""
    rng = random.Random(seed)
    return [rng.randrange(2, 258) for _ in range(tokens)]
