"""The authority of a cluster: a folder with a key, and the certificates that it has signed.

    authority.key   the key, its certificates and those of the authority before it: the truth
    authority.pem   the certificates to trust, the newest first; made from authority.key
    ledger.json     what was issued (``kvstore.auth.ledger``); never a key of it
    revoked         numbers of revoked certificates, for the masters (``kvstore.auth.revoked``)

Each file is replaced as a whole, and ``authority.key`` last where several change: a command that is
killed leaves the state before it, and at most a row of the ledger for a certificate that was never
written.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

from kvstore.auth import ledger
from kvstore.auth.credentials import AUTHORITIES, MASTER_NAME, NODE_NAME, Pems, read
from kvstore.auth.files import PUBLIC, SECRET, locked, write_whole
from kvstore.auth.identity import ALL, ENGINE, MASTER, NODE, URI_BYTES_MAX
from kvstore.auth.ledger import VALID, Row, Wanted
from kvstore.errors import ConfigError, InvalidArgumentError, StartupError, UsageError
from kvstore.network.addresses import is_address

if TYPE_CHECKING:
    from kvstore.auth.certificates import Leaf, Signer

KEY_NAME: Final = "authority.key"
PEM_NAME: Final = "authority.pem"
LEDGER_NAME: Final = "ledger.json"
REVOKED_NAME: Final = "revoked"
LOCK_NAME: Final = ".lock"

DAYS_MAX: Final = 3_650
NAME_MAX: Final = 64
HOSTS_MAX: Final = 64

_LABEL: Final = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_DNS: Final = re.compile(rf"(?:\*\.)?{_LABEL}(?:\.{_LABEL})*")
_OWN_NAMES: Final = (MASTER_NAME, NODE_NAME)


class Authority:
    """An authority that is open: ``opened`` makes these. Its lock is held meanwhile."""

    def __init__(self, folder: Path, clock: Callable[[], datetime]) -> None:
        """
        Raises:
            ConfigError: a file cannot be used.
            StartupError: ``cryptography`` is not installed.
        """
        self._folder = folder
        self._clock = clock
        self._signer: Signer = certificates().signer_of(read(str(folder / KEY_NAME)))
        self.rows = ledger.load(folder / LEDGER_NAME)
        self._write_pem()  # in case a command was killed before it did
        if not self.revoked_file.exists():  # no master starts without it
            write_whole(self.revoked_file, b"", PUBLIC)

    @property
    def revoked_file(self) -> Path:
        return self._folder / REVOKED_NAME

    @property
    def name(self) -> str:
        return str(certificates().shown_name(self._signer.certificate))

    @property
    def until(self) -> datetime:
        return self._signer.certificate.not_valid_after_utc

    @property
    def has_old(self) -> bool:
        """Whether the authority before this one is still trusted."""
        return len(self._signer.authorities) > 1

    def issue(self, wanted: Wanted) -> tuple[Row, Pems]:
        """Raises UsageError: there can be no such certificate."""
        return self.issue_all([wanted])[0]

    def issue_all(self, wanted: Iterable[Wanted]) -> list[tuple[Row, Pems]]:
        """A certificate for each of them.

        Raises:
            UsageError: there can be no such certificate; none was issued.
        """
        now = self._clock()
        if now >= self.until:
            raise UsageError(
                f"{self.name} has ended on {self.until:%Y-%m-%d}",
                advice="Write another authority (kvstore auth init --authority DIR) and issue all "
                "anew.",
            )
        found: list[tuple[Row, Pems]] = []
        for each in wanted:
            check(each)
            leaf: Leaf = certificates().issue(self._signer, each, now)
            row = Row(leaf.number, each, self._number(), leaf.since, leaf.until)
            found.append((row, leaf.pems))
        # Before any of them is written: what exists can be revoked.
        self._save([*self.rows, *(row for row, _ in found)])
        return found

    def valid(self, names: Iterable[str]) -> list[Row]:
        """The valid certificates of these names or numbers."""
        wanted = set(names)
        now = self._clock()
        return [
            row
            for row in self.rows
            if row.state(now) == VALID and not wanted.isdisjoint((row.wanted.name, row.number))
        ]

    def to_rotate(self) -> list[Row]:
        """The newest certificate of each name that is valid."""
        now = self._clock()
        return [row for row in ledger.newest(self.rows).values() if row.state(now) == VALID]

    def only_of_old(self) -> list[Row]:
        """Of the newest valid certificates of each name, those that the authority before this one
        has signed."""
        return [row for row in self.to_rotate() if row.authority != self._number()]

    def revoke(self, rows: Sequence[Row]) -> None:
        """From now on masters that read the file refuse them."""
        now = self._clock()
        numbers = {row.number for row in rows}
        try:
            before = self.revoked_file.read_bytes()
        except FileNotFoundError:
            before = b""
        if before and not before.endswith(b"\n"):
            before += b"\n"  # of somebody who edits it
        lines = [
            f"{row.number}  # {quote(row.wanted.name, safe='')}, {ledger.text_of(now)}\n"
            for row in rows
        ]
        write_whole(self.revoked_file, before + "".join(lines).encode(), PUBLIC)
        self._save(
            [row._replace(revoked=now) if row.number in numbers else row for row in self.rows]
        )

    def rotate(self) -> None:
        """Makes a new authority. The one before it signs its certificate, and stays trusted.

        Raises:
            UsageError: the last rotation is not finished, or the authority has ended.
        """
        if self.has_old:
            raise UsageError(
                "two authorities are trusted already",
                advice="Finish the last rotation first: issue all anew (kvstore auth rotate), put "
                "the files in place, then kvstore auth rotate --drop-old.",
            )
        now = self._clock()
        if now >= self.until:
            raise UsageError(
                f"{self.name} has ended on {self.until:%Y-%m-%d} and can sign nothing",
                advice="Write another authority: kvstore auth init --authority DIR.",
            )
        self._replace(certificates().next_authority(self._signer, now))

    def drop_old(self) -> None:
        """Files issued from now on trust this authority only.

        Raises:
            UsageError: there is no old one.
        """
        if not self.has_old:
            raise UsageError("there is one authority, and no old one to drop")
        own = self._signer.certificate
        self._replace(self._signer._replace(crossed=(), authorities=(own,)))

    def _number(self) -> str:
        return str(certificates().number_of(self._signer.certificate))

    def _replace(self, signer: Signer) -> None:
        self._signer = signer
        _write_key(self._folder, signer)
        self._write_pem()

    def _write_pem(self) -> None:
        path, content = self._folder / PEM_NAME, certificates().pem(self._signer.authorities)
        if not path.exists() or path.read_bytes() != content:
            write_whole(path, content, PUBLIC)

    def _save(self, rows: list[Row]) -> None:
        ledger.save(self._folder / LEDGER_NAME, rows)
        self.rows = rows


def create(folder: Path, cluster: str, clock: Callable[[], datetime]) -> None:
    """Writes a new authority.

    Raises:
        UsageError: the folder is in use.
        StartupError: ``cryptography`` is not installed.
        OSError: it cannot be written.
    """
    if len(cluster.encode()) > NAME_MAX or not cluster.isprintable():
        raise InvalidArgumentError(
            f"{cluster[:80]!r} is no name of a cluster",
            advice=f"Use at most {NAME_MAX} printable characters.",
        )
    signer: Signer = certificates().new_authority(cluster, clock())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(folder / LOCK_NAME):
        # A command that was killed leaves files without the key, which is written last.
        known = {PEM_NAME, LEDGER_NAME, REVOKED_NAME, LOCK_NAME}
        others = {each.name for each in folder.iterdir()} - known
        if others:
            what = "has an authority already" if KEY_NAME in others else "is not empty"
            raise UsageError(
                f"{folder} {what}",
                advice="Nothing was changed. Name another folder: --authority DIR.",
            )
        folder.chmod(0o700)
        ledger.save(folder / LEDGER_NAME, [])
        write_whole(folder / REVOKED_NAME, b"", PUBLIC)
        write_whole(folder / PEM_NAME, certificates().pem(signer.authorities), PUBLIC)
        _write_key(folder, signer)


@contextlib.contextmanager
def opened(folder: Path, clock: Callable[[], datetime]) -> Iterator[Authority]:
    """
    Raises:
        ConfigError: there is no authority, or it cannot be read.
        BusyError: another command uses it.
        StartupError: ``cryptography`` is not installed.
    """
    _check_there(folder)
    with locked(folder / LOCK_NAME):
        yield Authority(folder, clock)


def issued(folder: Path) -> list[Row]:
    """What the authority has issued. Needs no lock, no key and no ``cryptography``.

    Raises:
        ConfigError: there is no authority, or its ledger cannot be read.
    """
    _check_there(folder)
    return ledger.load(folder / LEDGER_NAME)


def _check_there(folder: Path) -> None:
    if not os.path.exists(folder / KEY_NAME):
        raise ConfigError(
            f"there is no authority in {folder}",
            advice="kvstore auth init writes one; --authority DIR names another folder.",
        )


def certificates() -> ModuleType:
    """Raises StartupError: ``cryptography`` is not installed."""
    try:
        from kvstore.auth import certificates as found  # needs cryptography
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "cryptography":
            raise
        raise StartupError(
            "kvstore auth needs cryptography, which is not installed",
            advice="pip install 'cryptography>=44'",
        ) from None
    return found


def _write_key(folder: Path, signer: Signer) -> None:
    pems = certificates().pems_of(signer)
    text = "The key of a cluster's authority. Who has it can make every identity.\n\n"
    write_whole(folder / KEY_NAME, _joined(text, pems), SECRET)


def _joined(text: str, pems: Pems) -> bytes:
    return text.encode() + pems.key + pems.chain + f"\n{AUTHORITIES}\n".encode() + pems.authorities


def content_of(row: Row, pems: Pems, command: str) -> bytes:
    """A file that proves an identity. ``command``: what was called, for people."""
    # Text must not look like a part of the file. URIs cannot: spaces are %20 there.
    told = "".join(each if each.isprintable() else "?" for each in command).replace("---", "- -")
    text = (
        f"{row.wanted.identity(row.number).uri}\n"
        f"Valid until {ledger.text_of(row.until)}. Holds a key: keep its mode at 600.\n"
        f"Made by: {told}\n\n"
    )
    return _joined(text, pems)


def check(wanted: Wanted) -> None:
    """
    Raises:
        InvalidArgumentError: there can be no such certificate, or it would be of no use.
    """
    uri = wanted.identity("f" * 16).uri
    if len(uri) > URI_BYTES_MAX:
        raise InvalidArgumentError(
            f"{wanted.name}: its name and patterns take {len(uri)} bytes of {URI_BYTES_MAX}",
            advice="Give fewer patterns, or shorter ones that end in a star.",
        )
    if not 1 <= wanted.days <= DAYS_MAX:
        raise InvalidArgumentError(f"a certificate is valid for 1 to {DAYS_MAX} days")
    patterns = wanted.reads or wanted.writes
    if ENGINE in wanted.roles and not patterns:
        raise InvalidArgumentError(
            f"{wanted.name}: an engine without a namespace may do nothing",
            advice="Give --namespace 'PATTERN' (read and write), --read or --write. "
            "--namespace '*' means all.",
        )
    if ENGINE not in wanted.roles and patterns:
        raise InvalidArgumentError(
            f"{wanted.name}: only engines have namespaces",
            advice="Add --role engine, or leave out --namespace, --read and --write.",
        )
    if NODE not in wanted.roles and wanted.nodes != ALL:
        raise InvalidArgumentError(
            f"{wanted.name}: --node says which names a node may have",
            advice="Add --role node, or leave out --node.",
        )
    if wanted.name in _OWN_NAMES:
        raise InvalidArgumentError(
            f"{wanted.name}: every certificate of that role has this name anyway",
            advice="Give the process a name of its own, such as its host's.",
        )
    if wanted.hosts and not wanted.serves:
        raise InvalidArgumentError(
            f"{wanted.name}: --host is for processes that others connect to",
            advice=f"These have the role {MASTER} or {NODE}.",
        )
    if len(wanted.hosts) > HOSTS_MAX:
        raise InvalidArgumentError(f"a certificate has at most {HOSTS_MAX} hosts")
    for host in wanted.hosts:
        _check_host(host)


def _check_host(host: str) -> None:
    if not is_address(host) and (not _DNS.fullmatch(host) or len(host) > 253):
        raise InvalidArgumentError(
            f"{host[:80]!r} is neither a host's name nor an address",
            advice="Give each as --host cache-1.example or --host 10.0.0.7, without a port.",
        )
    # *.kvstore would be a name of masters.
    if host.lower().endswith(".kvstore"):
        raise InvalidArgumentError(
            f"{host}: names in .kvstore say the role of a process",
            advice="Only --role gives them.",
        )
