"""Credentials of an identity: a key, its certificate, and the trusted CAs.

``KVSTORE_AUTH`` names one PEM file (written by ``kvstore auth issue``: the key, the certificate
chain, and after the line ``Authorities:`` the CA certificates), or a folder with ``tls.key``,
``tls.crt`` and ``ca.crt``, as cert-manager writes them. New connections use the current content
(``kvstore.runtime.watched_files``). Keys are never written or logged.

A peer proves its role by a name in its certificate, not by its address: ``master.kvstore`` or
``node.kvstore``. So a node or an engine cannot impersonate a master on any host, and certificates
need no addresses.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import os
import re
import ssl
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import grpc

from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.runtime.clock import uptime
from kvstore.runtime.watched_files import WatchedFile, read_file
from kvstore.security.identity import MASTER, NODE, UNAUTHENTICATED, Identity, identity_of
from kvstore.security.tls import Certificate, HttpsContext, load_chain, reloading_context
from kvstore.security.validity import DAY_S, ValidityPeriod, time_text, validity_of

log = logging.getLogger("kvstore.security")

MASTER_NAME: Final = "master.kvstore"
NODE_NAME: Final = "node.kvstore"
SERVED: Final = {MASTER: MASTER_NAME, NODE: NODE_NAME}
"""The required name in the certificate of each role."""

AUTHORITIES: Final = "Authorities:"
"""The line in a file of ``kvstore auth issue`` before the CA certificates."""

LOOK_S: Final = 3_600.0
"""Interval at which a server checks whether its certificate expires soon."""

_KEY: Final = re.compile(
    rb"-----BEGIN (?:EC |RSA )?PRIVATE KEY-----.+?-----END (?:EC |RSA )?PRIVATE KEY-----\s*",
    re.DOTALL,
)
_CERTIFICATE: Final = re.compile(
    rb"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----\s*", re.DOTALL
)
_AUTHORITIES: Final = re.compile(rb"^%b[ \t\r]*$" % AUTHORITIES.encode(), re.MULTILINE)


class PemBundle(NamedTuple):
    """The content of the file, as PEM."""

    key: bytes
    chain: bytes
    authorities: bytes

    def __repr__(self) -> str:
        return "Pems(...)"  # it has a key


class Credentials:
    """The identity of this process, for its connections. Threads: any."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            ConfigError: the file cannot be read, others may read it, or it is not complete.
        """
        self.path = path
        self._served: frozenset[str] = frozenset()
        """Names of ``check_serves``."""

        def load() -> PemBundle:
            pems = read(path)
            _loaded(pems)
            for name in self._served:
                self.check_serves(name, pems)
            return pems

        self._file = WatchedFile("auth", path, load, files=functools.partial(_files, path))
        self._context_of = functools.lru_cache(1)(_loaded)
        self._remind_at = -math.inf

    def pems(self) -> PemBundle:
        """The PEM data of the file; the last valid data if the file is unusable."""
        return self._file.value

    def validity(self) -> ValidityPeriod:
        """The validity of the certificate."""
        return validity_of(self.pems().chain.decode("ascii"))

    def validity_error(self) -> str:
        """Return why the certificate is not valid by the clock of this host; "": it is."""
        error = self.validity().error(time.time())
        return error and f"the certificate of auth {self.path} is not valid: {error}"

    def warn_if_expiring(self) -> None:
        """Log that the certificate expires soon, once a day. A repeated call takes some 200 ns."""
        if uptime() < self._remind_at:
            return
        self._remind_at = uptime() + DAY_S
        valid, now = self.validity(), time.time()
        if valid.ends_soon(now):
            log.warning(
                "%s file=%s until=%r days=%d: issue another one (kvstore auth issue), and copy it "
                "over this file",
                "certificate_expires_soon" if now < valid.until else "certificate_expired",
                self.path, time_text(valid.until), (valid.until - now) // DAY_S,
            )  # fmt: skip

    async def keep_reminding(self) -> None:
        """Call ``warn_if_expiring`` regularly while this process runs."""
        while True:
            self.warn_if_expiring()
            await asyncio.sleep(LOOK_S)

    def client(self) -> ssl.SSLContext:
        """Return the context for outgoing connections, which check for ``MASTER_NAME`` or
        ``NODE_NAME``."""
        return self._context_of(self.pems())

    def server(self, *, is_optional: bool = False, cert: str = "", key: str = "") -> ssl.SSLContext:
        """Return the context for a port of this process. Each handshake uses the current files.

        Args:
            is_optional: whether peers may omit a certificate, as on an HTTP port.
            cert, key: PEM files of the port's own certificate, for browsers that trust another CA.

        Raises:
            ConfigError: ``cert`` or ``key`` cannot be used.
        """
        shown = Certificate(cert, key) if cert else None

        def load(content: tuple[PemBundle, tuple[bytes, bytes] | None]) -> ssl.SSLContext:
            kind = HttpsContext if is_optional else ssl.SSLContext
            context = _loaded(content[0], is_server=True, shown=content[1], kind=kind)
            if is_optional:
                context.verify_mode = ssl.CERT_OPTIONAL
            return context

        return reloading_context(
            lambda: (self.pems(), None if shown is None else shown.value), load
        )

    def check_serves(self, name: str, pems: PemBundle | None = None) -> None:
        """Check, by a handshake with itself, that peers accept this process as a server of this
        name; from now on at each change of the file too. ``pems``: the new content.

        Raises:
            ConfigError: they do not.
        """
        pems = pems or self.pems()
        valid = validity_of(pems.chain.decode("ascii"))
        if why := valid.error(time.time()) or refusal_of(pems, name):
            raise ConfigError(
                f"the certificate of auth {self.path} is not one that clients accept from {name}: "
                f"{why}",
                advice=f"kvstore auth show {self.path} says what it is for; kvstore auth issue "
                f"--role {name.partition('.')[0]} writes one.",
                key="auth",
            )
        self._served |= {name}

    def channel(self) -> grpc.ChannelCredentials:
        """Return the credentials of a gRPC channel, which also needs ``channel_options``."""
        pems = self.pems()
        return grpc.ssl_channel_credentials(pems.authorities, pems.key, pems.chain)

    def grpc_server(self) -> grpc.ServerCredentials:
        """Return the credentials of a gRPC server whose peers must present a certificate."""

        def configuration(pems: PemBundle) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration(
                [(pems.key, pems.chain)], pems.authorities
            )

        used = self.pems()

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Return a new configuration, or None if it is unchanged. gRPC calls it at each
            handshake, and a process that returned a new one each time was aborted after some
            thousand."""
            nonlocal used
            pems = self.pems()
            if pems is used:
                return None
            used = pems
            return configuration(pems)

        return grpc.dynamic_ssl_server_credentials(
            configuration(used),
            changed,  # type: ignore[arg-type]  # its stubs lack None
            require_client_authentication=True,
        )


def open_channel(
    target: str, credentials: Credentials | None, options: Sequence[tuple[str, str | int]]
) -> grpc.Channel:
    """Open a channel to a master; ``credentials``: None: without authentication."""
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(
        target, credentials.channel(), options=(*options, *channel_options())
    )


def channel_options(name: str = MASTER_NAME) -> tuple[tuple[str, str], ...]:
    """Return the options of a gRPC channel whose server must have this name in its certificate."""
    return (("grpc.ssl_target_name_override", name),)


def alternative_names(certificate: object) -> list[str]:
    """Return the URIs of a peer's certificate, as ``ssl`` describes it (``getpeercert``)."""
    names = certificate.get("subjectAltName", ()) if isinstance(certificate, dict) else ()
    return [value for kind, value in names if kind == "URI"]


def peer_identity(certificate: object) -> Identity:
    """Return the identity that such a certificate names. Raises InvalidArgumentError: it names
    none, or several."""
    end = certificate.get("notAfter") if isinstance(certificate, dict) else None
    until = ssl.cert_time_to_seconds(end) if isinstance(end, str) else math.inf
    return identity_of(alternative_names(certificate))._replace(until=until)


def shown_identity(certificate: object) -> Identity:
    """As ``peer_identity``; UNAUTHENTICATED: it names none, or several."""
    try:
        return peer_identity(certificate)
    except InvalidArgumentError:
        return UNAUTHENTICATED


def _loaded(
    pems: PemBundle, *, is_server: bool = False, shown: tuple[bytes, bytes] | None = None,
    kind: type[ssl.SSLContext] = ssl.SSLContext,
) -> ssl.SSLContext:  # fmt: skip
    """Return the TLS context. ``shown``: as ``Certificate.value``, instead of the own key and
    certificate.

    Raises:
        ConfigError: key and certificate do not belong together, or are invalid.
    """
    context = kind(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # The name of an identity is free text, and may be "master.kvstore".
    context.hostname_checks_common_name = False
    if is_server:
        context.num_tickets = 0  # a resumed session presents no certificate, which may have expired
    try:
        context.load_verify_locations(cadata=pems.authorities.decode("ascii"))
        load_chain(context, *(shown or pems[:2]))
    except (ssl.SSLError, OSError, ValueError) as error:
        mismatch = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        what = "do not belong together" if mismatch else f"cannot be used: {error}"
        raise ConfigError(f"the key and the certificate of auth {what}", key="auth") from None
    return context


def refusal_of(pems: PemBundle, name: str = "") -> str:
    """Return the reason why peers with the same CAs refuse the certificate, found by a handshake
    with itself; "": they accept it. ``name``: of the server; "": a client.

    Raises:
        ConfigError: key and certificate do not belong together, or are invalid.
    """
    client, server = _loaded(pems), _loaded(pems, is_server=True)
    if name:
        server.verify_mode = ssl.CERT_NONE
    else:
        client.check_hostname = False
        client.verify_mode = ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    of_client = client.wrap_bio(to_client, to_server, server_hostname=name or None)
    of_server = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (of_client, of_server, of_client, of_server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        return getattr(error, "verify_message", "") or str(error)
    return ""


def key_file(path: str) -> Path:
    """Return the file that contains the key."""
    return Path(path, "tls.key") if os.path.isdir(path) else Path(path)


def read(path: str, *, check_mode: bool = True) -> PemBundle:
    """Read the PEM data of a file or folder.

    Raises:
        ConfigError: it cannot be read, others may read it, or it is not complete.
    """
    contents = [read_file(file, "auth") for file in _files(path)]
    if len(contents) > 1:
        key, chain, authorities = contents
    else:
        chain, *after = _AUTHORITIES.split(contents[0], maxsplit=1)
        key, authorities = chain, b"".join(after)
    if check_mode:
        check_mode_of(key_file(path))
    pems = PemBundle(
        b"".join(_KEY.findall(key)),
        b"".join(_CERTIFICATE.findall(chain)),
        b"".join(_CERTIFICATE.findall(authorities)),
    )
    if not pems.key and b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in key:
        raise ConfigError(
            f"the key of auth {path} has a passphrase, which a process cannot enter",
            advice="openssl pkey -in tls.key -out new.key takes it away (easy-rsa: nopass).",
            key="auth",
        )
    for what, found in zip(("key", "certificate", "authority's certificate"), pems, strict=True):
        if not found:
            raise ConfigError(
                f"auth {path} has no {what}",
                advice="kvstore auth issue writes such files; a folder needs tls.key, tls.crt and "
                "ca.crt.",
                key="auth",
            )
    return pems


def check_mode_of(path: Path, setting: str = "auth") -> None:
    """Raise ConfigError if other users may read the key. Its group may: Kubernetes mounts secrets
    with mode 440 for the group of a pod."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigError(
            f"{setting} {path} cannot be read: {error.strerror}", key=setting
        ) from None
    if mode & stat.S_IRWXO:
        raise ConfigError(
            f"every user of this host may read {path}, which has a key",
            advice=f"chmod 600 {path}; if others have used this host meanwhile, issue it anew.",
            key=setting,
        )


def _files(path: str) -> list[Path]:
    place = Path(path)
    names = ("tls.key", "tls.crt", "ca.crt")
    return [place / name for name in names] if os.path.isdir(path) else [place]
