"""Identities for tests: an authority in a folder, and files that it issues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from kvstore.runtime.watched_files import write_file
from kvstore.security import ca
from kvstore.security.certificates import CertificateRequest
from kvstore.security.identity import ALL


def utc_now() -> datetime:
    return datetime.now(UTC)


class Identities:
    """See the module. The same name and rights give the same file."""

    def __init__(self, folder: Path, clock: Callable[[], datetime] = utc_now) -> None:
        """``clock``: the time at which the authority thinks it is."""
        self._folder = folder / "authority"
        self._files = folder
        self.clock = clock
        ca.create(self._folder, clock())

    @property
    def folder(self) -> Path:
        """For the files."""
        return self._files

    @property
    def revoked_file(self) -> Path:
        return self._folder / ca.REVOKED_NAME

    def file(
        self,
        name: str,
        *roles: str,
        reads: Sequence[str] = (),
        writes: Sequence[str] = (),
        nodes: Sequence[str] = ALL,
        days: int = 365,
    ) -> str:
        """The path of a file for ``KVSTORE_AUTH``."""
        path = self._files / f"{name}.auth"
        if not path.exists():
            hosts = ("127.0.0.1",) if "master" in (roles or (name,)) else ()
            wanted = CertificateRequest(
                name, roles or (name,), tuple(reads), tuple(writes), tuple(nodes), hosts, days
            )
            self.replace(path, wanted)
        return str(path)

    def engine(self, name: str, *spaces: str) -> str:
        """The file of an engine that may read and write in these namespaces."""
        return self.file(name, "engine", reads=spaces, writes=spaces)

    def replace(self, path: Path, wanted: CertificateRequest) -> None:
        """Issues anew, into a file that may be in use."""
        leaf = ca.issue(self._folder, wanted, self.clock())
        write_file(path, ca.content_of(leaf, "a test"))

    def revoke(self, which: str) -> None:
        """``which``: a name or a number."""
        assert ca.revoke(self._folder, which, self.clock())
