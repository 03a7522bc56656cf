"""A host that was suspended, as its processes see it: only one of the two clocks has jumped."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

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
