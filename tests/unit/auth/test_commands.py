"""``kvstore auth``: every command, on real folders."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstore.auth import authority, certificates, files
from kvstore.auth.credentials import MASTER_NAME, Credentials
from kvstore.auth.identity import Identity, identity_of
from kvstore.auth.ledger import Wanted
from kvstore.auth.revoked import Revoked
from kvstore.cli import auth as commands
from kvstore.cli.main import cli
from kvstore.cli.options import run
from tests.support import identities
from tests.support.identities import shake
from tests.support.processes import ROOT


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


class Shell:
    """Runs ``kvstore auth`` in a folder of its own, at a time of its own."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd
        self.later = timedelta()
        self.said = ""
        """All that was printed."""

    def now(self) -> datetime:
        return datetime.now(UTC) + self.later

    def __call__(self, *words: str) -> Result:
        self._capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            run(cli, "kvstore", ["auth", *words])
        out, err = self._capfd.readouterr()
        self.said += out + err
        assert isinstance(ended.value.code, int)
        assert "PRIVATE" not in out + err
        assert "Traceback" not in err
        return Result(ended.value.code, out, err)

    def done(self, *words: str) -> Result:
        result = self(*words)
        assert result.code == 0, result.err
        return result

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
    """With an authority."""
    kv.done("init")
    return kv


FOLDER = Path("kvstore-authority")
ENGINE = ("--role", "engine", "--namespace", "llama/*")


def modes(folder: Path) -> dict[str, str]:
    return {each.name: f"{stat.S_IMODE(each.stat().st_mode):o}" for each in folder.iterdir()}


def identity_in(path: str | Path) -> Identity:
    return identity_of(certificates.uris_of(leaf(path)))


def leaf(path: str | Path) -> Any:
    return certificates.loaded(Credentials(str(path)).pems().chain)[0]


def trusted(path: str | Path) -> list[str]:
    pems = Credentials(str(path)).pems()
    return [certificates.shown_name(each) for each in certificates.loaded(pems.authorities)]


# --- init -----------------------------------------------------------------------------------------


def test_init_writes_a_folder_that_only_its_owner_reads(kv: Shell) -> None:
    mask = os.umask(0)
    try:
        result = kv.done("init", "--cluster", "prod")
    finally:
        os.umask(mask)
    assert "(prod), valid until" in result.out
    assert "kvstore auth issue master-1 --role master\n" in result.out
    assert stat.S_IMODE(FOLDER.stat().st_mode) == 0o700
    assert modes(FOLDER) == {
        "authority.key": "600",
        "authority.pem": "644",
        "ledger.json": "600",
        "revoked": "644",
        ".lock": "600",
    }
    assert "PRIVATE" not in (FOLDER / "authority.pem").read_text()
    assert kv.done("ls").out == "nothing was issued so far\n"


def test_openssl_agrees_with_what_an_authority_is(there: Shell) -> None:
    told = subprocess.run(
        ["openssl", "x509", "-in", FOLDER / "authority.pem", "-noout", "-text"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    for part in ("P-256", "ecdsa-with-SHA256", "CA:TRUE, pathlen:1", "Certificate Sign, CRL Sign"):
        assert part in told
    days = certificates.loaded((FOLDER / "authority.pem").read_bytes())[0]
    assert 3_649 <= (days.not_valid_after_utc - there.now()).days <= 3_650


def test_init_replaces_nothing(there: Shell) -> None:
    before = {each.name: each.read_bytes() for each in FOLDER.iterdir()}
    assert "has an authority already" in there.refused("init")
    assert {each.name: each.read_bytes() for each in FOLDER.iterdir()} == before
    Path("used").mkdir()
    Path("used/file").touch()
    assert "is not empty" in there.refused("init", "--authority", "used")
    assert "no name of a cluster" in there.refused("init", "--authority", "x", "--cluster", "a\nb")


def test_an_init_that_was_killed_can_be_repeated(
    kv: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as killed:
        killed.setattr(authority, "_write_key", lambda *_: 1 / 0)
        assert kv("init").code == 1
    assert "there is no authority" in kv.refused("ls")
    kv.done("init")


def test_init_in_another_folder_says_how_to_name_it(kv: Shell) -> None:
    result = kv.done("init", "--authority", "a b/authority")
    assert "--role admin --authority 'a b/authority'\n" in result.out
    kv.done("issue", "x", *ENGINE, "--authority", "a b/authority")


# --- issue ----------------------------------------------------------------------------------------


def test_issue_writes_a_file_that_a_process_can_use(there: Shell) -> None:
    result = there.done(
        "issue", "e", *ENGINE, "--read", "shown", "--write", "log", "--read", "shown"
    )
    found = identity_in("e.auth")
    assert found.name == "e"
    assert found.roles == {"engine"}
    assert found.reads == ("llama/*", "shown")
    assert found.writes == ("llama/*", "log")
    assert found.number == f"{leaf('e.auth').serial_number:x}"
    assert found.number in result.out
    assert modes(Path())["e.auth"] == "600"
    head = Path("e.auth").read_text().partition("-----BEGIN")[0]
    assert head.startswith(f"{found.uri}\nValid until ")
    assert (
        "Made by: kvstore auth issue e --role engine --namespace 'llama/*' --read shown "
        "--write log --days 365\n" in head
    )


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
    assert certificates.hosts_of(leaf("x.auth")) == names
    told = subprocess.run(
        ["openssl", "x509", "-in", "x.auth", "-noout", "-text"],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    found = [use for use in ("client", "server") if f"TLS Web {use.title()} Auth" in told]
    assert found == uses
    for part in ("CN ?= ?x", "Digital Signature\n", "CA:FALSE"):  # OpenSSL 3.6 has no spaces
        assert re.search(part, told), told
    done = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-CAfile", FOLDER / "authority.pem", "x.auth"],
        check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "x.auth: OK\n", done.stderr


def test_issue_prints_json(there: Shell) -> None:
    (row,) = there.done("issue", "e", *ENGINE, "--days", "30", "--json").rows
    assert row["path"] == "e.auth"
    assert row["reads"] == row["writes"] == ["llama/*"]
    until = datetime.strptime(row["until"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert timedelta(days=29.9) < until - there.now() <= timedelta(days=30)


def test_issue_replaces_a_file_only_by_force(there: Shell) -> None:
    there.done("issue", "e", *ENGINE)
    before = Path("e.auth").read_bytes()
    assert "e.auth is there already. Nothing was issued." in there.refused("issue", "e", *ENGINE)
    assert Path("e.auth").read_bytes() == before
    assert len(there.done("ls", "--json").rows) == 1
    there.done("issue", "e", *ENGINE, "--force")
    assert Path("e.auth").read_bytes() != before
    there.done("issue", "e", *ENGINE, "--out", "other")
    assert identity_in("other").name == "e"


def test_issue_writes_a_folder_as_for_kubernetes(there: Shell) -> None:
    there.done("issue", "e", *ENGINE, "--folder", "a/tls")
    assert modes(Path("a/tls")) == {"tls.key": "600", "tls.crt": "644", "ca.crt": "644"}
    assert identity_in("a/tls").name == "e"
    assert "a/tls/tls.key is there already" in there.refused(
        "issue", "e", *ENGINE, "--folder", "a/tls"
    )
    assert "not both" in there.refused("issue", "e", *ENGINE, "--folder", "b", "--out", "c")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["e", "--role", "engine"], "may do nothing. Give --namespace"),
        (["e"], "Missing option '--role'"),
        (["e", "--role", "root"], "is not one of"),
        (["--role", "admin"], "NAME"),
        (["a b", "--role", "admin"], "is no name of an identity"),
        (["", "--role", "admin"], "is no name of an identity"),
        (["e", *ENGINE, "--read", "*x"], "is no pattern of names"),
        (["o", "--role", "observer", "--read", "a"], "only engines have namespaces"),
        (["e", *ENGINE, "--node", "a"], "Add --role node"),
        (["e", *ENGINE, "--host", "a"], "others connect to"),
        (["m", "--role", "master", "--host", "a:1"], "without a port"),
        (["m", "--role", "master", "--host", "a b"], "neither a host's name"),
        (["m", "--role", "master", "--host", "a.*.b"], "neither a host's name"),
        (["m", "--role", "master", "--host", "a" * 300], "neither a host's name"),
        (["n", "--role", "node", "--host", "master.kvstore"], "Only --role gives them"),
        (["n", "--role", "node", "--host", "*.KVStore"], "Only --role gives them"),
        (["master.kvstore", *ENGINE], "Give the process a name of its own"),
        (["e", *ENGINE, "--days", "0"], "0 is not in the range"),
        (["e", *ENGINE, "--days", "4000"], "1 to 3650 days"),
        (["e", "--role", "engine", *(w for n in range(65) for w in ("--read", str(n)))],
         "at most 64 patterns"),
        (["e", "--role", "engine", *(w for n in range(50) for w in ("--read", "x" * 100 + str(n)))],
         "bytes of 4096"),
    ],
)  # fmt: skip
def test_what_cannot_be_issued(there: Shell, words: list[str], says: str) -> None:
    assert says in there.refused("issue", *words)
    assert there.done("ls").out == "nothing was issued so far\n"
    assert [each for each in os.listdir() if each != FOLDER.name] == []


def test_hosts_are_checked_in_linear_time(there: Shell) -> None:
    assert "neither" in there.refused(
        "issue", "m", "--role", "master", "--host", "a" * 10_000 + "!"
    )


@pytest.mark.parametrize(
    "name", ["a/b", "../x", "Authorities:", "-----BEGIN", "日本", "ü" * 64, "日" * 40, ".x"]
)
def test_any_name_has_a_file_in_this_folder(there: Shell, name: str) -> None:
    there.done(
        "issue", "--role", "engine", "--read", "x\nAuthorities:\n", "--read", name, "--", name
    )
    (file,) = (each for each in os.listdir() if each.endswith(".auth"))
    assert identity_in(file).name == name
    assert identity_in(file).reads == ("x\nAuthorities:\n", name)


def test_a_certificate_ends_with_its_authority(there: Shell) -> None:
    there.later = timedelta(days=3_600)
    result = there.done("issue", "e", *ENGINE)
    assert "and so does this certificate" in result.err
    assert leaf("e.auth").not_valid_after_utc == leaf(FOLDER / "authority.key").not_valid_after_utc
    there.later = timedelta(days=3_660)
    assert "has ended" in there.refused("issue", "f", *ENGINE)
    assert "can sign nothing" in there.refused("rotate", "--new-authority")


def test_a_file_that_cannot_be_written_stops_nothing_else(there: Shell) -> None:
    result = there("issue", "e", *ENGINE, "--out", "none/e.auth")
    assert result.code == 1
    assert "No such file" in result.err
    assert len(there.done("ls", "--json").rows) == 1, "it might exist, so it can be revoked"
    there.done("issue", "e", *ENGINE)
    assert [each for each in os.listdir() if each.startswith(".")] == [], "no rest of a file"


# --- the authority's folder -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "words", [["issue", "e", *ENGINE], ["ls"], ["revoke", "e"], ["rotate"]], ids=lambda w: w[0]
)
def test_without_an_authority(kv: Shell, words: list[str]) -> None:
    error = kv.refused(*words)
    assert "there is no authority in kvstore-authority. kvstore auth init writes one" in error
    assert not FOLDER.exists()


def test_an_authority_that_others_can_read_is_refused(there: Shell) -> None:
    (FOLDER / "authority.key").chmod(0o644)
    assert "chmod 600" in there.refused("issue", "e", *ENGINE)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("ledger.json", "{", "is no ledger"),
        ("ledger.json", "[]", "is no ledger"),
        ("ledger.json", '{"format": 2, "issued": []}', "its format is 2"),
        ("ledger.json", '{"format": 1, "issued": [{}]}', "is no ledger"),
        ("authority.key", "", "has no key"),
    ],
)
def test_a_broken_authority_is_told(there: Shell, name: str, content: str, says: str) -> None:
    (FOLDER / name).write_text(content)
    assert says in there.refused("issue", "e", *ENGINE)


def test_what_trusts_an_authority_is_made_again(there: Shell) -> None:
    before = (FOLDER / "authority.pem").read_bytes()
    (FOLDER / "authority.pem").unlink()
    (FOLDER / "revoked").unlink()
    there.done("issue", "e", *ENGINE)
    assert (FOLDER / "authority.pem").read_bytes() == before
    there.done("revoke", "e")
    assert (FOLDER / "revoked").read_text().count("\n") == 1


def test_a_command_waits_for_another_one(there: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.1)
    with files.locked(FOLDER / ".lock"):
        result = there("issue", "e", *ENGINE)
        assert (result.code, "another command" in result.err) == (1, True)
        assert there.done("ls").out == "nothing was issued so far\n", "who reads need not wait"
    there.done("issue", "e", *ENGINE)


def _issue(folder: str, number: int) -> None:
    with authority.opened(Path(folder), lambda: datetime.now(UTC)) as found:
        found.issue(Wanted(f"e{number}", ("admin",)))


def test_commands_at_once_lose_nothing(there: Shell) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(_issue, [str(FOLDER)] * 4, range(4)))
    assert {row["name"] for row in there.done("ls", "--json").rows} == {"e0", "e1", "e2", "e3"}


def test_without_cryptography(there: Shell) -> None:
    """What needs it says how to install it. ls needs none."""
    there.done("issue", "e", *ENGINE)
    program = (
        "import sys; sys.modules['cryptography'] = None\nfrom kvstore.cli.main import main; main()"
    )

    def without(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, "auth", *words],
            check=False, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    done = without("show", "e.auth")
    assert done.returncode == 1
    assert done.stderr == (
        "kvstore: kvstore auth needs cryptography, which is not installed. "
        "pip install 'cryptography>=44'\n"
    )
    assert without("ls").returncode == 0


# --- ls and show ----------------------------------------------------------------------------------


def test_ls_shows_the_ledger(there: Shell) -> None:
    there.done("issue", "m", "--role", "master", "--role", "node")
    there.done("issue", "e", *ENGINE, "--read", "shown", "--days", "10")
    there.done("issue", "f", *ENGINE)
    there.done("revoke", "f")
    there.later = timedelta(days=20)
    lines = there.done("ls").out.splitlines()
    assert lines[0].split() == ["name", "roles", "namespaces", "number", "until", "state"]
    assert [line.split()[0] + " " + line.split()[-1] for line in lines[1:]] == [
        "m valid", "e expired", "f revoked",
    ]  # fmt: skip
    assert "master+node" in lines[1]
    assert "llama/*, shown (read)" in lines[2]
    rows = there.done("ls", "--json").rows
    assert [row["state"] for row in rows] == ["valid", "expired", "revoked"]
    assert "PRIVATE" not in (FOLDER / "ledger.json").read_text()


def test_show_says_who_a_file_is(there: Shell) -> None:
    there.done("issue", "e", *ENGINE, "--read", "shown")
    FOLDER.rename("away")
    said = there.done("show", "e.auth").out
    for part in ("e\n", "engine\n", "llama/*, shown\n", "signed by     kvstore authority"):
        assert part in said
    (row,) = there.done("show", "e.auth", "--json").rows
    assert row["identity"] == {
        "name": "e", "roles": ["engine"], "reads": ["llama/*", "shown"], "writes": ["llama/*"],
        "nodes": [],
    }  # fmt: skip
    assert row["problems"] == []


def test_show_takes_folders(there: Shell) -> None:
    there.done("issue", "n", "--role", "node", "--node", "host-*", "--folder", "tls")
    said = there.done("show", "tls").out
    assert "node names    host-*\n" in said
    assert "server names  node.kvstore\n" in said


def test_show_says_what_is_wrong(there: Shell) -> None:
    def problems(path: str) -> str:
        result = there("show", path)
        assert result.code == 1
        assert result.out, "it is shown all the same"
        (row,) = there("show", path, "--json").rows
        assert row["problems"]
        return result.err

    there.done("issue", "e", *ENGINE, "--days", "10")
    there.done("init", "--authority", "other")
    there.done("issue", "f", *ENGINE, "--authority", "other")

    Path("e.auth").chmod(0o644)
    assert "every user of this host may read e.auth" in problems("e.auth")
    Path("e.auth").chmod(0o600)
    there.done("show", "e.auth")

    there.later = timedelta(days=11)
    assert "has expired on" in problems("e.auth")
    there.later = timedelta(days=-1)
    assert "is not valid before" in problems("e.auth")
    there.later = timedelta()

    one, other = (Credentials(f"{name}.auth").pems() for name in "ef")
    whole = Path("e.auth").read_bytes()

    def changed(before: bytes, after: bytes) -> str:
        Path("x.auth").write_bytes(whole.replace(before, after))
        Path("x.auth").chmod(0o600)
        return problems("x.auth")

    assert "the key is not the certificate's" in changed(one.key, other.key)
    assert "not signed by an authority in this file" in changed(one.authorities, other.authorities)


ENGINE_URI = "kvstore:engine/e?id=ab12&read=a"
CLIENT, SERVER = ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH


@pytest.mark.parametrize(
    ("uri", "name", "use", "says"),
    [
        ("kvstore:master/e", "e", CLIENT, "the role master, and not its name master.kvstore"),
        ("kvstore:node/e", "e", CLIENT, "it needs server auth"),
        ("kvstore:root/e", "e", CLIENT, "root: no role of an identity"),
        ("https://example.org", "e", CLIENT, "names 0 identities"),
        ("kvstore:engine/e?id=fab12&read=a", "e", CLIENT, "and the certificate another one"),
        (ENGINE_URI, "e", SERVER, "it needs client auth"),
        (ENGINE_URI, "node.kvstore", CLIENT, "is that of a node"),
    ],
)
def test_show_says_what_is_wrong_with_certificates_of_others(
    kv: Shell, uri: str, name: str, use: x509.ObjectIdentifier, says: str
) -> None:
    """As another authority may write them."""
    signer, key = identities.authority(), ec.generate_private_key(ec.SECP256R1())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(signer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(0xAB12)
        .not_valid_before(kv.now() - timedelta(days=1))
        .not_valid_after(kv.now() + timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False
        )
        .add_extension(x509.ExtendedKeyUsage([use]), critical=False)
        .sign(signer.key, SHA256())
    )
    pems = certificates.pems_of(certificates.Signer(key, certificate, (), signer.authorities))
    identities.folder(Path("tls"), pems)
    result = kv("show", "tls")
    assert result.code == 1
    assert says in result.err


@pytest.mark.parametrize(
    ("content", "says"),
    [("", "has no key"), ("nothing", "has no key"), (None, "No such file")],
)
def test_show_of_what_is_no_such_file(kv: Shell, content: str | None, says: str) -> None:
    if content is not None:
        Path("x").write_text(content)
    assert says in kv.refused("show", "x")


# --- revoke ---------------------------------------------------------------------------------------


def test_revoke_adds_the_numbers_of_a_name(there: Shell) -> None:
    there.done("issue", "e", *ENGINE)
    there.done("issue", "e", *ENGINE, "--out", "e2")
    there.done("issue", "f", *ENGINE)
    result = there.done("revoke", "e")
    assert "within a second of a change. Copy kvstore-authority/revoked to the host" in result.out
    file = Revoked(str(FOLDER / "revoked"))
    assert [file.has(identity_in(name)) for name in ("e.auth", "e2", "f.auth")] == [
        True, True, False,
    ]  # fmt: skip
    again = there.done("revoke", "e")
    assert again.out == "there is no such certificate that is valid\n"
    assert (FOLDER / "revoked").read_text().count("\n") == 2


def test_revoke_takes_a_number_and_keeps_what_others_wrote(there: Shell) -> None:
    there.done("issue", "e", *ENGINE)
    there.done("issue", "e", *ENGINE, "--out", "e2")
    (FOLDER / "revoked").write_text("# by hand\n0a0b")
    (row,) = there.done("revoke", identity_in("e2").number, "--json").rows
    assert row == {"revoked": [identity_in("e2").number], "file": str(FOLDER / "revoked")}
    lines = (FOLDER / "revoked").read_text().splitlines()
    assert lines[:2] == ["# by hand", "0a0b"]
    assert [line.split()[0] for line in lines[2:]] == [identity_in("e2").number]


def test_revoke_old_keeps_the_newest(there: Shell) -> None:
    for number in range(3):
        there.done("issue", "e", *ENGINE, "--out", str(number))
    there.done("revoke", "e", "--old")
    assert [row["state"] for row in there.done("ls", "--json").rows] == [
        "revoked", "revoked", "valid",
    ]  # fmt: skip


def test_revoke_of_what_was_never_issued(there: Shell) -> None:
    result = there("revoke", "e")
    assert (result.code, result.out) == (3, "")
    assert "e: nothing of this name or number was issued" in result.err


def test_revoke_says_that_clients_do_not_read_the_list(there: Shell) -> None:
    there.done("issue", "m", "--role", "master")
    assert "clients still accept this master" in there.done("revoke", "m").out


# --- rotate ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("files_at_once")
def test_rotate_issues_anew_with_the_same_rights(there: Shell) -> None:
    there.done("issue", "e", *ENGINE, "--read", "shown", "--days", "30")
    there.done("issue", "m", "--role", "master", "--host", "10.0.0.7")
    there.done("issue", "gone", "--role", "admin")
    there.done("revoke", "gone")
    before = identity_in("e.auth")
    process = Credentials("e.auth")
    there.done("rotate")
    after = identity_in("e.auth")
    assert after._replace(number="") == before._replace(number="")
    assert after.number != before.number
    assert identity_of(certificates.uris_of(certificates.loaded(process.pems().chain)[0])) == after
    assert certificates.hosts_of(leaf("m.auth")) == ["master.kvstore", "10.0.0.7"]
    states = {(row["name"], row["state"]) for row in there.done("ls", "--json").rows}
    assert states == {("e", "valid"), ("m", "valid"), ("gone", "revoked")}
    assert there.done("ls", "--json").rows[-2]["days"] == 30


def test_rotate_takes_names_a_folder_and_days(there: Shell) -> None:
    there.done("issue", "e", *ENGINE)
    there.done("issue", "f", *ENGINE)
    before = identity_in("e.auth")
    there.done("rotate", "e", "e", "--out-dir", "new/files", "--revoke-old", "--days", "7")
    assert os.listdir("new/files") == ["e.auth"]
    file = Revoked(str(FOLDER / "revoked"))
    assert file.has(before)
    assert not file.has(identity_in("new/files/e.auth"))
    assert there.done("ls", "--json").rows[-1]["days"] == 7


def test_rotate_writes_folders_as_for_kubernetes(there: Shell) -> None:
    for name in ("e", "..", "a/b"):
        there.done("issue", name, *ENGINE)
    there.done("rotate", "--folders", "--out-dir", "new")
    assert set(os.listdir("new")) == {"e", "%2E%2E", "a%2Fb"}
    assert {identity_in(f"new/{each}").name for each in os.listdir("new")} == {"e", "..", "a/b"}


def test_rotate_has_the_rights_of_the_newest_certificate(there: Shell) -> None:
    there.done("issue", "e", *ENGINE)
    there.done("issue", "e", "--role", "engine", "--read", "other", "--force")
    there.done("rotate")
    assert identity_in("e.auth").reads == ("other",)


def test_an_expired_certificate_is_rotated_by_its_name_alone(there: Shell) -> None:
    there.done("issue", "e", *ENGINE, "--days", "1")
    there.later = timedelta(days=2)
    assert there.done("rotate").out == "there is no certificate that is valid\n"
    there.done("rotate", "e")
    assert len(there.done("ls", "--json").rows) == 2


def test_rotate_of_what_was_never_issued_changes_nothing(there: Shell) -> None:
    there.done("issue", "e", *ENGINE)
    result = there("rotate", "e", "g")
    assert (result.code, result.out) == (3, "")
    assert len(there.done("ls", "--json").rows) == 1


@pytest.mark.parametrize(
    "words",
    [
        ["--new-authority", "e"], ["--drop-old", "e"], ["--new-authority", "--drop-old"],
        ["--new-authority", "--revoke-old"], ["--drop-old", "--days", "3"], ["--force"],
    ],
)  # fmt: skip
def test_steps_of_a_rotation_stand_alone(there: Shell, words: list[str]) -> None:
    there.refused("rotate", *words)


def test_the_authority_is_rotated_without_a_restart(there: Shell) -> None:
    """A master and an engine run from the first file to the last one, and connect at each step."""
    there.done("issue", "m", "--role", "master")
    there.done("issue", "e", *ENGINE)
    master, engine = Credentials("m.auth"), Credentials("e.auth")
    serving = master.server()

    def connect() -> None:
        shake(engine.client(), serving, MASTER_NAME)

    connect()
    (old,) = trusted("e.auth")
    there.done("rotate", "--new-authority")
    connect()
    assert "Finish the last rotation first" in there.refused("rotate", "--new-authority")
    error = there.refused("rotate", "--drop-old")
    assert "of 2 names, the old authority has signed the newest certificate: m, e" in error

    there.done("rotate", "m")
    connect()
    new, *rest = trusted("m.auth")
    assert rest == [old]
    assert ": e. Files issued after this would refuse them" in there.refused("rotate", "--drop-old")
    there.done("rotate", "e")
    connect()

    there.done("rotate", "--drop-old")
    connect()
    assert (FOLDER / "authority.pem").read_bytes().count(b"BEGIN") == 1
    assert "no old one to drop" in there.refused("rotate", "--drop-old")
    for name in ("m", "e"):
        there.done("rotate", name)
        connect()
        assert trusted(f"{name}.auth") == [new]
        assert Path(f"{name}.auth").read_bytes().count(b"BEGIN CERT") == 2
        there.done("show", f"{name}.auth")
    there.done("rotate", "--new-authority", "--json")
    connect()


def test_a_lost_authority_is_replaced_without_a_restart(there: Shell) -> None:
    """As docs/auth.md says: certificates of the other authority are appended by hand."""
    there.done("issue", "m", "--role", "master")
    there.done("issue", "e", *ENGINE)
    master, engine = Credentials("m.auth"), Credentials("e.auth")
    serving = master.server()

    def connect() -> None:
        shake(engine.client(), serving, MASTER_NAME)

    def append(name: str, folder: Path) -> None:
        with open(name, "ab") as file:
            file.write((folder / "authority.pem").read_bytes())

    (FOLDER / "authority.key").unlink()
    other = Path("other")
    there.done("init", "--authority", "other")
    for name, words in (("m", ["--role", "master"]), ("e", [*ENGINE])):
        there.done("issue", name, *words, "--authority", "other", "--out", f"{name}.new")
        append(f"{name}.new", FOLDER)
    for name in ("m", "e"):
        append(f"{name}.auth", other)
        connect()
    for name in ("m", "e"):
        os.replace(f"{name}.new", f"{name}.auth")
        connect()
        there.done("show", f"{name}.auth")
    there.done("rotate", "--authority", "other")
    connect()
    assert len(trusted("m.auth")) == len(trusted("e.auth")) == 1


def test_an_old_authority_is_dropped_by_force(there: Shell) -> None:
    there.done("issue", "e", *ENGINE)
    there.done("rotate", "--new-authority")
    there.done("rotate", "--drop-old", "--force")


def test_a_rotation_that_was_killed_has_happened_or_not(
    there: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    there.done("issue", "e", *ENGINE)
    before = (FOLDER / "authority.pem").read_bytes()
    with monkeypatch.context() as killed:
        killed.setattr(authority.Authority, "_write_pem", lambda _: None)
        there.done("rotate", "--new-authority")
    assert (FOLDER / "authority.pem").read_bytes() == before
    there.done("rotate", "e")
    assert len(trusted("e.auth")) == 2
    assert (FOLDER / "authority.pem").read_bytes().count(b"BEGIN") == 2
    there.done("show", "e.auth")


def test_each_command_has_examples(kv: Shell) -> None:
    for name in ("init", "issue", "ls", "show", "revoke", "rotate"):
        said = kv.done(name, "--help").out
        assert f"Examples:\n    kvstore auth {name}" in said
