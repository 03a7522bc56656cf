"""Sphinx's settings for the documentation site; ``build.py`` prepares what it reads.

Everything that a page loads is part of the site: it can be read without a network.
"""

from __future__ import annotations

from typing import Any

from kvstore._version import __version__

project = "kvstore"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "index"
smartquotes = False  # --host is no dash

html_theme = "furo"
html_title = f"kvstore {release}"
html_favicon = "icon.svg"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

copybutton_exclude = ".linenos, .gp, .go"  # not the prompt

myst_heading_anchors = 4
"""Anchors as GitHub makes them, on which links between pages rely."""

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 80


def literal(
    _app: object, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Docstrings indent an example below a sentence, without the ``::`` of reStructuredText."""
    before = ""
    out: list[str] = []
    for line in lines:
        if before and not out[-1].strip() and _depth(line) > _depth(before) and line.strip():
            out += ["::", ""] if not before.endswith("::") else []
            before = ""  # the block goes on until the text is as far left as before
        elif line.strip() and (before or not line.startswith(" ")):
            before = line
        out.append(line)
    lines[:] = out


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", literal, priority=100)  # before napoleon
