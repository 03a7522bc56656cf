"""The word that says whether an owner lives: however it ends, and before its files are closed."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvstore.memory import owner_futex
from tests.support.wait import until

OWNER = """
import sys, threading
from kvstore.memory import owner_futex
with open(sys.argv[1], "r+b") as file:
    held = owner_futex.acquire_owner_futex(file.fileno(), 64)
print("held", flush=True)
sys.stdin.read()
if sys.argv[2] == "lets go":
    owner_futex.release_owner_futex(held)
    print("let go", flush=True)
    threading.Event().wait()
"""


def word(memory: mmap.mmap) -> int:
    return int.from_bytes(memory[64:68], "little")


@pytest.mark.parametrize("end", ["killed", "exits", "lets go"])
def test_the_word_says_whether_the_owner_lives(tmp_path: Path, end: str) -> None:
    path = tmp_path / "page"
    path.write_bytes(bytes(4096))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096) as memory:
        assert not owner_futex.is_owner_alive(word(memory))
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(path), end],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with owner:
            assert owner.stdout is not None
            assert owner.stdin is not None
            assert owner.stdout.readline() == "held\n"
            assert owner_futex.is_owner_alive(word(memory))
            if end == "killed":
                owner.send_signal(signal.SIGSTOP)
                os.waitpid(owner.pid, os.WUNTRACED)
                assert owner_futex.is_owner_alive(word(memory)), (
                    "a stopped process keeps its memory"
                )
                owner.kill()
                owner.wait()
            elif end == "exits":
                owner.stdin.close()
                owner.wait()
            else:
                owner.stdin.close()
                assert owner.stdout.readline() == "let go\n"
            assert not owner_futex.is_owner_alive(word(memory))
            owner.kill()


@contextmanager
def file_and_memory() -> Iterator[tuple[int, mmap.mmap]]:
    fd = os.memfd_create("page")
    os.ftruncate(fd, 4096)
    with mmap.mmap(fd, 4096) as memory:
        yield fd, memory
    os.close(fd)


def test_a_dead_threads_word_can_be_held_anew() -> None:
    with file_and_memory() as (fd, memory):
        thread = threading.Thread(target=owner_futex.acquire_owner_futex, args=(fd, 64))
        thread.start()
        thread.join()
        until(
            lambda: not owner_futex.is_owner_alive(word(memory))
        )  # ``join`` returns a moment earlier
        held = owner_futex.acquire_owner_futex(fd, 64)
        assert owner_futex.is_owner_alive(word(memory))
        assert owner_futex.release_owner_futex(held)
        assert not owner_futex.is_owner_alive(word(memory))
