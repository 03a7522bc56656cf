"""Writes the manual pages: ``python docs/site/manual.py [OUT]``; without OUT, into ``docs/man``,
from where a build of the package takes them.

A page is the help of a command in the language of ``man``: the command writes it itself, into a
formatter of its own. ``SOURCE_DATE_EPOCH`` is the date of the pages; without it they have none.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click
from reference import all_commands

from kvstore._version import __version__
from kvstore.cli.options import sentence

OUT: Final = Path(__file__).resolve().parents[1] / "man"
SECTIONS: Final = {"Example": "EXAMPLES", "Examples": "EXAMPLES", "Exit codes": "EXIT STATUS"}
"""How a paragraph of an epilog begins, and the section that it is."""
NOTES: Final = "NOTES"
"""The section of the other ones."""


def roff(text: str) -> str:
    """The text, escaped so that no character of it is an instruction."""
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq")
    text = text.replace("^", "\\(ha").replace("~", "\\(ti").replace("`", "\\(ga")
    text = re.sub(r"[^\x00-\x7f]", lambda at: f"\\[u{ord(at[0]):04X}]", text)
    return re.sub(r"^\.", r"\\&.", text, flags=re.MULTILINE)


class Roff(click.HelpFormatter):
    """Writes a help as a manual page."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__()
        epoch = os.environ.get("SOURCE_DATE_EPOCH")
        date = f"{datetime.fromtimestamp(int(epoch), UTC):%Y-%m-%d}" if epoch else ""
        self.write(f'.TH {roff(name.upper())} 1 "{date}" "kvstore {__version__}"\n')
        self.write_heading("Name")
        self.write(f"{roff(name)} \\- {roff(what)}\n")
        self._has_lists = False

    def write_heading(self, heading: str) -> None:
        self._section = heading.upper()
        self._is_fresh = True
        self.write(f".SH {roff(self._section)}\n")

    def write_paragraph(self) -> None:
        """Sections stand apart by themselves."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        self.write_heading("Synopsis")
        self.write(f"\\fB{roff(prog)}\\fR {roff(args)}\n")
        self.write_heading("Description")

    def write_text(self, text: str) -> None:
        text = re.sub(r"\n(?=Exit codes:)", "\n\n\b\n", inspect.cleandoc(text))
        for paragraph in re.split(r"\n\n+", text):
            self._write_one(paragraph)

    def _write_one(self, paragraph: str) -> None:
        is_as_it_stands = paragraph.startswith("\b\n")
        paragraph = paragraph.removeprefix("\b\n").strip("\n")
        head, colon, rest = paragraph.partition(":")
        if self._has_lists:
            section = SECTIONS.get(head, NOTES) if colon else NOTES
            if section != self._section:
                self.write_heading(section)
            if section != NOTES:
                paragraph = inspect.cleandoc(rest.strip("\n"))
        if not self._is_fresh:
            self.write(".PP\n")
        self._is_fresh = False
        if is_as_it_stands:
            self.write(f".nf\n{roff(paragraph)}\n.fi\n")
        else:
            self.write(f"{roff(' '.join(paragraph.split()))}\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], *_: int, **__: int) -> None:
        self._has_lists = True
        for term, text in rows:
            self.write(f".TP\n{_term(term)}\n{roff(' '.join(text.split()))}\n")


def _term(term: str) -> str:
    """Flags and names of commands are bold, what they take is italic."""
    first, *others = term.split(" ")
    words = [f"\\fB{roff(first)}\\fR"]
    words += [f"\\f{'B' if other.startswith('-') else 'I'}{roff(other)}\\fR" for other in others]
    return " ".join(words)


def pages() -> Iterator[tuple[str, str]]:
    """Yields the name of each page, such as ``kvstore-put.1``, and its content."""
    for path, command in all_commands():
        name = path.replace(" ", "-")
        context = click.Context(command, info_name=path, **command.context_settings)
        formatter = Roff(name, sentence(command).rstrip("."))
        command.format_help(context, formatter)
        above = name.rpartition("-")[0] if " " in path else ""
        if above:
            formatter.write_heading("See also")
            formatter.write(f"\\fB{roff(above)}\\fR(1)\n")
        yield f"{name}.1", formatter.getvalue()


def main(out: str = "") -> int:
    folder = Path(out) if out else OUT
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.1"):
        old.unlink()
    for name, page in pages():
        (folder / name).write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
