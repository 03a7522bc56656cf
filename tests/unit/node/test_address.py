"""Where a node serves its memory, and what it tells others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from kvstore.config import NodeConfig
from kvstore.errors import StartupError
from kvstore.node import main
from kvstore.runtime.host import places_of

OURS = "10.0.0.8"
REMOTE = "10.0.0.7:50001"
NEAR = "127.0.0.1:50001"


@pytest.fixture(autouse=True)
def routes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our address on the way to others is 10.0.0.8."""

    def towards(master: str) -> str:
        return "127.0.0.1" if master.startswith(("127.", "localhost")) else OURS

    monkeypatch.setattr(main, "address_towards", towards)


@pytest.mark.parametrize(
    ("settings", "listens", "advertises"),
    [
        ({"master": NEAR}, "127.0.0.1", "127.0.0.1:7"),
        ({"master": REMOTE}, OURS, f"{OURS}:7"),
        ({"master": f"{NEAR},{REMOTE}"}, OURS, f"{OURS}:7"),
        ({"master": REMOTE, "host": "0.0.0.0"}, "0.0.0.0", f"{OURS}:7"),
        ({"master": REMOTE, "host": "::"}, "::", f"{OURS}:7"),
        ({"master": REMOTE, "host": "[fd00::8]"}, "fd00::8", "[fd00::8]:7"),
        ({"master": REMOTE, "host": "::", "advertise": "fd00::5"}, "::", "[fd00::5]:7"),
        ({"master": REMOTE, "host": "::", "advertise": "[fd00::5]:9"}, "::", "[fd00::5]:9"),
        ({"master": REMOTE, "host": "10.1.0.8"}, "10.1.0.8", "10.1.0.8:7"),
        ({"master": REMOTE, "advertise": "192.0.2.1"}, OURS, "192.0.2.1:7"),
        ({"master": REMOTE, "advertise": "192.0.2.1:99"}, OURS, "192.0.2.1:99"),
        ({"master": NEAR, "host": "127.0.0.1"}, "127.0.0.1", "127.0.0.1:7"),
        ({"master": REMOTE, "host": "127.0.0.1", "advertise": "127.0.0.1"}, "127.0.0.1",
         "127.0.0.1:7"),
    ],
)  # fmt: skip
def test_where_it_listens_and_what_it_says(
    settings: dict[str, Any], listens: str, advertises: str
) -> None:
    config = NodeConfig(**settings)
    config = config.model_copy(update={"host": main._listens_on(config)})
    assert config.host == listens
    assert main._advertised(config, 7) == advertises


def test_loopback_towards_a_master_elsewhere_is_refused() -> None:
    with pytest.raises(StartupError, match=f"give --host {OURS}"):
        main._listens_on(NodeConfig(master=REMOTE, host="127.0.0.1"))


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.0.8"])
def test_an_address_of_another_family_is_refused(host: str) -> None:
    with pytest.raises(StartupError, match=r"fd00::5 and .* different address"):
        main._listens_on(NodeConfig(master=REMOTE, host=host, advertise="fd00::5"))


def test_places_are_equal_where_masters_are() -> None:
    here = socket.gethostname()
    assert places_of("127.0.0.1:1") == places_of("localhost:1") == (f"{here}/127.0.0.1:1",)
    assert places_of("A:1,b:2") == ("a:1", "b:2")
    assert places_of("etcd://u:p@e:2379/x?ca=f") == ("etcd://e:2379/x",)
