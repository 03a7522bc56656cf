"""``kvstore auth``: every command, on real folders."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvstore.cli import auth as commands
from kvstore.cli.main import cli
from kvstore.cli.options import run
from kvstore.security import ca, certificates
from kvstore.security.certificates import inspect, loaded, names_of
from kvstore.security.credentials import Credentials
from kvstore.security.identity import Identity, identity_of, validated_identity
from kvstore.security.revocation_list import RevocationList
from tests.support import identities
from tests.support.identities import ENGINE as WANTED
from tests.support.identities import NOW, content, write


class Result(NamedTuple):
    code: int
    out: str
    err: str


class Shell:
    """Runs ``kvstore auth`` in a folder of its own, at a time of its own."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.later = timedelta()

    def now(self) -> datetime:
        return datetime.now(UTC) + self.later

    def __call__(self, *words: str) -> Result:
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(cli, "kvstore", ["auth", *words])
        out, err = self._capfd.readouterr()
        assert isinstance(ended.value.code, int)
        assert "PRIVATE" not in out + err
        assert "Traceback" not in err
        return Result(ended.value.code, out, err)

    def done(self, *words: str) -> str:
        result = self(*words)
        assert result.code == 0, result.err
        return result.out

    def refused(self, *words: str) -> str:
        result = self(*words)
        assert (result.code, result.out) == (2, "")
        return result.err


@pytest.fixture
def kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    shell = Shell(capfd)
    monkeypatch.setattr(commands, "_now", shell.now)
    return shell


@pytest.fixture
def there(kv: Shell) -> Shell:
    """With a CA."""
    kv.done("init")
    return kv


FOLDER = Path("kvstore-ca")
ENGINE = ("--role", "engine", "--namespace", "llama/*")


def modes(folder: Path) -> dict[str, str]:
    return {each.name: f"{stat.S_IMODE(each.stat().st_mode):o}" for each in folder.iterdir()}


def issued() -> list[str]:
    return sorted(os.listdir(FOLDER / "issued"))


def identity_in(path: str | Path) -> Identity:
    return identity_of(names_of(leaf(path), x509.UniformResourceIdentifier))


def leaf(path: str | Path) -> x509.Certificate:
    return loaded(Credentials(str(path)).pems().chain)[0]


def openssl(*words: str | Path) -> str:
    done = subprocess.run(["openssl", *words], check=True, capture_output=True, text=True)
    return done.stdout


# --- init -----------------------------------------------------------------------------------------


def test_init_writes_a_folder_that_only_its_owner_reads(kv: Shell) -> None:
    mask = os.umask(0)
    try:
        kv.done("init")
    finally:
        os.umask(mask)
    assert modes(Path())[FOLDER.name] == "700"
    found = modes(FOLDER)
    assert (found["ca.key"], found["ca.crt"], found["revoked"]) == ("600", "644", "644")
    told = openssl("x509", "-in", FOLDER / "ca.crt", "-noout", "-text")
    for part in ("P-256", "ecdsa-with-SHA256", "CA:TRUE, pathlen:0", "Certificate Sign, CRL Sign"):
        assert part in told


# --- issue ----------------------------------------------------------------------------------------


def test_issue_writes_a_file_that_a_process_can_use(there: Shell) -> None:
    out = there.done("issue", "e", *ENGINE, "--read", "shown", "--write", "log", "--days", "30")
    found = identity_in("e.auth")
    assert found == validated_identity(
        "e", ["engine"], reads=("llama/*", "shown"), writes=("llama/*", "log"), number=found.number
    )
    assert found.number in out
    assert modes(Path())["e.auth"] == "600"
    assert Path("e.auth").read_text().startswith(f"{found.uri}\nValid until ")
    left = leaf("e.auth").not_valid_after_utc - there.now()
    assert timedelta(days=29.9) < left <= timedelta(days=30)
    assert issued() == [f"e.{found.number}.crt"]
    assert "PRIVATE" not in (FOLDER / "issued" / issued()[0]).read_text()


@pytest.mark.parametrize(
    ("words", "names", "uses"),
    [
        (["--role", "master"], ["master.kvstore"], ["client", "server"]),
        (["--role", "node"], ["node.kvstore"], ["client", "server"]),
        (["--role", "node", "--role", "master"], ["master.kvstore", "node.kvstore"],
         ["client", "server"]),
        (["--role", "master", "--host", "cache.example", "--host", "10.0.0.7", "--host", "::1",
          "--host", "*.example"],
         ["master.kvstore", "cache.example", "*.example", "10.0.0.7", "::1"],
         ["client", "server"]),
        ([*ENGINE], [], ["client"]),
        (["--role", "observer"], [], ["client"]),
        (["--role", "admin"], [], ["client"]),
    ],
)  # fmt: skip
def test_what_a_certificate_is_for(
    there: Shell, words: list[str], names: list[str], uses: list[str]
) -> None:
    there.done("issue", "x", *words)
    assert inspect("x.auth")["hosts"] == names
    told = openssl("x509", "-in", "x.auth", "-noout", "-text")
    found = [use for use in ("client", "server") if f"TLS Web {use.title()} Auth" in told]
    assert found == uses
    for part in ("CN ?= ?x", "Digital Signature\n", "CA:FALSE"):  # OpenSSL 3.6 has no spaces
        assert re.search(part, told), told
    assert "OK" in openssl("verify", "-x509_strict", "-CAfile", FOLDER / "ca.crt", "x.auth")


def test_issue_replaces_a_file_only_by_force(there: Shell) -> None:
    for where, folder in (("e.auth", ()), ("a/tls", ("--folder", "a/tls"))):
        there.done("issue", "e", *ENGINE, *folder)
        before, count = identity_in(where), len(issued())
        assert "already exists. Nothing was issued." in there.refused(
            "issue", "e", *ENGINE, *folder
        )
        assert (identity_in(where), len(issued())) == (before, count)
        there.done("issue", "e", *ENGINE, *folder, "--force")
        assert identity_in(where).number != before.number


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["e", "--role", "engine"], "may do nothing. Give --namespace"),
        (["e"], "Missing option '--role'"),
        (["e", "--role", "root"], "is not one of"),
        (["a b", "--role", "admin"], "is no name of an identity"),
        (["", "--role", "admin"], "is no name of an identity"),
        (["e", *ENGINE, "--read", "*x"], "is no pattern of names"),
        (["o", "--role", "observer", "--read", "a"], "only engines have namespaces"),
        (["e", *ENGINE, "--node", "a"], "Add --role node"),
        (["e", *ENGINE, "--host", "a"], "nothing connects to it"),
        (["m", "--role", "master", "--host", "a:1"], "without a port"),
        (["m", "--role", "master", "--host", "a.*.b"], "neither a host's name"),
        (["m", "--role", "master", "--host", "a" * 300], "neither a host's name"),
        (["n", "--role", "node", "--host", "master.kvstore"], "come from --role alone"),
        (["n", "--role", "node", "--host", "*.KVStore"], "come from --role alone"),
        (["master.kvstore", *ENGINE], "Give the process a name of its own"),
        (["e", *ENGINE, "--days", "4000"], "is not in the range"),
        (["e", "--role", "engine", *(w for n in range(65) for w in ("--read", str(n)))],
         "at most 64 patterns"),
        (["e", "--role", "engine", *(w for n in range(50) for w in ("--read", "x" * 100 + str(n)))],
         "more than 4096 bytes"),
    ],
)  # fmt: skip
def test_what_cannot_be_issued(there: Shell, words: list[str], says: str) -> None:
    assert says in there.refused("issue", *words)
    assert issued() == []
    assert os.listdir() == [FOLDER.name]


# --- the folder -----------------------------------------------------------------------------------


def test_a_broken_authority_is_told(kv: Shell) -> None:
    issue = ("issue", "e", *ENGINE)
    assert "kvstore-ca/ca.key cannot be read" in kv.refused(*issue)
    kv.done("init")
    kv.done("init", "--ca", "other")
    key = FOLDER / "ca.key"
    key.chmod(0o644)
    assert "chmod 600" in kv.refused(*issue)
    key.chmod(0o600)
    for whole, says in (
        (b"", "key cannot be read"),
        (Path("other/ca.key").read_bytes(), "do not belong together"),
    ):
        key.write_bytes(whole)
        assert says in kv.refused(*issue)


# --- show -----------------------------------------------------------------------------------------


def test_show_says_who_a_file_is(there: Shell) -> None:
    there.done("issue", "e", *ENGINE, "--read", "shown")
    FOLDER.rename("away")
    out = there.done("show", "e.auth")
    for part in ("e\n", "engine\n", "llama/*, shown\n", "signed_by   kvstore authority"):
        assert part in out
    row = json.loads(there.done("show", "e.auth", "--json"))
    assert (row["reads"], row["writes"]) == (["llama/*", "shown"], ["llama/*"])
    assert row["number"] == identity_in("e.auth").number
    assert row["problems"] == []
    FOLDER.with_name("away").rename(FOLDER)
    there.done("issue", "n", "--role", "node", "--node", "host-*", "--folder", "tls")
    assert "nodes       host-*\n" in there.done("show", "tls")


def problems(kv: Shell, path: str) -> str:
    result = kv("show", path)
    assert result.code == 1
    assert result.out, "it is shown all the same"
    assert json.loads(kv("show", path, "--json").out)["problems"]
    return result.err


@pytest.mark.parametrize(
    ("days_ago", "mode", "other", "says"),
    [
        (366, 0o600, "", "certificate has expired"),
        (-1, 0o600, "", "certificate is not yet valid"),
        (0, 0o644, "", "every user of this host may read e.auth"),
        (0, 0o600, "key", "do not belong together"),
        (0, 0o600, "authorities", "unable to get local issuer certificate"),
    ],
)
def test_show_says_what_is_wrong(
    kv: Shell, days_ago: float, mode: int, other: str, says: str
) -> None:
    file = write(Path("e.auth"), content(identities.authority(), WANTED, days_ago=days_ago))
    if other:
        another = certificates.issue(identities.authority(), WANTED, NOW).pems
        own = getattr(Credentials("e.auth").pems(), other)
        file.write_bytes(file.read_bytes().replace(own, getattr(another, other)))
    file.chmod(mode)
    assert says in problems(kv, "e.auth")


CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


# --- revoke ---------------------------------------------------------------------------------------


def test_revoke_adds_the_numbers_of_a_name_or_one_number(there: Shell) -> None:
    for name, folder in (("e", "e1"), ("e", "e2"), ("f", "f1"), ("f", "f2")):
        there.done("issue", name, *ENGINE, "--folder", folder)
    (FOLDER / "revoked").write_text("# by hand\n0a0b")
    assert "Copy kvstore-ca/revoked to" in there.done("revoke", "e")
    there.done("revoke", identity_in("f2").number)
    there.done("revoke", "e")
    file = RevocationList(str(FOLDER / "revoked"))
    assert [file.has(identity_in(name)) for name in ("e1", "e2", "f1", "f2")] == [
        True, True, False, True,
    ]  # fmt: skip
    lines = (FOLDER / "revoked").read_text().splitlines()
    assert (lines[:2], len(lines)) == (["# by hand", "0a0b"], 5)
    result = there("revoke", "g")
    assert (result.code, result.out) == (3, "")
    assert "has issued nothing of the name or number g" in result.err


def _revoke(number: int) -> None:
    assert ca.revoke(FOLDER, f"e{number}", NOW)


def test_commands_at_once_lose_nothing(there: Shell) -> None:
    for number in range(4):
        there.done("issue", f"e{number}", "--role", "admin")
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_revoke, range(4)))
    assert (FOLDER / "revoked").read_text().count("\n") == 4
