"""What a shell gets at a TAB."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kvstore.cli.main import LATE, cli
from tests.support.processes import run_python

SLOW = {
    *("aiohttp", "asyncio", "cryptography", "grpc", "http.client", "http.server", "numpy", "rich"),
    *("ssl", "torch", "vllm", "yaml"),
}
"""Packages for which a TAB does not wait."""


NAMES = sorted({*LATE, *cli.commands})


@pytest.fixture
def store() -> None:
    """No command here needs one."""


def completed(words: str, *, program: str = "kvstore") -> list[str]:
    """What a TAB offers after ``words``, and packages that it imports needlessly."""
    module = "main" if program == "kvstore" else program.removeprefix("kvstore-")
    code = (
        f"import sys; from kvstore.cli.{module} import main\n"
        f"sys.argv = [{program!r}]\n"
        "try:\n    main()\nfinally:\n"
        f"    print('imported', *({SLOW!r} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={
            **os.environ,
            f"_{program.replace('-', '_').upper()}_COMPLETE": "bash_complete",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split()) - (not words.endswith(" "))),
        },
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    *offered, imported = done.stdout.splitlines()
    assert imported == "imported", words
    return [each.removeprefix("plain,") for each in offered]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvstore p", ["pin", "plan", "put"]),
        ("kvstore --verify ", ["header", "payload", "all"]),
        ("kvstore bench --tr", ["--transport"]),
        ("kvstore put k ", ["file,"]),
        ("kvstore status --config ", ["file,"]),
        ("kvstore archive e", ["export"]),
        ("kvstore auth issue --role m", ["master"]),
        ("kvstore-node --shm-clients ", ["members", "all-namespaces"]),
        ("kvstore-master --http-r", ["--http-reads"]),
        ("kvstore-proxy --aff", ["--affinity"]),
    ],
)
def test_what_is_offered(words: str, offered: list[str]) -> None:
    assert completed(words, program=words.partition(" ")[0]) == offered


def test_no_command_waits_for_a_slow_package() -> None:
    """One process completes the options of each command in turn, and names the one that imports a
    package first."""
    said = run_python(
        "-c",
        "import sys\n"
        "from click.shell_completion import BashComplete\n"
        "from kvstore.cli.main import cli\n"
        "found = set()\n"
        f"for command in {NAMES!r}:\n"
        "    offered = BashComplete(cli, {}, 'kvstore', '').get_completions([command], '--')\n"
        "    assert '--help' in [each.value for each in offered], command\n"
        f"    slow = {SLOW!r} & sys.modules.keys() - found\n"
        "    found |= slow\n"
        "    if slow:\n"
        "        print(command, *sorted(slow))",
        check=True,
    )
    assert said.stdout == ""
