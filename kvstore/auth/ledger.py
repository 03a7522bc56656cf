"""What an authority has issued: one row per certificate, without keys, as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore.auth.files import SECRET, write_whole
from kvstore.auth.identity import ALL, ENGINE, MASTER, NODE, Identity, identity
from kvstore.errors import ConfigError

FORMAT: Final = 1
VALID, EXPIRED, REVOKED = "valid", "expired", "revoked"


class Wanted(NamedTuple):
    """What a certificate is to say."""

    name: str
    roles: tuple[str, ...]
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ALL
    hosts: tuple[str, ...] = ()
    """Names and addresses at which browsers and Prometheus find the process."""
    days: int = 365

    def identity(self, number: str = "") -> Identity:
        """Raises InvalidArgumentError: there can be no such identity."""
        return identity(
            self.name, self.roles, reads=self.reads, writes=self.writes, nodes=self.nodes,
            number=number,
        )  # fmt: skip

    @property
    def serves(self) -> bool:
        """Whether others connect to it."""
        return not {MASTER, NODE}.isdisjoint(self.roles)

    @property
    def shown_namespaces(self) -> str:
        """Patterns, and of one that may not be both read and written, which it is."""
        if ENGINE not in self.roles:
            return "-"
        both = [each for each in self.reads if each in self.writes]
        only = [f"{each} (read)" for each in self.reads if each not in both]
        only += [f"{each} (write)" for each in self.writes if each not in both]
        return ", ".join([*both, *only]) or "-"


class Row(NamedTuple):
    """One certificate."""

    number: str
    """Its serial number, in hexadecimal."""
    wanted: Wanted
    authority: str
    """Which of the authorities has signed it."""
    since: datetime
    until: datetime
    revoked: datetime | None = None

    def state(self, now: datetime) -> str:
        if self.revoked is not None:
            return REVOKED
        return VALID if now < self.until else EXPIRED

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            **self.wanted._asdict(),
            "authority": self.authority,
            "since": text_of(self.since),
            "until": text_of(self.until),
            "revoked": text_of(self.revoked) if self.revoked else None,
        }


def text_of(moment: datetime) -> str:
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def moment_of(text: str) -> datetime:
    return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)


def load(path: Path) -> list[Row]:
    """
    Raises:
        ConfigError: it cannot be read.
    """
    try:
        content = json.loads(path.read_bytes())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, and this release reads 1")
        return [_row(each) for each in content["issued"]]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no ledger of kvstore auth: {error}", advice="Restore it from a backup."
        ) from None


def save(path: Path, rows: Sequence[Row]) -> None:
    content = {"format": FORMAT, "issued": [row.as_json() for row in rows]}
    write_whole(path, json.dumps(content, indent=1).encode() + b"\n", SECRET)


def _row(fields: dict[str, Any]) -> Row:
    def many(name: str) -> tuple[str, ...]:
        return tuple(map(str, fields[name]))

    wanted = Wanted(
        str(fields["name"]), many("roles"), many("reads"), many("writes"), many("nodes"),
        many("hosts"), int(fields["days"]),
    )  # fmt: skip
    revoked = moment_of(fields["revoked"]) if fields["revoked"] else None
    return Row(
        str(fields["number"]), wanted, str(fields["authority"]),
        moment_of(fields["since"]), moment_of(fields["until"]), revoked,
    )  # fmt: skip


def newest(rows: Iterable[Row]) -> dict[str, Row]:
    """The last certificate of each name."""
    return {row.wanted.name: row for row in rows}
