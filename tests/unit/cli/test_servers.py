"""The commands ``kvstore-master`` and ``kvstore-node``, up to the point where they serve."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvstore.cli import master, node
from kvstore.cli.options import run
from kvstore.config import Config, MasterConfig, NodeConfig, settings
from kvstore.errors import AddressInUseError
from kvstore.runtime.child_process import ParentLink
from tests.support.processes import run_python


class Served:
    """Stands for ``kvstore.master.main`` and ``kvstore.node.main``."""

    def __init__(self) -> None:
        self.calls: list[tuple[Config, dict[str, Any]]] = []
        self.error: BaseException | None = None
        self.code = 0

    def __call__(self, config: Config, parent: ParentLink, **options: Any) -> int:
        del parent
        self.calls.append((config, options))
        if self.error is not None:
            raise self.error
        return self.code


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    fake = Served()
    for name in ("kvstore.master.main", "kvstore.node.main"):
        module = ModuleType(name)
        module.run = fake  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    return fake


COMMANDS = [
    (master.command, "kvstore-master", MasterConfig),
    (node.command, "kvstore-node", NodeConfig),
]


def code_of(call: Callable[[], object]) -> int:
    with pytest.raises(SystemExit) as ended:
        call()
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.mark.parametrize(("command", "name", "kind"), COMMANDS)
def test_the_help_knows_every_setting_its_variable_and_an_example(
    command: Any, name: str, kind: type[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(lambda: run(command, name, ["--help"])) == 0
    text = capsys.readouterr().out
    for setting in settings(kind):
        assert setting.flag in text
        assert setting.variables[0] in text
    assert f"Examples:\n    {name} --memory" in text


def test_options_become_settings(served: Served) -> None:
    options = ["--memory", "2GiB", "--port", "0", "--log-level", "DEBUG"]
    code_of(lambda: run(master.command, "kvstore-master", options))
    assert served.calls[0][0] == MasterConfig(memory=2 << 30, port=0, log_level="debug")


@pytest.mark.parametrize(("command", "name", "kind"), COMMANDS)
def test_a_parent_may_hand_down_a_socket(
    served: Served, command: Any, name: str, kind: type[Config]
) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        code_of(lambda: run(command, name, ["--parent-fd", str(theirs.detach())]))
        assert ours.recv(1) == b"", "the child has closed its end"
    (call,) = served.calls
    assert call[0] == kind()


@pytest.mark.parametrize(("command", "name", "kind"), COMMANDS)
def test_a_parent_is_told_of_a_wrong_setting(
    served: Served,
    command: Any,
    name: str,
    kind: type[Config],
    capsys: pytest.CaptureFixture[str],
) -> None:
    del served, kind
    ours, theirs = socket.socketpair()
    with ours:
        flags = ["--parent-fd", str(theirs.detach()), "--memory", "2G"]
        assert code_of(lambda: run(command, name, flags)) == 1
        said = json.loads(ours.recv(10_000))
    assert said["error"] == "config"
    assert "--memory" in said["message"]
    assert capsys.readouterr().err == ""


def test_an_error_at_start_is_one_line(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.error = AddressInUseError("127.0.0.1:50001 is in use", advice="Choose another --port.")
    assert code_of(lambda: run(master.command, "kvstore-master", [])) == 1
    assert capsys.readouterr().err == (
        "kvstore-master: 127.0.0.1:50001 is in use. Choose another --port.\n"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--memory", "2G"], "Write 2GiB or 2GB"),
        (["--memroy", "2GiB"], "--memory"),
        (["--lane-port", "50001"], "a port of its own"),
        (["--config", "/nowhere.toml"], "No such file"),
        (["extra"], "extra"),
    ],
)
def test_asked_wrongly(
    served: Served, options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of(lambda: run(master.command, "kvstore-master", options)) == 2
    assert says in capsys.readouterr().err
    assert not served.calls


@pytest.mark.parametrize(
    ("module", "unneeded"),
    [
        ("kvstore.master.main", {"aiohttp", "cryptography", "numpy", "prometheus_client"}),
        ("kvstore.node.main", {"aiohttp", "cryptography", "numpy", "prometheus_client"}),
    ],
)
def test_servers_import_no_packages_that_they_need_not(module: str, unneeded: set[str]) -> None:
    """Each costs 8 to 13 MiB and up to 0.3 s of processor time at the start."""
    done = run_python("-c", f"import sys, {module}; print(*sys.modules)", check=True)
    assert not unneeded & set(done.stdout.split())
