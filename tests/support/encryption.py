"""Both ends of encrypted data ports, with identities of one authority."""

from __future__ import annotations

import atexit
import functools
from pathlib import Path
from tempfile import TemporaryDirectory

from kvstore.auth import certificates
from kvstore.auth.certificates import Wanted
from kvstore.auth.credentials import Credentials
from kvstore.auth.data_port_tls import ClientEnd, NodeEnd
from kvstore.auth.revocation_list import Revoked
from tests.support.identities import ENGINE, NODE, authority, content, credentials, write


class Ends:
    """See the module."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signer: certificates.Signer = authority()
        self.node_file = str(write(folder / "node", content(self.signer, NODE)))

    def node(self, wanted: Wanted = NODE, *, revoked: Path | str = "") -> NodeEnd:
        return NodeEnd(self.credentials(wanted), Revoked(str(revoked)))

    def client(self, wanted: Wanted = ENGINE) -> ClientEnd:
        return ClientEnd(self.credentials(wanted))

    def credentials(self, wanted: Wanted) -> Credentials:
        return credentials(self.folder, self.signer, wanted)


@functools.cache
def shared_ends() -> Ends:
    """Of this process."""
    folder = TemporaryDirectory(prefix="kvstore-ends-")
    atexit.register(folder.cleanup)
    return Ends(Path(folder.name))
