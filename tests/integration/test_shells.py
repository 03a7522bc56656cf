"""The scripts of ``kvstore completion`` in the shells that they are for, as its help says."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.programs import need_program
from tests.support.waiting import until

TYPED = {
    "kvstore statu": "kvstore status",
    "kvstore --verify h": "kvstore --verify header",
    "kvstore bench --transport bo": "kvstore bench --transport both",
    "kvstore status --clus": "kvstore status --cluster",
    "kvstore auth issue --role mast": "kvstore auth issue --role master",
    "kvstore put k greet": "kvstore put k greeting.txt",
    "kvstore-master --http-re": "kvstore-master --http-reads",
    "kvstore-proxy --prefill-ti": "kvstore-proxy --prefill-timeout-ms",
}
"""What a TAB makes of what was typed."""

SHOW = "\x07"
"""Ctrl-G, at which the shells below print the line that stands before the cursor."""
CLEAR = "\x15"

BASH = r"""
eval "$(kvstore completion bash)"
bind -x '"\C-g": echo "<$READLINE_LINE>"'
echo ready
"""

ZSH = """
autoload -Uz compinit
compinit -u -D
eval "$(kvstore completion zsh)"
show() { print -r -- "<$BUFFER>" }
zle -N show
bindkey '^G' show
print ready
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The home of somebody who uses the shells, where files can be completed."""
    (tmp_path / "greeting.txt").write_text("hello")
    (tmp_path / ".bashrc").write_text(BASH)
    (tmp_path / ".zshrc").write_text(ZSH)
    return tmp_path


def variables(home: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    changed = {"PATH": path, "HOME": str(home), "ZDOTDIR": str(home), "TERM": "xterm",
               "XDG_CONFIG_HOME": str(home / ".config"), "KVSTORE_CONFIG": ""}  # fmt: skip
    return {**os.environ, **changed}


class Terminal:
    """A shell that a person types into."""

    def __init__(self, command: list[str], home: Path) -> None:
        self._terminal, theirs = os.openpty()
        os.set_blocking(self._terminal, False)
        self.process = subprocess.Popen(
            [shutil.which("setsid") or "setsid", "--ctty", *command],
            stdin=theirs, stdout=theirs, stderr=theirs, cwd=home, env=variables(home),
        )  # fmt: skip
        os.close(theirs)
        self._said = ""

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def said(self, pattern: str) -> str:
        """Waits for what ``pattern`` describes; returns its first group, or all of it."""

        def found() -> re.Match[str] | None:
            with contextlib.suppress(BlockingIOError):
                self._said += os.read(self._terminal, 1 << 16).decode(errors="replace")
            return re.search(pattern, self._said)

        at = until(found, within_s=60)
        assert at is not None
        self._said = self._said[at.end() :]
        return at[at.re.groups]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)
        os.close(self._terminal)


@contextlib.contextmanager
def terminal(command: list[str], home: Path) -> Iterator[Terminal]:
    opened = Terminal(command, home)
    try:
        opened.said("ready")
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize(
    "command", [["bash", "--noprofile", "-i"], ["zsh", "-d", "-i"]], ids=lambda command: command[0]
)
def test_a_tab_completes_the_line(home: Path, command: list[str]) -> None:
    need_program(command[0], command[0])
    with terminal(command, home) as shell:
        became = {}
        for typed in TYPED:
            shell.type(f"{typed}\t{SHOW}")
            became[typed] = shell.said("<(kvstore.*?)>").rstrip()
            shell.type(CLEAR)
    assert became == TYPED


def test_zsh_says_what_the_commands_do(home: Path) -> None:
    need_program("zsh", "zsh")
    with terminal(["zsh", "-d", "-i"], home) as shell:
        shell.type("kvstore stat\t")
        assert shell.said(r"stat +-- (Show one object: size, place, lease, parent)")
        assert shell.said(r"status +-- (Show the cluster at a glance: nodes, their memory)")


def fish(home: Path, typed: str) -> dict[str, str]:
    """What fish offers after what was typed, and what it says of each."""
    done = subprocess.run(
        [need_program("fish", "fish"), "--command", "complete -C $argv[1]", typed],
        cwd=home, env=variables(home), capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert not done.stderr
    offered = (line.partition("\t") for line in done.stdout.splitlines())
    return {word: said for word, _, said in offered}


@pytest.fixture
def of_fish(home: Path) -> Path:
    need_program("fish", "fish")
    place = home / ".config/fish/conf.d/kvstore.fish"
    place.parent.mkdir(parents=True)
    script = ["kvstore", "completion", "fish"]
    place.write_text(
        subprocess.run(
            script, env=variables(home), capture_output=True, text=True, check=True, timeout=60
        ).stdout
    )
    return home


def test_fish_completes_the_line(of_fish: Path) -> None:
    became = {}
    for typed in TYPED:
        before, _, _ = typed.rpartition(" ")
        became[typed] = " or ".join(f"{before} {word}" for word in fish(of_fish, typed))
    assert became == TYPED


def test_fish_says_what_the_commands_do(of_fish: Path) -> None:
    assert fish(of_fish, "kvstore stat") == {
        "stat": "Show one object: size, place, lease, parent.",
        "status": "Show the cluster at a glance: nodes, their memory, objects, and what is wrong.",
    }
