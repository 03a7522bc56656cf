"""What is said of the installation: another project's package in our place, parts not compiled."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvstore import native
from kvstore.console.diagnostics import software
from kvstore.console.diagnostics.findings import Finding


def install(place: Path, name: str, version: str, *, needs: str = "") -> None:
    info = place / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    wanted = f"Requires-Dist: {needs}\n" if needs else ""
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{wanted}"
    )


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only one where anything is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def of(subject: str) -> list[Finding]:
    return [row for row in software.installation() if row.subject == subject]


@pytest.mark.parametrize("beside", [True, False], ids=["beside ours", "in our place"])
def test_another_projects_package_is_told(place: Path, beside: bool) -> None:
    if beside:
        install(place, "kvstore-llm", "0.1.0")
        assert not of("distribution")
    install(place, "kvstore", "0.1.1")
    [row] = of("distribution")
    assert row.state == "warning"
    assert row.found.startswith("kvstore 0.1.1 is installed, which is another project")
    assert row.advice.endswith("-m pip uninstall kvstore")


def test_packages_that_are_missing_are_named_as_pip_takes_them(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(place, "kvstore-llm", "0.1.0", needs="protobuf<8,>=6.33.5")
    monkeypatch.setattr(software, "import_failure", lambda *_: "ImportError: no protobuf")
    [row] = [row for row in software.python(1.0) if row.state == "problem"]
    assert row.advice.endswith("-m pip install --upgrade 'protobuf<8,>=6.33.5'")


def test_an_installation_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_NATIVE", raising=False)
    monkeypatch.setattr(native, "is_compiled", False)
    [row] = of("compiled parts")
    assert row.state == "warning"
    assert "the steps of the hot path" in row.found
    assert "apt-get install gcc" in row.advice
    monkeypatch.setenv("KVSTORE_NATIVE", "0")  # as somebody wanted it
    assert of("compiled parts")[0].state == "ok"


@pytest.mark.parametrize(
    ("printed", "state", "said"),
    [
        ('"no libcuda.so.1"', "ok", "none is used: no libcuda.so.1"),
        ("[]", "ok", "none"),
        ('[["cuda:1", true, true]]', "ok", "cuda:1: copies straight"),
        ('[["cuda:1", false, true]]', "warning", "older than CUDA 12.8"),
        ('[["cuda:1", true, false]]', "warning", "cannot be page-locked"),
        ("nothing", "warning", "probe of NVIDIA's driver failed"),
    ],
)
def test_gpus(printed: str, state: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_PROBE_GPU", f"print({printed!r})")
    [row] = software.graphics(60)
    assert row.state == state
    assert said in row.found
