"""Makes and checks certificates. Needs ``cryptography``, which only ``kvstore auth`` needs:
``kvstore.auth.authority`` imports this module when it is used.

Keys are of the curve P-256, signatures ECDSA with SHA-256. An authority may have one authority
below itself, which is the next one while both are in use (``crossed``).
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvstore.auth.credentials import MASTER_NAME, NODE_NAME, Pems
from kvstore.auth.identity import MASTER, NODE, SCHEME
from kvstore.auth.ledger import Wanted
from kvstore.errors import ConfigError
from kvstore.network.addresses import is_address

AUTHORITY_DAYS: Final = 3_650
EARLIER: Final = timedelta(minutes=10)
"""How much earlier than now certificates begin: clocks of hosts differ."""

NUMBER_BITS: Final = 64

Key = ec.EllipticCurvePrivateKey


class Signer(NamedTuple):
    """An authority with its key."""

    key: Key
    certificate: x509.Certificate
    crossed: tuple[x509.Certificate, ...]
    """Its certificate as the authority before it has signed it, while that is in use."""
    authorities: tuple[x509.Certificate, ...]
    """What peers are to trust, the newest first."""

    def __repr__(self) -> str:
        return "Signer(...)"  # it has a key


class Leaf(NamedTuple):
    number: str
    since: datetime
    until: datetime
    pems: Pems


def new_number() -> int:
    """Always sixteen hexadecimal digits."""
    return secrets.randbits(NUMBER_BITS - 1) | 1 << (NUMBER_BITS - 1)


def new_authority(cluster: str, now: datetime) -> Signer:
    key = ec.generate_private_key(ec.SECP256R1())
    # Two authorities of a cluster differ in their names, too: they are looked for by name.
    name = [x509.NameAttribute(NameOID.COMMON_NAME, f"kvstore authority {secrets.token_hex(4)}")]
    if cluster:
        name.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, cluster))
    until = now + timedelta(days=AUTHORITY_DAYS)
    certificate = _authority(x509.Name(name), key, None, key, 1, now, until)
    return Signer(key, certificate, (), (certificate,))


def next_authority(old: Signer, now: datetime) -> Signer:
    """A new authority that peers who trust only ``old`` accept, too."""
    new = new_authority(cluster_of(old.certificate), now)
    until = min(until_of(new.certificate), until_of(old.certificate))
    crossed = _authority(new.certificate.subject, new.key, old.certificate, old.key, 0, now, until)
    return new._replace(crossed=(crossed,), authorities=(new.certificate, old.certificate))


def _authority(
    name: x509.Name,
    key: Key,
    issuer: x509.Certificate | None,
    signing: Key,
    below: int,
    now: datetime,
    until: datetime,
) -> x509.Certificate:
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.subject if issuer is not None else name)
        .public_key(key.public_key())
        .serial_number(new_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=True, path_length=below), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()),
            critical=False,
        )
    )
    return builder.sign(signing, SHA256())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def issue(signer: Signer, wanted: Wanted, now: datetime) -> Leaf:
    """A key, and its certificate. It ends with its authority at the latest."""
    key = ec.generate_private_key(ec.SECP256R1())
    serial = new_number()
    number = f"{serial:x}"
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(wanted.identity(number).uri)]
    if MASTER in wanted.roles:
        names.append(x509.DNSName(MASTER_NAME))
    if NODE in wanted.roles:
        names.append(x509.DNSName(NODE_NAME))
    names += map(_host, wanted.hosts)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if wanted.serves:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    common = wanted.name.encode()[:64].decode(errors="ignore")  # a common name has 64 bytes
    since = (now - EARLIER).replace(microsecond=0)
    until = min(now + timedelta(days=wanted.days), until_of(signer.certificate))
    until = until.replace(microsecond=0)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)]))
        .issuer_name(signer.certificate.subject)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(since)
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key()),
            critical=False,
        )
        .sign(signer.key, SHA256())
    )
    pems = Pems(_pem_of_key(key), pem([certificate, *signer.crossed]), pem(signer.authorities))
    return Leaf(number, since, until, pems)


def _host(host: str) -> x509.GeneralName:
    return x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host)


# --- PEM ------------------------------------------------------------------------------------------


def pem(certificates: Iterable[x509.Certificate]) -> bytes:
    return b"".join(each.public_bytes(Encoding.PEM) for each in certificates)


def _pem_of_key(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def pems_of(signer: Signer) -> Pems:
    return Pems(
        _pem_of_key(signer.key),
        pem([signer.certificate, *signer.crossed]),
        pem(signer.authorities),
    )


def signer_of(pems: Pems) -> Signer:
    """Raises ConfigError."""
    certificate, *crossed = loaded(pems.chain)
    try:
        key = load_pem_private_key(pems.key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError("the authority's key cannot be read") from None
    if not isinstance(key, Key) or not belongs(pems.key, certificate):
        raise ConfigError("the authority's key and certificate do not belong together")
    return Signer(key, certificate, tuple(crossed), tuple(loaded(pems.authorities)))


def loaded(pem: bytes) -> list[x509.Certificate]:
    """Raises ConfigError."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"a certificate cannot be read: {error}") from None


# --- looking at them ------------------------------------------------------------------------------


def cluster_of(certificate: x509.Certificate) -> str:
    found = certificate.subject.get_attributes_for_oid(NameOID.ORGANIZATION_NAME)
    return str(found[0].value) if found else ""


def shown_name(certificate: x509.Certificate) -> str:
    """The name of an authority for people: ``kvstore authority 3f0a91c2 (prod)``."""
    name = common_name(certificate) or certificate.subject.rfc4514_string()
    cluster = cluster_of(certificate)
    return f"{name} ({cluster})" if cluster else name


def until_of(certificate: x509.Certificate) -> datetime:
    return certificate.not_valid_after_utc


def since_of(certificate: x509.Certificate) -> datetime:
    return certificate.not_valid_before_utc


def number_of(certificate: x509.Certificate) -> str:
    return f"{certificate.serial_number:x}"


def uris_of(certificate: x509.Certificate) -> list[str]:
    """The names of identities; those of others are left out."""
    return [each for each in _names(certificate, x509.UniformResourceIdentifier)
            if each.startswith(SCHEME)]  # fmt: skip


def hosts_of(certificate: x509.Certificate) -> list[str]:
    return [
        *_names(certificate, x509.DNSName),
        *map(str, _names(certificate, x509.IPAddress)),
    ]


def _names(
    certificate: x509.Certificate,
    kind: type[x509.UniformResourceIdentifier | x509.DNSName | x509.IPAddress],
) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [str(each) for each in names.get_values_for_type(kind)]


def common_name(certificate: x509.Certificate) -> str:
    found = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else ""


def may_connect(certificate: x509.Certificate) -> bool:
    """Whether its uses allow to show it as a client. Without any all are allowed."""
    return _may(certificate, ExtendedKeyUsageOID.CLIENT_AUTH)


def may_serve(certificate: x509.Certificate) -> bool:
    """Whether its uses allow to show it as a server. Without any all are allowed."""
    return _may(certificate, ExtendedKeyUsageOID.SERVER_AUTH)


def _may(certificate: x509.Certificate, use: x509.ObjectIdentifier) -> bool:
    try:
        uses = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except (x509.ExtensionNotFound, ValueError):
        return True
    return use in uses or ExtendedKeyUsageOID.ANY_EXTENDED_KEY_USAGE in uses


def belongs(key: bytes, certificate: x509.Certificate) -> bool:
    """Whether this is the key of the certificate."""
    try:
        public = load_pem_private_key(key, None).public_key()
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return False
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    return public.public_bytes(*form) == certificate.public_key().public_bytes(*form)


def signed_by(
    certificate: x509.Certificate,
    between: Sequence[x509.Certificate],
    authorities: Sequence[x509.Certificate],
) -> x509.Certificate | None:
    """The authority that the certificate leads to, over at most those ``between``."""
    for authority in authorities:
        if _is_signed(certificate, authority):
            return authority
    for each in between:
        rest = [other for other in between if other is not each]
        if _is_signed(certificate, each) and (found := signed_by(each, rest, authorities)):
            return found
    return None


def _is_signed(certificate: x509.Certificate, by: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(by)
    except (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm):
        return False
    return True


def utc_now() -> datetime:
    return datetime.now(UTC)
