"""One Docker for all tests here; without one they are skipped: ``make test-containers``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.containers.docker import Docker, missing


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    why = missing()
    if why:
        pytest.skip(why)
    docker = Docker(tmp_path_factory.mktemp("docker"))
    try:
        yield docker
    finally:
        docker.close()


@pytest.fixture
def docker(daemon: Docker) -> Iterator[Docker]:
    """Without containers, before and after."""
    yield daemon
    daemon.clear()
