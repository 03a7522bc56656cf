"""The image of deploy/Containerfile, built from this checkout without a registry, and its cluster.

The base is a Debian that ``mmdebstrap`` makes, and pip finds its packages in a folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.containers.docker import ROOT, Container, Docker
from tests.containers.test_containers import GET, PUT
from tests.support.certificates import Identities
from tests.support.wait import until

BASE_PACKAGES = "python3,python3-venv,python3-dev,gcc,libc6-dev"
MIRROR = os.environ.get("DEBIAN_MIRROR", "http://deb.debian.org/debian")
BUILD_S = 900.0
SIZE = 100_000
MASTER = ("kvstore-master", "--host", "0.0.0.0", "--port", "50001")
READ_ONLY = ("--read-only", "--cap-drop", "ALL")
SHARED = ("--volume", "/dev/shm:/dev/shm")
OTHERS = """
FROM base
COPY etcd prometheus /usr/bin/
ENTRYPOINT ["/bin/sh", "-c", "if [ $# -gt 0 ]; then exec \\"$@\\"; fi; \\
exec prometheus --config.file=/etc/prometheus/prometheus.yml --storage.tsdb.path=/prometheus", "sh"]
"""

pytestmark = pytest.mark.timeout(1_500)


@pytest.fixture(scope="module")
def images(daemon: Docker, tmp_path_factory: pytest.TempPathFactory) -> Docker:
    """A Docker with the images ``kvstore`` and ``others`` (etcd and Prometheus)."""
    for program in ("mmdebstrap", "docker-compose", "etcd", "prometheus"):
        if shutil.which(program) is None:
            pytest.skip(f"missing: {program}")
    directory = tmp_path_factory.mktemp("image")
    base, context, others = (directory / name for name in ("base.tar", "context", "others"))
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={BASE_PACKAGES}",
         "bookworm", str(base), MIRROR],
        check=True, timeout=BUILD_S,
    )  # fmt: skip
    daemon("import", str(base), "base", timeout_s=BUILD_S)
    base.unlink()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in tracked.stdout.decode().split("\0"):
        path = ROOT / name
        if path.is_file() and not name.startswith(("tests/", "docs/")) and not path.is_symlink():
            (context / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, context / name)
    wanted = ["setuptools>=77", "mypy>=1.19", "wheel", f"{context}[proxy,events,auth]"]
    wheels = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir"]
    subprocess.run(
        [*wheels, str(context / "wheelhouse"), *wanted],
        check=True, timeout=BUILD_S, env={**os.environ, "KVSTORE_NATIVE": "0"},
    )  # fmt: skip
    for wheel in (context / "wheelhouse").glob("kvstore_llm-*"):
        wheel.unlink()  # the image builds its own, compiled
    daemon(
        "build", "--network", "none", "--file", str(context / "deploy/Containerfile"),
        "--tag", "kvstore", "--build-arg", "BASE=base", "--build-arg", "SETUP=",
        "--build-arg", "PIP_FLAGS=--no-index --find-links=/src/wheelhouse", str(context),
        timeout_s=BUILD_S,
    )  # fmt: skip
    others.mkdir()
    for program in ("etcd", "prometheus"):
        shutil.copy(shutil.which(program) or "", others)
    (others / "Dockerfile").write_text(OTHERS)
    daemon("build", "--network", "none", "--tag", "others", str(others), timeout_s=BUILD_S)
    return daemon


@pytest.fixture
def docker(images: Docker) -> Iterator[Docker]:
    yield images
    images.clear()
    for left in Path("/dev/shm").glob("kvstore.image-*"):
        left.unlink()


def python(at: Container, program: str, *arguments: str) -> Any:
    done = at.run("python", "-c", program, *arguments, user="10001", check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


def put(at: Container, master: str, key: str) -> None:
    assert python(at, PUT, master, key, str(SIZE))["said"] == "STORED"


def get(at: Container, master: str, key: str) -> list[str]:
    """By which transports the right bytes came."""
    found = python(at, GET, master, key, str(SIZE))
    assert found["right"]
    return list(found["by"])


def test_a_store_of_one_container_is_healthy_compiled_and_stops_cleanly(docker: Docker) -> None:
    options = [*READ_ONLY, "--shm-size", "128m", "--memory", "512m"]
    store = docker.run(*MASTER, "--memory", "32MiB", options=options, image="kvstore")
    store.says("as node")
    until(lambda: store.health == "healthy", within_s=60)
    put(store, "127.0.0.1:50001", "key")
    assert get(store, "127.0.0.1:50001", "key") == ["shm"]
    assert store.run("id", "-u", user="10001").stdout == "10001\n"
    parts = (
        "from kvstore.console.diagnostics.software import installation as i; "
        "print(f'\"{i()[-1].state}\"')"
    )
    assert python(store, parts) == "ok"
    assert "pip" not in store.run("ls", "/opt/kvstore/bin").stdout
    assert store.stop() == 0


def test_a_store_with_authentication_is_healthy_on_another_port(
    docker: Docker, tmp_path: Path
) -> None:
    """As its environment says, which names a web proxy, too."""
    store = Path(Identities(tmp_path).file("master"))
    # The user of the container, 10001, reads it, and makes a file of its own of it.
    store.chmod(0o644)
    tmp_path.chmod(0o755)
    script = (
        "umask 077; cp /given/master.auth /tmp/store.auth; "
        "exec kvstore-master --host :: --http-port 50777 --auth /tmp/store.auth"
    )
    options = [
        *READ_ONLY, "--tmpfs", "/tmp:mode=1777", "--volume", f"{tmp_path}:/given:ro",
        "--env", "HTTPS_PROXY=http://127.0.0.1:9", "--env", "HEALTH_AT=127.0.0.1:50777",
    ]  # fmt: skip
    master = docker.run("sh", "-c", script, options=options, image="kvstore")
    master.says("listening on")
    until(lambda: master.health == "healthy", within_s=60)


def test_the_cluster_of_compose(docker: Docker, tmp_path: Path) -> None:
    """Whole, with small nodes under names of this test; one is stopped and started again."""
    deploy = tmp_path / "deploy"
    shutil.copytree(ROOT / "deploy", deploy)
    file = deploy / "compose.yaml"
    file.write_text(file.read_text().replace("--name, node-", "--name, image-node-"))
    given = {
        "KVSTORE_IMAGE": "kvstore",
        "ETCD_IMAGE": "others",
        "PROMETHEUS_IMAGE": "others",
        "NODE_MEMORY": "32MiB",
        "COMPOSE_PROJECT_NAME": "kv",
    }
    services = set(yaml.safe_load(file.read_text())["services"])
    try:
        docker.compose(file, "up", "--detach", **given)
        running = docker.compose(file, "ps", "--services", "--filter", "status=running", **given)
        assert set(running.split()) == services

        ids = {
            name: docker.compose(file, "ps", "--quiet", name, **given).strip() for name in services
        }
        nodes = [Container(docker, ids[name]) for name in ("node-1", "node-2")]
        for node in nodes:
            until(lambda node=node: node.health == "healthy", within_s=60)  # type: ignore[misc]
        masters = "master-1:50001,master-2:50001"
        engine = docker.run(
            "sleep", "infinity", image="kvstore",
            options=[*READ_ONLY, *SHARED, "--network", "kvstore"],
        )  # fmt: skip
        keys = [f"key-{number}" for number in range(8)]
        for key in keys:
            put(engine, masters, key)
            assert get(engine, masters, key) == ["shm"]
        for node in nodes:
            assert node.stop() == 0
            node.start()
            until(lambda node=node: node.health == "healthy", within_s=60)  # type: ignore[misc]
        for key in keys:
            assert get(engine, masters, key) == ["shm"]

        targets = (
            "import json, urllib.request as u; "
            "print(json.dumps([t['health'] for t in json.load(u.urlopen("
            "'http://prometheus:9090/api/v1/targets'))['data']['activeTargets']]))"
        )
        until(lambda: python(engine, targets) == ["up"] * 4, within_s=60)
    finally:
        docker.clear()
        docker.compose(file, "down", "--volumes", **given)
