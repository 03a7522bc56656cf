"""The command ``kvstore-proxy``, up to the point where it serves."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvstore.cli import proxy
from kvstore.cli.options import run
from kvstore.cli.proxy_flags import EXAMPLE, IGNORED
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


GUIDES = {
    "toy_proxy_server.py": (
        "--host 0.0.0.0 --port 8192 --prefiller-host 10.0.0.1 --prefiller-port 8100 "
        "--decoder-host 10.0.0.2 --decoder-port 8200"
    ),
    "toy_proxy_server.py, several": (
        "--prefiller-hosts 10.0.0.1 ::1 --prefiller-ports 8100 8101 --decoder-hosts 10.0.0.2 "
        "[::2] --decoder-ports 8200 8201 --port 8192"
    ),
    "disagg_proxy_demo.py": (
        "--model Qwen/Qwen2.5-7B --prefill localhost:8100 localhost:8101 --decode localhost:8200 "
        "localhost:8201 --port 8192 --scheduling round_robin"
    ),
    "disagg_proxy_demo.py, short": "-m M -p a:1 b:2 -d c:3 --roundrobin --generator_on_p_node",
    "mooncake_connector_proxy.py": (
        "--prefill http://10.0.0.1:8010 8998 --prefill http://10.0.0.2:8010 none "
        "--decode http://10.0.0.3:8020/ --decode http://10.0.0.4"
    ),
}
MEANT = {
    "toy_proxy_server.py": (("10.0.0.1:8100",), ("10.0.0.2:8200",)),
    "toy_proxy_server.py, several": (
        ("10.0.0.1:8100", "[::1]:8101"), ("10.0.0.2:8200", "[::2]:8201"),
    ),
    "disagg_proxy_demo.py": (
        ("localhost:8100", "localhost:8101"), ("localhost:8200", "localhost:8201"),
    ),
    "disagg_proxy_demo.py, short": (("a:1", "b:2"), ("c:3",)),
    "mooncake_connector_proxy.py": (
        ("10.0.0.1:8010", "10.0.0.2:8010"), ("10.0.0.3:8020", "10.0.0.4:80"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("guide", GUIDES)
def test_the_command_line_of_a_guide_works_as_typed(
    served: list[ProxyConfig], capsys: pytest.CaptureFixture[str], guide: str
) -> None:
    typed = GUIDES[guide].split()
    assert code_of(*typed) == 0
    assert (served[0].prefill, served[0].decode) == MEANT[guide]
    assert served[0].port == (8192 if "--port" in typed else 8000)
    assert served[0].host == ("0.0.0.0" if "--host" in typed else "127.0.0.1")
    told = {line.split()[1] for line in capsys.readouterr().err.splitlines()}
    assert told == {"--model" if word == "-m" else word for word in typed} & {*IGNORED}


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--prefiller-hosts a b --prefiller-ports 1", "name a port for each host"),
        ("--prefill", "expected at least one argument"),
        ("--model", "expected one argument"),
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


def test_the_help_has_the_flags_of_guides_and_an_example_that_works(
    served: list[ProxyConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert code_of("--help") == 0
    text = capsys.readouterr().out
    for flag in ("--prefiller-hosts", "--decoder-port", "-d, --decode", *IGNORED):
        assert flag in text
    assert "Example: kvstore-proxy --prefiller-hosts" in " ".join(text.split())
    assert code_of(*EXAMPLE.split()[1:]) == 0
    assert served[0].prefill == ("10.0.0.1:8100", "10.0.0.2:8100")


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
