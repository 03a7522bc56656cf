"""The word that says whether an owner lives: however it ends, and before its files are closed."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvstore.memory import alive

OWNER = """
import mmap, sys, threading
from kvstore.memory import alive
with open(sys.argv[1], "r+b") as file:
    memory = mmap.mmap(file.fileno(), 4096)
alive.hold(memory, 64)
print("held", flush=True)
sys.stdin.read()
if sys.argv[2] == "lets go":
    alive.let_go(memory, 64)
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
        assert not alive.is_held(word(memory))
        owner = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(path), end],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with owner:
            assert owner.stdout is not None
            assert owner.stdin is not None
            assert owner.stdout.readline() == "held\n"
            assert alive.is_held(word(memory))
            if end == "killed":
                owner.send_signal(signal.SIGSTOP)
                os.waitpid(owner.pid, os.WUNTRACED)
                assert alive.is_held(word(memory)), "a stopped process keeps its memory"
                owner.kill()
                owner.wait()
            elif end == "exits":
                owner.stdin.close()
                owner.wait()
            else:
                owner.stdin.close()
                assert owner.stdout.readline() == "let go\n"
            assert not alive.is_held(word(memory))
            owner.kill()


def test_a_dead_owners_word_can_be_held_anew(tmp_path: Path) -> None:
    with mmap.mmap(-1, 4096) as memory:
        thread = threading.Thread(target=alive.hold, args=(memory, 64))
        thread.start()
        thread.join()
        assert not alive.is_held(word(memory)), "the thread is gone"
        alive.hold(memory, 64)
        assert alive.is_held(word(memory))
        assert alive.let_go(memory, 64)
        assert not alive.is_held(word(memory))


def test_only_the_owner_lets_go() -> None:
    with mmap.mmap(-1, 4096) as memory:
        alive.hold(memory, 64)
        answers: list[bool] = []
        thread = threading.Thread(target=lambda: answers.append(alive.let_go(memory, 64)))
        thread.start()
        thread.join()
        assert answers == [False]
        assert alive.is_held(word(memory))
        assert alive.let_go(memory, 64)
