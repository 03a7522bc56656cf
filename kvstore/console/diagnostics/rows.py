"""Problems, causes and checks: one row for each, in ``rows.toml``.

They supply the advice of ``kvstore status``, ``kvstore doctor`` and the dashboard, the Prometheus
alerts (``deploy/generate.py``), and the runbook, which masters serve and ``docs/runbook.md``
contains. ``diagnosis.problems`` has the conditions in a master's status.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any, Final, NamedTuple

from kvstore.calls.no_space_messages import CAUSES as SHORTAGES


class Alert(NamedTuple):
    """A Prometheus alert, by job: one job is one cluster."""

    severity: str
    """critical, warning or info."""
    expr: str
    summary: str
    """A Prometheus template."""
    lasts: str = ""
    """Minimum time for which ``expr`` must hold."""

    def advice(self, row: Row) -> str:
        """Return the remedy: a template over the causes of refused puts, if it is by cause."""
        if "{{ $labels.cause }}" not in self.summary:
            return row.advice
        return "".join(
            f'{{{{ if eq $labels.cause "{cause}" }}}}{advice}{{{{ end }}}}'
            for cause, (_, advice, _) in SHORTAGES.items()
        )


_BY_CAUSE: Final = " ".join(f"`{cause}`: {row[1].rstrip('.')}." for cause, row in SHORTAGES.items())


class Row(NamedTuple):
    name: str
    """Of the alert and of the runbook's section."""
    means: str
    see_also: str
    advice: str
    """The remedy, on one line. Code is between backticks."""
    more: str = ""
    """Further advice, for the runbook alone."""
    alert: Alert | None = None

    @property
    def anchor(self) -> str:
        return self.name.lower()

    @property
    def parts(self) -> Iterator[tuple[str, str]]:
        """The paragraphs of the runbook's section, with their headings."""
        yield "Means", self.means
        yield "Look at", self.see_also
        yield "Do", f"{self.advice} {self.more}".rstrip().format(shortages=_BY_CAUSE)


class CauseRow(NamedTuple):
    """A cause of ``kvstore why``. Both texts are formatted with ``why.Case.words``."""

    text: str
    advice: str = ""
    code: str = ""
    """For programs; empty: the name of the row."""
    is_problem: bool = True


class CheckRow(NamedTuple):
    """A finding of ``kvstore doctor``. Both texts are formatted with the words of the check."""

    found: str
    advice: str = ""
    state: str = "warning"
    subject: str = ""
    """Empty: the subject of the check."""
    row: str = ""
    """The row of the problem whose advice it has."""


class ProblemRow(NamedTuple):
    """A problem that a master's status shows."""

    row: str
    """The ``Row`` with its advice."""
    text: str
    """Formatted with the words of its condition."""
    level: str = "warning"
    """bad: data is lost or refused; warning: check it; note: it was requested."""
    what: str = ""
    """Text of the problem of one node."""
    one: str = ""
    """Unit of the counter of this name; empty: it is no counter."""
    advice: str = ""
    """The remedy for this cause; empty in the table: that of ``row``."""


def _joined(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        name: " ".join(value.split()) if isinstance(value, str) else value
        for name, value in fields.items()
    }


def _row(name: str, fields: dict[str, Any]) -> Row:
    alert = Alert(**_joined(fields["alert"])) if "alert" in fields else None
    return Row(name, **_joined(fields | {"alert": alert}))


_TABLE: Final = tomllib.loads(
    (resources.files("kvstore.console.diagnostics") / "rows.toml").read_text("utf-8")
)

RECORDS: Final[dict[str, str]] = _joined(_TABLE["records"])
"""Recording rules of the alerts, by name."""

ROWS: Final = tuple(_row(name, fields) for name, fields in _TABLE["row"].items())

ADVICE: Final = {row.name: row.advice.replace("`", "") for row in ROWS}

CAUSES: Final = {name: CauseRow(**_joined(fields)) for name, fields in _TABLE["cause"].items()}

CHECKS: Final = {name: CheckRow(**_joined(fields)) for name, fields in _TABLE["check"].items()}

PROBLEMS: Final = {
    f"refused_{cause}": ProblemRow(
        "KvstorePutsRefused", f"found no room {{when}}: {why}.", "bad", one="put", advice=advice
    )
    for cause, (_, advice, why) in SHORTAGES.items()
} | {
    name: ProblemRow(**{"advice": ADVICE[fields["row"]]} | _joined(fields))
    for name, fields in _TABLE["problem"].items()
}

PHRASES: Final[dict[str, str]] = _joined(_TABLE["phrases"])

ADVICE_ON_FIELDS: Final[dict[str, str]] = {
    name: " ".join(row["advice"].split())
    for row in _TABLE["differing"]
    for name in row["fields"].split()
}
"""Advice for a field in which two fingerprints differ: by the field's name, or by a part of it
(``groups.0.block_tokens``)."""
