"""Files that prove an identity: what is read, what is refused, what happens while they change."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from kvstore.errors import ConfigError
from kvstore.security import certificates, credentials
from kvstore.security.credentials import MASTER_NAME, Credentials, read
from tests.support import identities
from tests.support.identities import ENGINE, MASTER, NOW, content, write

pytestmark = pytest.mark.usefixtures("files_at_once")


@pytest.fixture(scope="module")
def signer() -> certificates.SigningAuthority:
    return identities.authority()


@pytest.fixture
def path(tmp_path: Path, signer: certificates.SigningAuthority) -> Path:
    return write(tmp_path / "e.auth", content(signer, ENGINE))


def test_a_file_and_a_folder_say_the_same(tmp_path: Path, path: Path) -> None:
    pems = Credentials(str(path)).pems()
    assert pems.key.count(b"BEGIN PRIVATE KEY") == 1
    assert pems.chain.count(b"BEGIN CERTIFICATE") == 1
    folder = identities.folder(tmp_path / "tls", pems)
    assert tuple(Credentials(str(folder)).pems()) == tuple(pems)
    assert "PRIVATE" not in repr(pems) + str(pems) + repr(Credentials(str(path)))


def test_a_folder_as_kubernetes_mounts_it(
    tmp_path: Path, signer: certificates.SigningAuthority
) -> None:
    """Each file is a link to ..data, which is a link to a folder that is replaced."""
    mount = tmp_path / "mount"
    mount.mkdir()

    def publish(name: str) -> credentials.PemBundle:
        pems = certificates.issue(signer, ENGINE, NOW).pems
        identities.folder(mount / name, pems)
        (mount / "..new").symlink_to(name)
        os.replace(mount / "..new", mount / "..data")
        return pems

    first = publish("..1")
    for name in ("tls.key", "tls.crt", "ca.crt"):
        (mount / name).symlink_to(f"..data/{name}")
        (mount / "..1" / name).chmod(0o440)
    found = Credentials(str(mount))
    assert tuple(found.pems()) == tuple(first)
    second = publish("..2")
    assert tuple(found.pems()) == tuple(second)


Change = Callable[[Path, certificates.SigningAuthority], object]


def text(before: str, after: str) -> Change:
    return lambda path, _: path.write_text(path.read_text().replace(before, after))


def _other_key(path: Path, signer: certificates.SigningAuthority) -> None:
    own, other = read(str(path)), certificates.issue(signer, ENGINE, NOW).pems
    path.write_bytes(path.read_bytes().replace(own.key, other.key))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *((lambda path, _, mode=mode: path.chmod(mode), "every user.*chmod 600")
          for mode in (0o644, 0o604, 0o602, 0o601, 0o666)),
        (text("PRIVATE KEY", "NOTHING"), "has no key"),
        (text("Authorities:", "NOTHING"), "has no authority's certificate"),
        (text("PRIVATE KEY", "ENCRYPTED PRIVATE KEY"), "has a passphrase"),
        (text("M", "N"), "cannot be used"),
        (_other_key, "do not belong together"),
        (lambda path, _: path.unlink(), "No such file"),
    ],
)  # fmt: skip
def test_a_file_that_is_of_no_use_is_refused(
    path: Path, signer: certificates.SigningAuthority, change: Change, says: str
) -> None:
    change(path, signer)
    with pytest.raises(ConfigError, match=says) as refused:
        Credentials(str(path))
    assert "PRIVATE" not in str(refused.value)


def test_a_place_without_a_file_is_refused(tmp_path: Path, path: Path) -> None:
    for place in (tmp_path, tmp_path / "x" / "y", Path("/dev/null"), path / "tls.key"):
        with pytest.raises(ConfigError):
            Credentials(str(place))


def test_the_mode_of_a_folders_key_counts(tmp_path: Path, path: Path) -> None:
    path.chmod(0o640)
    folder = identities.folder(tmp_path / "tls", read(str(path)))
    (folder / "ca.crt").chmod(0o644)
    (folder / "tls.crt").chmod(0o644)
    Credentials(str(folder))
    (folder / "tls.key").chmod(0o644)
    with pytest.raises(ConfigError, match=r"tls\.key"):
        Credentials(str(folder))


def test_a_name_cannot_end_the_part_before_the_authorities(
    tmp_path: Path, signer: certificates.SigningAuthority
) -> None:
    """The word was looked for anywhere, also in the text before the key."""
    whole = b"Authorities: see below; " + content(signer, ENGINE)
    assert Credentials(str(write(tmp_path / "x", whole))).pems().key


# --- while it is in use ---------------------------------------------------------------------------


def replace(path: Path, whole: bytes) -> None:
    write(path.with_name("new"), whole)
    os.replace(path.with_name("new"), path)


def name_of(found: Credentials) -> str:
    [leaf] = certificates.loaded(found.pems().chain)
    return certificates.common_name(leaf.subject)


def test_a_replaced_file_counts_from_then_on(
    path: Path, signer: certificates.SigningAuthority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstore.files")
    found = Credentials(str(path))
    assert name_of(found) == "e"
    context = found.client()
    assert found.client() is context
    replace(path, content(signer, ENGINE._replace(name="other")))
    assert name_of(found) == "other"
    assert found.client() is not context
    assert [record.message for record in caplog.records] == [
        f"file_loaded setting=auth file={path}"
    ]


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.9, 0.0])
def test_a_half_written_file_keeps_the_old_one(
    path: Path, signer: certificates.SigningAuthority, kept: float, caplog: pytest.LogCaptureFixture
) -> None:
    found = Credentials(str(path))
    new = content(signer, ENGINE._replace(name="other"))
    path.write_bytes(new[: int(len(new) * kept)])
    for _ in range(3):
        assert name_of(found) == "e"
    assert [record.levelname for record in caplog.records] == ["WARNING"], "told once"
    assert "PRIVATE" not in caplog.text
    path.write_bytes(new)
    assert name_of(found) == "other"


def test_a_mode_that_is_put_right_counts(path: Path, signer: certificates.SigningAuthority) -> None:
    """chmod changes neither time, size nor inode, so the new file was not looked at again."""
    found = Credentials(str(path))
    write(path.with_name("new"), content(signer, ENGINE._replace(name="other"))).chmod(0o644)
    os.replace(path.with_name("new"), path)
    assert name_of(found) == "e"
    path.chmod(0o600)
    assert name_of(found) == "other"


def test_a_file_of_another_role_does_not_replace_a_servers(
    tmp_path: Path, signer: certificates.SigningAuthority
) -> None:
    master = write(tmp_path / "m.auth", content(signer, MASTER))
    found = Credentials(str(master))
    found.check_serves(MASTER_NAME)
    replace(master, content(signer, ENGINE))
    assert name_of(found) == "m"


def test_a_server_serves_with_what_is_there_now(
    tmp_path: Path, path: Path, signer: certificates.SigningAuthority
) -> None:
    """Certificate and authorities: those of the moment of the handshake."""
    master = write(tmp_path / "m.auth", content(signer, MASTER))
    serving = Credentials(str(master)).server()
    peer = Credentials(str(path)).client()
    client, server = identities.shake(peer, serving)
    assert identities.uris(client)[0].startswith("kvstore:master/m?")
    assert identities.uris(server)[0].startswith("kvstore:engine/e?")

    another = identities.authority()
    replace(master, content(another, MASTER._replace(name="m2")))
    shutil.copy(write(tmp_path / "e2", content(another, ENGINE._replace(name="e2"))), path)
    client, server = identities.shake(Credentials(str(path)).client(), serving)
    assert identities.uris(client)[0].startswith("kvstore:master/m2?")
    assert identities.uris(server)[0].startswith("kvstore:engine/e2?")


def test_grpc_gets_a_new_certificate_only_when_there_is_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC asks at each handshake; a master that answered with something new each time was aborted
    by gRPC after some thousand."""
    ask: list[Callable[[], object]] = []

    def dynamic(first: object, fetch: Callable[[], object], **_: object) -> None:
        ask.append(fetch)

    monkeypatch.setattr(grpc, "dynamic_ssl_server_credentials", dynamic)
    Credentials(str(path)).grpc_server()
    assert ask[0]() is None
    os.utime(path)
    assert ask[0]() is not None
    assert ask[0]() is None
