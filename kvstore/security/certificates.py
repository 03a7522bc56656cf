"""Certificates of identities: issue and inspection. Requires ``cryptography``, as only ``kvstore
auth`` does. Keys use the curve P-256, signatures ECDSA with SHA-256."""

from __future__ import annotations

import ipaddress
import re
import secrets
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from kvstore.errors import ConfigError, InvalidArgumentError, StartupError
from kvstore.runtime.addresses import is_address
from kvstore.security.credentials import (
    SERVED,
    PemBundle,
    check_mode_of,
    key_file,
    read,
    refusal_of,
)
from kvstore.security.holder_ids import holder_of, shown
from kvstore.security.identity import (
    ALL,
    ENGINE,
    NODE,
    URI_BYTES_MAX,
    Identity,
    identity_of,
    validated_identity,
)

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ModuleNotFoundError:
    raise StartupError(
        "kvstore auth needs cryptography, which is not installed",
        advice="pip install 'cryptography>=44'",
    ) from None

EARLIER: Final = timedelta(minutes=10)
"""Start of validity before the current time: clocks of hosts differ."""

Key = ec.EllipticCurvePrivateKey
PEM: Final = serialization.Encoding.PEM


class CertificateRequest(NamedTuple):
    name: str
    roles: tuple[str, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ALL
    hosts: tuple[str, ...] = ()
    """Names and addresses that browsers and Prometheus use for the process."""
    days: int = 365

    @property
    def serves(self) -> bool:
        """Whether the process is a server."""
        return not SERVED.keys().isdisjoint(self.roles)


class SigningAuthority(NamedTuple):
    """A CA with its key."""

    key: Key
    certificate: x509.Certificate


class IssuedCertificate(NamedTuple):
    """A certificate with its key. The number of ``identity`` is its serial number."""

    identity: Identity
    until: datetime
    pems: PemBundle


def new_ca(now: datetime) -> SigningAuthority:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(f"kvstore authority {secrets.token_hex(4)}")
    until = now + timedelta(days=3_650)
    builder = _builder(name, name, secrets.randbits(63), key, key, now, until, is_ca=True)
    return SigningAuthority(key, builder.sign(key, SHA256()))


def issue(signer: SigningAuthority, wanted: CertificateRequest, now: datetime) -> IssuedCertificate:
    """Create a key and its certificate, which expires with its CA at the latest.

    Raises:
        InvalidArgumentError: the CA has expired, or the request is invalid.
    """
    end = signer.certificate.not_valid_after_utc
    serial = secrets.randbits(63) | 1 << 63  # always sixteen hexadecimal digits
    rights = {"reads": wanted.reads, "writes": wanted.writes, "nodes": wanted.nodes}
    who = validated_identity(wanted.name, wanted.roles, number=f"{serial:x}", **rights)
    _check(wanted, who, has_ended=now >= end)
    key = ec.generate_private_key(ec.SECP256R1())
    until = min(now + timedelta(days=wanted.days), end).replace(microsecond=0)
    subject = _name(who.name.encode()[:64].decode(errors="ignore"))  # 64 bytes at most
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(who.uri)]
    names += [x509.DNSName(name) for role, name in SERVED.items() if role in who.roles]
    names += map(_host, wanted.hosts)
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if wanted.serves:
        uses.append(ExtendedKeyUsageOID.SERVER_AUTH)
    certificate = (
        _builder(subject, signer.certificate.subject, serial, key, signer.key, now, until)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(signer.key, SHA256())
    )
    return IssuedCertificate(
        who, until, PemBundle(pem_of_key(key), pem(certificate), pem(signer.certificate))
    )


def _check(wanted: CertificateRequest, who: Identity, *, has_ended: bool) -> None:
    """Raise InvalidArgumentError if the certificate is impossible or useless."""
    is_engine, patterns = ENGINE in wanted.roles, wanted.reads or wanted.writes
    for is_wrong, what, advice in (
        (has_ended, "the authority has ended",
         "Write another one: kvstore auth init --ca DIR."),
        (len(who.uri) > URI_BYTES_MAX,
         f"its name and patterns take more than {URI_BYTES_MAX} bytes",
         "Give fewer patterns, or shorter ones that end in a star."),
        (is_engine and not patterns, "an engine without a namespace may do nothing",
         "Give --namespace 'PATTERN' (read and write), --read or --write; '*' means all."),
        (patterns and not is_engine, "only engines have namespaces",
         "Add --role engine, or leave out --namespace, --read and --write."),
        (NODE not in wanted.roles and wanted.nodes != ALL, "only nodes have names of nodes",
         "Add --role node, or leave out --node."),
        (wanted.name in SERVED.values(), "every certificate of that role has this name",
         "Give the process a name of its own, such as its host's."),
        (wanted.hosts and not wanted.serves, "nothing connects to it",
         "--host is for masters and nodes."),
    ):  # fmt: skip
        if is_wrong:
            raise InvalidArgumentError(f"{wanted.name}: {what}", advice=advice)


def _host(host: str) -> x509.GeneralName:
    """Return the host as an alternative name. Raises InvalidArgumentError."""
    if is_address(host):
        return x509.IPAddress(ipaddress.ip_address(host))
    is_name = re.fullmatch(r"(\*\.)?[\w-][\w.-]{0,250}", host, re.ASCII)
    if not is_name or host.lower().endswith(".kvstore"):  # *.kvstore are names of roles
        raise InvalidArgumentError(
            f"{host[:80]!r} is neither a host's name nor an address",
            advice="Give each as --host cache-1.example or --host 10.0.0.7, without a port. "
            "Names in .kvstore come from --role alone.",
        )
    return x509.DNSName(host)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name, issuer: x509.Name, serial: int, key: Key, signing: Key,
    now: datetime, until: datetime, *, is_ca: bool = False,
) -> x509.CertificateBuilder:  # fmt: skip
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    usage = x509.KeyUsage(
        digital_signature=not is_ca, key_cert_sign=is_ca, crl_sign=is_ca,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before((now - EARLIER).replace(microsecond=0))
        .not_valid_after(until)
        .add_extension(x509.BasicConstraints(is_ca, 0 if is_ca else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(authority, critical=False)
    )


def pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(PEM)


def pem_of_key(key: Key) -> bytes:
    form = serialization.PrivateFormat.PKCS8
    return key.private_bytes(PEM, form, serialization.NoEncryption())


def signer_of(key: bytes, certificate: bytes) -> SigningAuthority:
    """Raise ConfigError if they cannot be read or do not belong together."""
    [found, *_] = loaded(certificate)
    try:
        read = serialization.load_pem_private_key(key, None)
    except (ValueError, TypeError):
        raise ConfigError("the authority's key cannot be read") from None
    if not isinstance(read, Key) or read.public_key() != found.public_key():
        raise ConfigError("the authority's key and certificate do not belong together")
    return SigningAuthority(read, found)


def loaded(pem: bytes) -> list[x509.Certificate]:
    """Parse certificates. Raises ConfigError."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(f"a certificate cannot be read: {error}") from None


def common_name(name: x509.Name) -> str:
    found = name.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if found else name.rfc4514_string()


def names_of(certificate: x509.Certificate, kind: type[Any]) -> list[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (x509.ExtensionNotFound, ValueError):
        return []
    return [str(name) for name in names.get_values_for_type(kind)]


def inspect(path: str) -> dict[str, Any]:
    """Describe the file of an identity, with its problems, for ``kvstore auth show``.

    Raises:
        ConfigError: it cannot be read, or has no key, certificate or CA.
    """
    pems = read(path, check_mode=False)
    leaf, authorities = loaded(pems.chain)[0], loaded(pems.authorities)
    who, problems = Identity("", frozenset()), []
    try:
        who = identity_of(names_of(leaf, x509.UniformResourceIdentifier))
    except InvalidArgumentError as error:
        problems.append(str(error))
    try:
        if why := refusal_of(pems):
            problems.append(f"servers refuse it: {why}")
        for role, name in SERVED.items():
            if role in who.roles and (why := refusal_of(pems, name)):
                problems.append(f"clients refuse it as a {role}, {name}: {why}")
            if role not in who.roles and common_name(leaf.subject) == name:
                problems.append(f"its common name is that of a {role}: clients take it for one")
        check_mode_of(key_file(path))
    except ConfigError as error:
        problems.append(str(error))
    return {
        "name": who.name,
        "roles": sorted(who.roles),
        "reads": who.reads,
        "writes": who.writes,
        "nodes": who.nodes if NODE in who.roles else (),
        "number": who.number,
        "holder": shown(holder_of(who)) if who.roles else "",
        "since": f"{leaf.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ}",
        "until": f"{leaf.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}",
        "hosts": names_of(leaf, x509.DNSName) + names_of(leaf, x509.IPAddress),
        "signed_by": common_name(leaf.issuer),
        "trusts": [common_name(authority.subject) for authority in authorities],
        "problems": problems,
    }
