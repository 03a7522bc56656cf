"""Until when a certificate is valid, and how often a process says that it ends soon."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from kvstore.auth import certificates, credentials
from kvstore.auth.credentials import Credentials
from kvstore.auth.validity import DAY_S, FOREVER, Validity, validity_of
from kvstore.diagnosis.identity import identity
from kvstore.diagnosis.problems import of_identity
from tests.support import identities
from tests.support.identities import ENGINE, NOW, content, write

DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def signer() -> certificates.Signer:
    return identities.authority()


Valid = Callable[..., str]


@pytest.fixture
def valid(tmp_path: Path, signer: certificates.Signer) -> Valid:
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
    assert found == Validity(since.timestamp(), until.timestamp())


def test_of_a_chain_the_first_that_ends_counts() -> None:
    since = datetime(2025, 1, 1, tzinfo=UTC)
    chain = [certificate(since, since + days * DAY) for days in (90, 30, 3_650)]
    assert validity_of("".join(chain)).until == (since + 30 * DAY).timestamp()


@pytest.mark.parametrize(
    "chain", ["", "-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----"]
)
def test_times_that_cannot_be_read_never_end(chain: str) -> None:
    assert validity_of(chain) == FOREVER
    assert not FOREVER.ends_soon(1e12)


@pytest.mark.parametrize(
    ("days", "left", "soon"),
    [(365, 31, False), (365, 29, True), (365, -1, True), (20, 6, False), (20, 4, True)],
)
def test_what_ends_soon_depends_on_its_whole_time(days: int, left: int, soon: bool) -> None:
    found = Validity(0.0, days * DAY_S)
    assert found.ends_soon((days - left) * DAY_S) is soon


# --- who says it ------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [each.getMessage() for each in caplog.records if "auth_end" in each.getMessage()]
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
    found.remind()
    found.remind()
    [line] = said(caplog)
    assert line.startswith(f"auth_ends_soon file={found.path} until='20")
    assert " days=19: issue another one" in line
    now += DAY_S - 1
    found.remind()
    assert not said(caplog)
    now += 1
    found.remind()
    assert len(said(caplog)) == 1

    valid(days_ago=366)
    now += DAY_S
    found.remind()
    [line] = said(caplog)
    assert line.startswith("auth_ended ")

    valid(days_ago=0)
    now += DAY_S
    found.remind()
    assert not said(caplog)


@pytest.mark.parametrize(
    ("days_ago", "state", "words"),
    [(0, "ok", "is valid until"), (345, "warning", "ends on"), (366, "problem", "has ended on")],
)
def test_the_doctor_says_it(valid: Valid, days_ago: int, state: str, words: str) -> None:
    [found] = identity(valid(days_ago=days_ago))
    assert found.state == state
    assert words in found.found
    assert ("kvstore auth issue" in found.advice) is (state != "ok")


def test_the_dashboard_says_it() -> None:
    now_ms = int(NOW.timestamp() * 1000)
    assert of_identity(None, now_ms) == []
    assert of_identity(_ending_in(15 * DAY_S), now_ms) == []
    [soon] = of_identity(_ending_in(13 * DAY_S), now_ms)
    assert soon.level == "warning"
    assert "ends in 13 d" in soon.text
    [ended] = of_identity(_ending_in(-1), now_ms)
    assert ended.level == "bad"
    assert of_identity(_ending_in(DAY_S // 2, whole_s=DAY_S), now_ms) == []
    assert len(of_identity(_ending_in(DAY_S // 5, whole_s=DAY_S), now_ms)) == 1


def _ending_in(seconds: float, whole_s: float = 365 * DAY_S) -> Validity:
    until = NOW.timestamp() + seconds
    return Validity(until - whole_s, until)
