"""Both ends of encrypted data ports, with identities of one authority."""

from __future__ import annotations

import atexit
import functools
from pathlib import Path
from tempfile import TemporaryDirectory

from kvstore.security import certificates
from kvstore.security.certificates import CertificateRequest
from kvstore.security.credentials import Credentials
from kvstore.security.data_port_tls import ClientTls, NodeTls
from kvstore.security.revocation_list import RevocationList
from tests.support.identities import ENGINE, NODE, authority, content, credentials, write


class TlsEndpoints:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signer: certificates.SigningAuthority = authority()
        self.node_file = str(write(folder / "node", content(self.signer, NODE)))

    def node(self, wanted: CertificateRequest = NODE, *, revoked: Path | str = "") -> NodeTls:
        return NodeTls(self.credentials(wanted), RevocationList(str(revoked)))

    def client(self, wanted: CertificateRequest = ENGINE) -> ClientTls:
        return ClientTls(self.credentials(wanted))

    def credentials(self, wanted: CertificateRequest) -> Credentials:
        return credentials(self.folder, self.signer, wanted)


@functools.cache
def shared_ends() -> TlsEndpoints:
    """Of this process."""
    folder = TemporaryDirectory(prefix="kvstore-ends-")
    atexit.register(folder.cleanup)
    return TlsEndpoints(Path(folder.name))
