"""A port for peers with and without TLS, while a cluster is switched on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.auth.credentials import Credentials
from kvstore.config import MasterConfig
from kvstore.network import sniffing
from kvstore.web.server.access import Secured, secured_by
from tests.support.identities import ENGINE, MASTER, authority, credentials
from tests.unit.web.ports import Port, run

Files = tuple[str, Credentials]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """The file of a master, and an engine."""
    signer = authority()
    return credentials(tmp_path, signer, MASTER).path, credentials(tmp_path, signer, ENGINE)


def test_both_kinds_of_peers_are_served(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sniffing, "SILENT_MAX", 2)
    master, engine = files

    async def both(port: Port) -> None:
        for _ in range(3):
            await port.stranger(b"")
        for said in (b"\x16\x03\x01", b"\x16 is no handshake", b"\x00\r\n\r\n"):
            await port.stranger(said)
        tls = engine.client()
        for each in (None, tls, None, tls):  # one after the other, as none is to make room
            assert (await port.ask("/healthz", tls=each))[0] == 200
        assert await port.is_healthy()

    run(both, [], Secured(auth=master, also_plain=True))


def test_with_prefer_the_port_has_both_and_nobody_needs_an_identity(files: Files) -> None:
    prefers = MasterConfig(auth=files[0], auth_mode="prefer")
    secured = secured_by(prefers)
    assert secured.also_plain
    assert secured.scheme == "http"
    assert secured.tls() is not None
    assert secured.identities() is None
    required = secured_by(MasterConfig(auth=files[0]))
    assert not required.also_plain
    assert required.scheme == "https"
    assert required.identities() is not None


def test_a_certificate_for_browsers_stays_what_the_port_shows(files: Files) -> None:
    """In a cluster that had HTTPS before it was switched on."""
    pem = files[0]
    config = MasterConfig(auth=pem, auth_mode="prefer", http_cert=pem, http_key=pem)
    secured = secured_by(config)
    assert not secured.also_plain
    assert secured.auth == ""
    assert secured.scheme == "https"
