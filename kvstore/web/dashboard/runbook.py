"""The runbook as a page, made from the rows of ``kvstore.diagnosis``: it needs no network."""

from __future__ import annotations

import html
import re
from typing import Final

from kvstore.diagnosis.rows import ROWS

_HEAD: Final = """<!doctype html>
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
<h1>Runbook</h1>
"""


def page() -> bytes:
    sections = "".join(
        f'<h2 id="{row.anchor}">{row.name}</h2>\n'
        + "".join(f"<p><strong>{name}</strong>: {_inline(text)}</p>\n" for name, text in row.parts)
        for row in ROWS
    )
    return f"{_HEAD}{sections}</main>\n</body>\n</html>\n".encode()


def _inline(text: str) -> str:
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text, quote=False))
    return re.sub(r"\*([^*]+)\*", r"<em>\1</em>", text)
