"""The command ``kvstore-proxy``, up to the point where it serves."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvstore.cli import proxy
from kvstore.cli.options import run
from kvstore.config import ProxyConfig
from tests.support.processes import run_python

APP = "kvstore.proxy.main"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ProxyConfig]:
    """Stands for ``kvstore.proxy.main``: the settings it was run with."""
    calls: list[ProxyConfig] = []

    def serve(config: ProxyConfig) -> int:
        calls.append(config)
        return 0

    module = ModuleType(APP)
    module.run = serve  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, APP, module)
    return calls


def code_of(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        run(proxy.command, "kvstore-proxy", list(arguments))
    return ended.value.code


def test_instances_in_one_flag_or_in_several(served: list[ProxyConfig]) -> None:
    assert code_of("--prefill", "a:1,b:2", "--decode", "c:3", "--decode", "[::1]:4, d:5") == 0
    assert served[0].prefill == ("a:1", "b:2")
    assert served[0].decode == ("c:3", "[::1]:4", "d:5")


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--prefill", "requires an argument"),
        ("--decode https://a:1", "https"),
        ("--num-prefillers 1", "No such option"),
    ],
)
def test_a_wrong_use_is_told(
    served: list[ProxyConfig], capsys: pytest.CaptureFixture[str], typed: str, said: str
) -> None:
    assert code_of(*typed.split()) == 2
    assert said in capsys.readouterr().err
    assert not served


def test_without_the_extra_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['aiohttp'] = None; sys.argv[1:] = ['--port', '0']; "
        "from kvstore.cli.proxy import main; main()"
    )
    done = run_python("-c", program)
    assert done.returncode == 1
    assert "pip install 'aiohttp>=3.12'" in done.stderr


@pytest.mark.parametrize("by", ["a flag", "a variable"])
@pytest.mark.parametrize("token", ["secret", "fifteen-letters", "with spaces, and so not one"])
def test_a_token_that_can_be_guessed_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    served: list[ProxyConfig],
    by: str,
    token: str,
) -> None:
    if by == "a variable":
        monkeypatch.setenv("KVSTORE_PROXY_ADMIN_TOKEN", token)
    assert code_of(*(["--admin-token", token] if by == "a flag" else [])) == 2
    said = capfd.readouterr().err
    assert "must be 16 to 256 letters" in said
    assert token not in said
    assert not served
