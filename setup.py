"""Compiled extensions: the primitives in C, and the master's state by mypyc.

Without a compiler, or if mypyc fails, kvstore is installed as pure Python; ``KVSTORE_NATIVE=0 pip
install .`` skips compilation.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import tempfile
import tomllib
import traceback
from pathlib import Path
from typing import cast

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

for name in ("master", "client", "connectors"):  # a source distribution has no links
    link = Path("kvstore", name)
    if not link.exists():
        link.symlink_to(f"../{name}")

WANTED = os.environ.get("KVSTORE_NATIVE") != "0"
STATE = "kvstore/master/state"

MYPY = """
[mypy]
ignore_missing_imports = True
follow_imports = skip
[mypy-kvstore.calls.*,kvstore.errors,kvstore.runtime.histograms,kvstore.native.packed_keys,kvstore.limits,kvstore.memory.header,kvstore.calls.no_space_messages]
follow_imports = normal
[mypy-kvstore.native.*,kvstore.master.state.*]
follow_imports = normal
"""
"""Modules of other packages need no types; torch's alone would take a minute."""

STEPS = Extension(
    "kvstore.native._native",
    ["kvstore/native/_native.c"],
    depends=sorted(str(path) for path in Path("kvstore/native").rglob("*.h")),
    extra_compile_args=["-O3"],
    optional=True,
)


def compiled_state() -> list[Extension]:
    compiled = runpy.run_path("kvstore/native/compiled.py")
    library = compiled["library_name"](STATE)
    for outdated in Path(STATE).glob("of_*__mypyc*"):
        if not outdated.name.startswith(library):
            outdated.unlink()
    with tempfile.NamedTemporaryFile("w", suffix=".ini") as config:
        config.write(MYPY)
        config.flush()
        try:
            from mypyc.build import mypycify

            made = mypycify(
                [f"--config-file={config.name}", *map(str, compiled["modules"](STATE))],
                group_name=f"{STATE.replace('/', '.')}.{library}",
                opt_level="2",
                debug_level="0",
            )
        except (ImportError, SystemExit):  # mypyc raises the latter on failure
            traceback.print_exc()
            sys.stderr.write(f"{STATE} is not compiled, and runs as it is\n")
            return []
    extensions = cast("list[Extension]", made)
    for extension in extensions:
        extension.optional = True
    return extensions


class Build(build_ext):
    """Runs mypyc once, only for a real build: pip also runs this file for metadata."""

    def run(self) -> None:
        self.distribution.ext_modules = [STEPS, *compiled_state()]
        self.swig_opts = None  # restored: all extensions are visited again
        self.finalize_options()
        super().run()


def first_page() -> str:
    """Return README for a package index, with relative links replaced by links to ``Source`` of
    ``project.urls``, or by text if that is unknown."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    source = project.get("urls", {}).get("Source", "")
    text = Path("README.md").read_text()
    if not source:
        text = re.sub(r"!\[[^]]*\]\([^)]*\)\n\n", "", text)
        return re.sub(r"\[([^]]*)\]\((?!\w+:)[^)]*\)", r"\1", text)
    return re.sub(r"\]\((?!\w+:)", f"]({source}/raw/HEAD/", text)


# Written by ``make dist`` (docs/site/manual.py); a build from a clone has none.
PAGES = sorted(str(path) for path in Path("docs/man").glob("*.1"))


def deployed() -> list[tuple[str, list[str]]]:
    """Return files for operators by folder; the programs that generate them are not installed."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path("deploy").rglob("*")):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            found.setdefault(f"share/kvstore/{path.parent}", []).append(str(path))
    return list(found.items())


setup(
    long_description=first_page(),
    long_description_content_type="text/markdown",
    ext_modules=[STEPS] if WANTED else [],
    data_files=[
        *deployed(),
        *([("share/man/man1", PAGES)] if PAGES else []),
    ],
    cmdclass={"build_ext": Build},
)
