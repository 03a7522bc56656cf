"""What Sphinx and its theme leave to be done on a page, for phones and for screen readers."""

from __future__ import annotations

import itertools
import re
from typing import Final

TABLE: Final = re.compile(r'<table class="docutils.*?</table>', re.DOTALL)
PARAMETERS: Final = re.compile(r"<dl>\n((?:<dd>.*</dd>\n)+)</dl>")
"""Of a signature: a list of definitions without a term."""

COLUMNS_SIDE_BY_SIDE: Final = 3
"""Columns for which a phone has room."""

SAID: Final = (
    ('<p class="caption" role="heading">', '<p class="caption" role="heading" aria-level="2">'),
    ('<aside class="sidebar-drawer">', '<aside class="sidebar-drawer" aria-label="Site">'),
    ('<aside class="toc-drawer">', '<aside class="toc-drawer" aria-label="This page">'),
    ('<div id="search-results">', '<h1>Search</h1>\n<div id="search-results">'),
)
"""What the theme writes, and with what a screen reader needs to be told."""


def finished(page: str) -> str:
    for written, told in SAID:
        page = page.replace(written, told)
    page = PARAMETERS.sub(lambda found: _parameters(found[1]), page)
    return TABLE.sub(lambda found: _table(found[0]), page)


def _parameters(items: str) -> str:
    return f"<ul>\n{items.replace('<dd>', '<li>').replace('</dd>', '</li>')}</ul>"


def _table(table: str) -> str:
    """An empty head is no head. In a wide table each cell says the head of its column: ``site.css``
    shows a row on a phone as a list of such cells."""
    head, end, body = table.partition("</thead>")
    heads = re.findall(r"<th [^>]*>(.*?)</th>", head, re.DOTALL)
    head = re.sub(r"<th( [^>]*)>(<p></p>)?</th>", r"<td\1></td>", head)
    if len(heads) > COLUMNS_SIDE_BY_SIDE:
        names = [re.sub(r"<[^>]+>", "", each).strip().replace('"', "&quot;") for each in heads]
        of_cells = itertools.cycle(names)
        head = head.replace('class="', 'class="stacks ', 1)
        body = re.sub(r"<td\b", lambda _: f'<td data-head="{next(of_cells)}"', body)
    return head + end + body
