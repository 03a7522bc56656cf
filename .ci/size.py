"""``make size``: how many lines each folder has, beside those that it may have.

``size.json`` beside this file says how many. A folder that has more fails; its figure is raised
only by a commit that says which feature came. ``--lower`` writes the present figures where they
are lower.
Counted are lines of what git knows: sources (with their comments), tests, and words of documents
without the tables that the code owns.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_name("size.json")
SOURCES = {".py", ".c", ".h", ".js", ".css", ".html", ".proto"}
GENERATED = ("kvstore/v1/", "kvstore/etcd/rpc_pb2", "docs/benchmarks/")
TABLES = re.compile(r"<!-- by docs/site/reference.*?<!-- end -->", re.DOTALL)
"""Tables of a page that its generator writes."""
FLAT = ("bench", "master", "connectors", "client", "proto", "tests")
"""Folders that are one figure, whatever is in them."""


NO_PRODUCT = ("bench", "tests", "documents, words", "tools")


def room(path: Path) -> str:
    """The name under which a file is counted; empty: it is not."""
    if path.suffix == ".md":
        return "documents, words"
    if path.suffix not in SOURCES:
        return ""
    if path.parts[0] in FLAT:
        return path.parts[0]
    if path.parts[0] == "kvstore":
        return "/".join(path.parts[:2]) if len(path.parts) > 2 else "kvstore"
    return "tools"


def counted() -> Counter[str]:
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\n")
    sizes: Counter[str] = Counter()
    for name in listed:
        path = ROOT / name
        if not name or name.startswith(GENERATED) or path.is_symlink() or not path.is_file():
            continue
        if where := room(Path(name)):
            text = path.read_text(errors="replace")
            is_page = path.suffix == ".md"
            sizes[where] += len(TABLES.sub("", text).split()) if is_page else text.count("\n")
    return sizes


def main() -> int:
    sizes, allowed = counted(), json.loads(FILE.read_text())
    print(f"{'':22}{'lines':>8}{'allowed':>9}")
    for where in sorted({*sizes, *allowed}):
        size, most = sizes[where], allowed.get(where, 0)
        print(f"{where:22}{size:8,}{most:9,}{'  too many' if size > most else ''}")
    parts = [where for where in sizes if where not in NO_PRODUCT]
    print(f"{'product':22}{sum(sizes[where] for where in parts):8,}")
    if "--lower" in sys.argv:
        lower = {where: min(size, allowed.get(where, size)) for where, size in sizes.items()}
        FILE.write_text(json.dumps(lower, indent=4, sort_keys=True) + "\n")
    return int(any(size > allowed.get(where, 0) for where, size in sizes.items()))


sys.exit(main())
