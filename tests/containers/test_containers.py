"""What containers bring: little /dev/shm of their own, and a limit of memory."""

from __future__ import annotations

from tests.containers.docker import Container, Docker

MASTER = ("--host", "0.0.0.0", "--port", "50001")

PUT = """
import json, sys, time
from kvstore import Client
from kvstore.errors import KVStoreError
master, key, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Client(master, timeout_ms=20_000) as client:
    started = time.monotonic()
    try:
        said = client.put(key, key.encode() * size).name
    except KVStoreError as error:
        said = str(error)
    print(json.dumps({"said": said, "seconds": time.monotonic() - started}))
"""

GET = """
import json, sys
from kvstore import Client
master, key, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
with Client(master) as client:
    value = client.get(key)
    print(json.dumps({
        "right": value == key.encode() * size,
        "by": sorted(name for name, moved in client.stats().transports.items() if moved),
    }))
"""

SIZE = 100_000


def put(at: Container, master: str, key: str) -> dict[str, object]:
    return dict(at.python(PUT, master, key, str(SIZE)))


def get(at: Container, master: str, key: str) -> list[str]:
    """By which transports the right bytes came."""
    found = at.python(GET, master, key, str(SIZE))
    assert found["right"]
    return list(found["by"])


def of(container: Container) -> str:
    return f"{container.address}:50001"


def test_more_memory_than_the_container_may_have_is_refused(docker: Docker) -> None:
    limited = ["--memory", "300m", "--memory-swap", "300m", "--shm-size", "4g"]
    refused = docker.kvstore("master", *MASTER, "--memory", "1GiB", options=limited)
    assert refused.ended() == 1
    assert not refused.killed_for_memory
    said = refused.said()
    assert "1024 MiB do not fit into the memory limit of the control group" in said, said
    assert "docker run --memory" in said
    fits = docker.kvstore("master", *MASTER, "--memory", "64MiB", options=limited)
    fits.says("listening on")
    assert put(fits, of(fits), "key")["said"] == "STORED"
    assert get(fits, of(fits), "key") == ["shm"]


def test_the_shared_memory_that_docker_gives_is_too_little(docker: Docker) -> None:
    master = docker.kvstore("master", *MASTER)
    master.says("listening on")
    refused = docker.kvstore("node", "--master", of(master), "--memory", "256MiB")
    assert refused.ended() == 1
    said = refused.said()
    assert "/dev/shm" in said
    assert "64 MiB" in said
    fits = docker.kvstore("node", "--master", of(master), "--memory", "48MiB")
    fits.says("serves")
    assert put(master, of(master), "key")["said"] == "STORED"
    assert get(master, of(master), "key") == ["tcp"]


def test_containers_with_and_without_common_shared_memory(docker: Docker) -> None:
    master = docker.kvstore("master", *MASTER)
    master.says("listening on")
    node = docker.kvstore(
        "node", "--master", of(master), "--memory", "32MiB", options=["--ipc", "shareable"]
    )
    node.says("serves")
    beside = docker.idle(["--ipc", f"container:{node.name}"])
    apart = docker.idle()
    assert put(beside, of(master), "from-beside")["said"] == "STORED"
    assert put(apart, of(master), "from-apart")["said"] == "STORED"
    for key in ("from-beside", "from-apart"):
        assert get(beside, of(master), key) == ["shm"]
        assert get(apart, of(master), key) == ["tcp"]
