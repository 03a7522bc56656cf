"""By which name an operator knows a client that was given none."""

from __future__ import annotations

import sys

import pytest

from kvstore.client.client_resources import PROGRAM_MAX, program


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("/usr/bin/vllm", "vllm"),
        ("./eval/serve.py", "serve"),
        ("/site-packages/sglang/launch_server/__main__.py", "launch_server"),
        ("-c", "python"),
        ("", "python"),
        ("/tmp/a name\x1b[2J\n.py", "a-name--2J-"),
        ("x" * 500, "x" * PROGRAM_MAX),
    ],
)
def test_a_program_is_called_by_its_command(
    monkeypatch: pytest.MonkeyPatch, argument: str, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [argument])
    assert program() == name


def test_a_process_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sys, "argv")
    assert program() == "python"
