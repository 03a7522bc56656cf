"""What can be wrong with a store: one row for each problem and cause, in ``rows.toml``.

From these rows come the advice of ``kvstore status``, ``kvstore doctor`` and the dashboard, the
alerts of Prometheus (``deploy/generate.py``), and the runbook, which masters serve and
``docs/runbook.md`` contains. ``diagnosis.problems`` has the conditions in a master's status.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any, Final, NamedTuple

from kvstore.calls.no_space_messages import CAUSES as SHORTAGES


class Alert(NamedTuple):
    """An alert of Prometheus, by job: one job is one cluster."""

    severity: str
    """critical, warning or info."""
    expr: str
    summary: str
    """A template of Prometheus."""
    lasts: str = ""
    """How long ``expr`` must hold."""


class Row(NamedTuple):
    name: str
    """Of the alert and of the section of the runbook."""
    means: str
    see_also: str
    advice: str
    """What to do, on one line. Code is between backticks."""
    more: str = ""
    """Further advice, for the runbook alone."""
    alert: Alert | None = None

    @property
    def anchor(self) -> str:
        return self.name.lower()

    @property
    def parts(self) -> Iterator[tuple[str, str]]:
        """The paragraphs of the section of the runbook, with their headings."""
        yield "Means", self.means
        yield "Look at", self.see_also
        yield "Do", f"{self.advice} {self.more}".rstrip()


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
    """bad: something is lost or refused; warning: look at it; note: it was asked for."""
    what: str = ""
    """Of a problem of one node."""
    one: str = ""
    """What the counter of this name counts; empty: it is no counter."""


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
"""Recording rules that the alerts use, by name."""

ROWS: Final = tuple(_row(name, fields) for name, fields in _TABLE["row"].items())

ADVICE: Final = {row.name: row.advice.replace("`", "") for row in ROWS}

CAUSES: Final = {name: CauseRow(**_joined(fields)) for name, fields in _TABLE["cause"].items()}

CHECKS: Final = {name: CheckRow(**_joined(fields)) for name, fields in _TABLE["check"].items()}

PROBLEMS: Final = {
    f"refused_{cause}": ProblemRow(
        "KvstorePutsRefused", f"found no room {{when}}: {why}.", "bad", one="put"
    )
    for cause, (_, _, why) in SHORTAGES.items()
} | {name: ProblemRow(**_joined(fields)) for name, fields in _TABLE["problem"].items()}

PHRASES: Final[dict[str, str]] = _joined(_TABLE["phrases"])

ADVICE_ON_FIELDS: Final[dict[str, str]] = {
    name: " ".join(row["advice"].split())
    for row in _TABLE["differing"]
    for name in row["fields"].split()
}
"""What to do if the descriptions by two connectors differ in a field: by the field's name, or by a
part of the name (``groups.0.block_tokens``)."""
