"""Writes the runbook as a page that masters serve: ``python docs/site/runbook.py [--check]``.

``docs/runbook.md`` is its only source. The page is in the package, because it must be there when
nothing else is: without a network, in an installed wheel. It knows as much of Markdown as the
runbook uses, and refuses the rest. ``--check`` writes nothing, and fails if the page is outdated.
"""

from __future__ import annotations

import html
import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCE: Final = ROOT / "docs/runbook.md"
PAGE: Final = ROOT / "kvstore/web/dashboard/page/runbook.html"

HEAD: Final = """<!doctype html>
<!-- by docs/site/runbook.py, from docs/runbook.md -->
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Runbook of kvstore</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="page.css">
</head>
<body>
<main class="runbook">
<p><a href="./">Dashboard</a></p>
"""

UNKNOWN: Final = re.compile(r"[-*+>] |[|<#]|[0-9]+[.)] |```|!\[|===")
"""Beginnings of lines that have a meaning in Markdown and none here."""


def page(source: str) -> str:
    """Raises ValueError: a line is of a kind that is not known here."""
    return HEAD + "".join(f"{each}\n" for each in _blocks(source)) + "</main>\n</body>\n</html>\n"


def _blocks(source: str) -> Iterator[str]:
    for block in re.split(r"\n{2,}", source.strip("\n")):
        lines = block.split("\n")
        title = re.fullmatch(r"(##?) (.+)", block)
        if title is not None:
            level, text = len(title[1]), title[2]
            yield f'<h{level} id="{html.escape(text.lower())}">{_inline(text)}</h{level}>'
        elif all(line.startswith("    ") for line in lines):
            code = "\n".join(line[4:] for line in lines)
            yield f"<pre>{html.escape(code)}</pre>"
        else:
            for line in lines:
                if UNKNOWN.match(line):
                    raise ValueError(f"not known to docs/site/runbook.py: {line}")
            for text in re.split(r"\n(?=\*\*)", block):
                yield f"<p>{_inline(' '.join(text.split()))}</p>"


def _inline(text: str) -> str:
    parts = re.split(r"(`[^`]+`)", text)
    return "".join(
        f"<code>{html.escape(part[1:-1])}</code>" if part.startswith("`") else _words(part)
        for part in parts
    )


def _words(text: str) -> str:
    text = html.escape(text, quote=False)
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", _link, text)
    text = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", text)
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)


def _link(found: re.Match[str]) -> str:
    """A link within the page; of another file its name, because masters do not serve it."""
    text, target = found.groups()
    if target.startswith("#"):
        return f'<a href="{target}">{text}</a>'
    path = posixpath.normpath(posixpath.join("docs", target.partition("#")[0]))
    return f"<code>{path}</code>" if path.endswith(f"/{text}") else f"{text} (<code>{path}</code>)"


def main(*arguments: str) -> int:
    new = page(SOURCE.read_text())
    if PAGE.exists() and PAGE.read_text() == new:
        return 0
    if "--check" in arguments:
        sys.stderr.write(f"{PAGE.relative_to(ROOT)}: make reference writes it anew\n")
        return 1
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
