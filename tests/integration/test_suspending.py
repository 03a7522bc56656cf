"""Hosts that are suspended and go on: what was promised to them has ended meanwhile."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.remote_clients import Remote, RemoteError

SHIM = """
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *ahead_s;

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("SUSPENDED");
    int fd = path ? open(path, O_RDONLY) : -1;
    void *at = fd < 0 ? MAP_FAILED : mmap(0, 8, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED)
        ahead_s = at;
    if (fd >= 0)
        close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && clock == CLOCK_BOOTTIME && ahead_s)
        now->tv_sec += *ahead_s;
    return failed;
}
"""


class Suspended:
    """Processes that are started with ``prefix`` are on a host of their own."""

    def __init__(self, directory: Path) -> None:
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("needs a C compiler")
        source, library = directory / "suspended.c", directory / "suspended.so"
        source.write_text(SHIM)
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
        self._file = directory / "suspended"
        self._file.write_bytes(bytes(8))
        self.prefix = ["env", f"LD_PRELOAD={library}", f"SUSPENDED={self._file}"]

    def sleep(self, seconds: int) -> None:
        """The host was suspended for so long in all."""
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), 8) as memory:
            memory[:] = struct.pack("<q", seconds)


@pytest.fixture
def suspended(tmp_path: Path) -> Suspended:
    return Suspended(tmp_path)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "python"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_client_believes_no_promise_of_before(
    tmp_path: Path, suspended: Suspended, transport: str, compiled: bool
) -> None:
    cluster = Cluster(tmp_path)
    prefix = [*suspended.prefix, *([] if compiled else ["KVSTORE_NATIVE=0"])]
    one: Remote | None = None
    try:
        cluster.start()
        one = Remote(cluster.address, {"transports": [transport]}, prefix)
        one.ask("client.put('key', b'value').name")
        for _ in range(2):  # the second read leases by time
            assert one.ask("client.get('key').decode()") == "value"
        held = []
        if transport == "shm":
            one.ask("workers.update(view=client.get('key', copy=False, kind='numpy'))")
            one.ask("workers.update(own=client.allocate(100, kind='numpy'))")
            held = ["client.lease(workers['view']).is_held", "client.lease(workers['own']).is_held"]
        assert all(one.ask(each) for each in held)
        cluster.master_server.freeze()
        try:
            assert one.ask("client.get('key', timeout_ms=300).decode()") == "value", "leased"
            suspended.sleep(3_600)
            assert not any(one.ask(each) for each in held)
            with pytest.raises(RemoteError, match="no reply from the master"):
                one.ask("client.get('key', timeout_ms=300)")
        finally:
            cluster.master_server.resume()
        assert one.ask("client.get('key').decode()") == "value"
        one.ask("client.put('other', b'value').name")
        assert one.took_s < 2.0
        one.close()
        one = None
        cluster.finish()
    finally:
        if one is not None:
            one.close()
        cluster.close()
