"""Memory that a server frees stays its own: no page is faulted in twice."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, resource, sys
from kvstore.runtime.malloc_tuning import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def call(sizes=(100_000, 120_000, 300_000, 300_000)):
    held = [libc.malloc(size) for size in sizes]
    for at, size in zip(held, sizes):
        ctypes.memset(at, 1, size)
    for at in reversed(held):
        libc.free(at)
call()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    call()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], check=True, capture_output=True, text=True
    )
    return int(done.stdout)


def test_buffers_of_a_call_are_not_faulted_in_again() -> None:
    assert faults("kept") < 100
    assert faults("as glibc does it") > 5_000, "the program does not show what it is about"
