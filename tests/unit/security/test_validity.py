"""Until when a certificate is valid, and how often a process says that it ends soon."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from kvstore.security import certificates, credentials
from kvstore.security.credentials import Credentials
from kvstore.security.validity import DAY_S, ValidityPeriod, validity_of
from tests.support import identities
from tests.support.identities import ENGINE, content, write


@pytest.fixture(scope="module")
def signer() -> certificates.SigningAuthority:
    return identities.authority()


Valid = Callable[..., str]


@pytest.fixture
def valid(tmp_path: Path, signer: certificates.SigningAuthority) -> Valid:
    """Writes the file of an identity that is valid for a year, which began some days ago."""

    def write_it(days_ago: float, days: int = 365) -> str:
        wanted = ENGINE._replace(days=days)
        return str(write(tmp_path / "e.auth", content(signer, wanted, days_ago=days_ago)))

    return write_it


def certificate(since: datetime, until: datetime, names: int = 1) -> str:
    """One that signs itself. ``names``: so many make the lengths of its parts."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "n" * 60)] * names)
    built = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(since).not_valid_after(until).sign(key, SHA256())
    )  # fmt: skip
    return built.public_bytes(Encoding.PEM).decode()


@pytest.mark.parametrize("names", [1, 3, 8])
@pytest.mark.parametrize(
    "until",
    [
        datetime(2030, 2, 28, 23, 59, 59, tzinfo=UTC),
        datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC),
        datetime(2050, 1, 1, tzinfo=UTC),  # from here on the years have four digits
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),
    ],
)
def test_the_times_are_those_of_the_certificate(until: datetime, names: int) -> None:
    since = datetime(2025, 1, 2, 3, 4, 5, tzinfo=UTC)
    found = validity_of(certificate(since, until, names))
    assert found == ValidityPeriod(since.timestamp(), until.timestamp())


# --- who says it ------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [each.getMessage() for each in caplog.records if "certificate_" in each.getMessage()]
    caplog.clear()
    return lines


@pytest.mark.usefixtures("files_at_once")
def test_a_process_says_it_once_a_day(
    valid: Valid, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(credentials, "uptime", lambda: now)
    found = Credentials(valid(days_ago=345))
    caplog.set_level(logging.WARNING)
    found.warn_if_expiring()
    found.warn_if_expiring()
    [line] = said(caplog)
    assert line.startswith(f"certificate_expires_soon file={found.path} until='20")
    assert " days=19: issue another one" in line
    now += DAY_S - 1
    found.warn_if_expiring()
    assert not said(caplog)
    now += 1
    found.warn_if_expiring()
    assert len(said(caplog)) == 1

    valid(days_ago=366)
    now += DAY_S
    found.warn_if_expiring()
    [line] = said(caplog)
    assert line.startswith("certificate_expired ")

    valid(days_ago=0)
    now += DAY_S
    found.warn_if_expiring()
    assert not said(caplog)
