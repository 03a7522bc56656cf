"""What is said where Mooncake, or a library that it needs, is not there; and of the machine."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench import mooncake, redis
from bench.__main__ import main
from bench.tables import TABLES
from kvstore import native
from kvstore.bench.page import in_words, machine


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    said = mooncake.missing()
    assert said is not None
    assert "pip install mooncake-transfer-engine-non-cuda" in said


def test_without_a_library_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the loader says it."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    why = "libibverbs.so.1: cannot open shared object file: No such file or directory"
    (package / "store.py").write_text(f"raise ImportError({why!r})")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mooncake", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = CliRunner().invoke(main, ["--quick"])
    assert result.exit_code == 1
    assert why in result.output
    assert "apt-get install libibverbs1 librdmacm1 libnuma1 liburing2" in result.output


@pytest.mark.parametrize("package", redis.PACKAGES)
def test_without_the_client_of_redis(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "PROGRAM", "sh")
    monkeypatch.setitem(sys.modules, package, None)
    result = CliRunner().invoke(main, ["--table", "redis", "--quick"])
    assert result.exit_code == 1
    assert "pip install 'redis[hiredis]'" in result.output


def test_without_the_server_of_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis, "PROGRAM", "no-such-server")
    assert "apt-get install no-such-server" in (redis.missing() or "")


def test_what_is_not_compiled_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_compiled", False)
    monkeypatch.setitem(TABLES, "redis", replace(TABLES["redis"], missing=lambda: None))
    result = CliRunner().invoke(main, ["--table", "redis", "--quick"])
    assert result.exit_code == 1
    assert "not compiled: the steps of the hot path" in result.output


def test_a_system_that_is_not_in_the_table() -> None:
    result = CliRunner().invoke(main, ["--systems", "kvstore,Redis", "--table", "clients"])
    assert result.exit_code == 2
    assert "'Redis' is no system of clients: kvstore, Mooncake" in result.output


def test_rows_that_do_not_exist_are_an_error_that_names_those_that_do() -> None:
    result = CliRunner().invoke(main, ["--rows", "nonsense"])
    assert result.exit_code == 2
    assert "get_again/shm/4KiB/1" in result.output


def test_a_machine_in_words_without_its_name() -> None:
    found = machine(["numpy", "not-installed-at-all"])
    assert "not-installed-at-all" not in found
    said = in_words(found)
    assert re.fullmatch(r"[0-9.]+", str(found["kernel"]))
    for part in (
        str(found["cpu"]),
        f"{found['cores']} cores",
        f"numpy {found['numpy']}",
        str(found["date"]),
    ):
        assert part in said
    assert platform.node() not in found.values()
