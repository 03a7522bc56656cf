"""Authorities and files of identities, as ``kvstore auth`` writes them, and handshakes."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from kvstore.security import certificates
from kvstore.security.ca import content_of
from kvstore.security.certificates import CertificateRequest
from kvstore.security.credentials import MASTER_NAME, Credentials, PemBundle, alternative_names

NOW: Final = datetime.now(UTC)

MASTER: Final = CertificateRequest("m", ("master",))
NODE: Final = CertificateRequest("n", ("node",))
ENGINE: Final = CertificateRequest("e", ("engine",), ("llama/*",), ("llama/*",))


def authority() -> certificates.SigningAuthority:
    return certificates.new_ca(NOW)


def content(
    signer: certificates.SigningAuthority, wanted: CertificateRequest, *, days_ago: float = 0
) -> bytes:
    leaf = certificates.issue(signer, wanted, NOW - timedelta(days=days_ago))
    return content_of(leaf, "")


def write(path: Path, whole: bytes) -> Path:
    path.touch(mode=0o600)
    path.write_bytes(whole)
    return path


def credentials(
    path: Path,
    signer: certificates.SigningAuthority,
    wanted: CertificateRequest,
    *,
    days_ago: float = 0,
) -> Credentials:
    """Of a file in the folder ``path``."""
    name = f"{len(list(path.iterdir()))}.auth"
    return Credentials(str(write(path / name, content(signer, wanted, days_ago=days_ago))))


def shake(
    client: ssl.SSLContext, server: ssl.SSLContext, name: str = MASTER_NAME
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Connects both in memory; raises ssl.SSLError if one refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    done: set[ssl.SSLObject] = set()
    for _ in range(5):
        for end in ends:
            if end not in done:
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue
                done.add(end)
    assert len(done) == len(ends)
    ends[1].write(b"x")
    assert ends[0].read(1) == b"x"  # has seen what the server said of its certificate
    return ends


def folder(path: Path, pems: PemBundle) -> Path:
    path.mkdir()
    for name, whole in zip(("tls.key", "tls.crt", "ca.crt"), pems, strict=True):
        write(path / name, whole)
    return path


def uris(peer: ssl.SSLObject) -> Sequence[str]:
    return alternative_names(peer.getpeercert())
