"""The folder of a cluster's certificate authority (CA).

    ca.key     its key (PKCS 8)
    ca.crt     its certificate, for peers to trust
    issued/    NAME.NUMBER.crt: each certificate that it has issued, without its key
    revoked    numbers of revoked certificates, for the servers
    (``kvstore.security.revocation_list``)

A certificate is recorded in ``issued/`` before its file is written, so it can be revoked.
"""

from __future__ import annotations

import fcntl
import os
from datetime import datetime
from pathlib import Path
from typing import Final
from urllib.parse import quote

from kvstore.errors import UsageError
from kvstore.runtime.watched_files import read_file, write_file
from kvstore.security import certificates
from kvstore.security.certificates import (
    CertificateRequest,
    IssuedCertificate,
    SigningAuthority,
    pem,
)
from kvstore.security.credentials import AUTHORITIES, check_mode_of
from kvstore.security.revocation_list import normalize_serial

KEY_NAME: Final = "ca.key"
CERTIFICATE_NAME: Final = "ca.crt"
ISSUED_NAME: Final = "issued"
REVOKED_NAME: Final = "revoked"
PUBLIC: Final = 0o644


def create(folder: Path, now: datetime) -> SigningAuthority:
    """Create a CA.

    Raises:
        UsageError: the folder has a CA.
        OSError: it cannot be written.
    """
    if (folder / KEY_NAME).exists() or (folder / CERTIFICATE_NAME).exists():
        raise UsageError(
            f"{folder} has an authority already",
            advice="Nothing was changed. Name another folder: --ca DIR.",
        )
    signer = certificates.new_ca(now)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / ISSUED_NAME).mkdir(exist_ok=True)
    (folder / REVOKED_NAME).touch(PUBLIC)
    write_file(folder / CERTIFICATE_NAME, pem(signer.certificate), PUBLIC)
    write_file(folder / KEY_NAME, certificates.pem_of_key(signer.key))
    return signer


def issue(folder: Path, wanted: CertificateRequest, now: datetime) -> IssuedCertificate:
    """Issue and record a certificate.

    Raises:
        ConfigError: there is no CA, or it cannot be read.
        InvalidArgumentError: the CA has expired, or the request is invalid.
    """
    advice = "kvstore auth init writes one; --ca DIR names another folder."
    key, certificate = (
        read_file(folder / name, "authority", advice=advice)
        for name in (KEY_NAME, CERTIFICATE_NAME)
    )
    check_mode_of(folder / KEY_NAME, "authority")
    leaf = certificates.issue(certificates.signer_of(key, certificate), wanted, now)
    name = f"{file_name(wanted.name)}.{leaf.identity.number}.crt"
    write_file(folder / ISSUED_NAME / name, leaf.pems.chain, PUBLIC)
    return leaf


def revoke(folder: Path, which: str, now: datetime) -> list[str]:
    """Revoke the certificate with a number, or all of a name; return their numbers."""
    paths = sorted((folder / ISSUED_NAME).glob("*.crt"))
    issued = [path.name.rsplit(".", 2)[:2] for path in paths]
    found = [number for name, number in issued if which == number or file_name(which) == name]
    if not found:
        return []
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed
        path = folder / REVOKED_NAME
        before = path.read_bytes() if path.exists() else b""
        if before and not before.endswith(b"\n"):
            before += b"\n"  # an editor may have removed it
        given = before.decode(errors="replace").splitlines()
        known = {normalize_serial(line.split("#")[0]) for line in given}
        note = f"# {quote(which, safe='')}, {now:%Y-%m-%dT%H:%M:%SZ}"
        lines = [f"{number}  {note}\n" for number in found if number not in known]
        write_file(path, before + "".join(lines).encode(), PUBLIC)
    finally:
        os.close(lock)
    return found


def file_name(name: str) -> str:
    """Return the name of an identity in the form for file names."""
    return name.replace("%", "%25").replace("/", "%2F")


def content_of(leaf: IssuedCertificate, command: str) -> bytes:
    """Return the content of an identity's file. ``command``: the command line, for people."""
    # The text must not look like a part of the file. URIs cannot: they have no spaces.
    command = "".join(char if char.isprintable() else "?" for char in command)
    text = (
        f"{leaf.identity.uri}\n"
        f"Valid until {leaf.until:%Y-%m-%d %H:%M} UTC. Holds a key: keep its mode at 600.\n"
        f"Made by: {command.replace('---', '- -')}\n\n"
    )
    key, chain, authorities = leaf.pems
    return text.encode() + key + chain + f"\n{AUTHORITIES}\n".encode() + authorities
