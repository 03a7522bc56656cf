"""The command ``kvstore-proxy``, up to the point where it serves."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvstore.cli import proxy
from kvstore.cli.options import run
from kvstore.config import ProxyConfig, load, settings
from kvstore.errors import ConfigError
from tests.support.processes import run_python

APP = "kvstore.proxy.app"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ProxyConfig]:
    """Stands for ``kvstore.proxy.app``: the settings it was run with."""
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


def test_without_options_it_is_the_default(served: list[ProxyConfig]) -> None:
    assert code_of() == 0
    assert served == [ProxyConfig()]


def test_instances_in_one_flag_or_in_several(served: list[ProxyConfig]) -> None:
    assert code_of("--prefill", "a:1,b:2", "--decode", "c:3", "--decode", "[::1]:4, d:5") == 0
    assert served[0].prefill == ("a:1", "b:2")
    assert served[0].decode == ("c:3", "[::1]:4", "d:5")


def test_instances_in_the_environment_and_in_a_list_of_a_file() -> None:
    environ = {"KVSTORE_PROXY_DECODE": "a:1 b:2", "KVSTORE_MASTER": "m", "KVSTORE_CONFIG": ""}
    config = load(ProxyConfig, environ=environ)
    assert (config.decode, config.master) == (("a:1", "b:2"), "m:50001")
    assert load(ProxyConfig, {"decode": ["a:1", "b:2"]}, environ={}, config_path="").decode == (
        "a:1",
        "b:2",
    )


@pytest.mark.parametrize("decode", ["a", "a:0", "a:1,a:1", "http://a:1", 7])
def test_what_is_no_list_of_instances(decode: object) -> None:
    with pytest.raises(ConfigError) as caught:
        load(ProxyConfig, {"decode": decode}, environ={}, config_path="")
    assert caught.value.fields["key"] == "decode"


def test_the_help_knows_every_setting_and_how_to_change_instances(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert code_of("--help") == 0
    text = capsys.readouterr().out
    for setting in settings(ProxyConfig):
        assert setting.flag in text
        assert setting.variables[0] in text
    assert "curl -X POST localhost:8000/admin/instances/10.0.0.4:8200/drain" in text


def test_without_the_extra_it_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['aiohttp'] = None; sys.argv[1:] = ['--port', '0']; "
        "from kvstore.cli.proxy import main; main()"
    )
    done = run_python("-c", program)
    assert done.returncode == 1
    assert "pip install 'aiohttp>=3.12'" in done.stderr
