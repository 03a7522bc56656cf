"""Generates ``kvstore/v1`` from ``kvstore.calls`` and ``proto/``, and
``kvstore/runtime/etcd/rpc_pb2``.

    python proto/generate.py            write the generated files
    python proto/generate.py --check    compare them with what is committed; 1 when they differ

A class of ``kvstore.calls`` becomes a message of its name (a request: plus ``Request``), fields are
numbered in order, and docstrings become comments. Append new fields.

The generator is grpcio-tools with mypy-protobuf (both of the ``dev`` extra). Its version is pinned:
code of a newer one does not run on the oldest supported protobuf.
"""

from __future__ import annotations

import argparse
import enum
import importlib.metadata
import importlib.resources
import re
import sys
import tempfile
import textwrap
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Final

sys.path[0] = str(Path(__file__).resolve().parents[1])  # the kvstore next to this file has no code

from kvstore.calls import clients, locations, nodes, operators, usage
from kvstore.calls.described import field_texts
from kvstore.calls.field_constraints import RowCount
from kvstore.limits import Key, Namespace
from kvstore.wire.codec import BY_HAND
from kvstore.wire.messages import CALLS
from kvstore.wire.node_messages import OF_MASTER, OF_NODE

GENERATOR = "1.73.1"
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
PACKAGES = (Path("kvstore/v1"), Path("kvstore/runtime/etcd"))
GENERATED = ("*_pb2.py*", "*.proto")

FILES: Final[dict[str, tuple[ModuleType, ...]]] = {
    "client": (locations, clients),
    "node": (nodes,),
    "admin": (operators, usage),
}
"""The modules of ``kvstore.calls`` for each file."""

SCALARS: Final[dict[Any, str]] = {
    bool: "bool", bytes: "bytes", int: "uint64", str: "string", Key: "bytes", Namespace: "string",
}  # fmt: skip


def proto_lines(file: str) -> Iterator[str]:
    """Yield the lines of one of ``FILES``."""
    modules = FILES[file]
    names = ", ".join(module.__name__ for module in modules)
    yield f"// Written by proto/generate.py from {names}."
    yield 'syntax = "proto3";\n\npackage kvstore.v1;\n\nimport "kvstore/v1/common.proto";'
    if file == "node":
        yield 'import "kvstore/v1/client.proto";'
        for envelope, kinds in (("NodeMessage", OF_NODE), ("MasterMessage", OF_MASTER)):
            yield f"\nmessage {envelope} {{\n  oneof message {{"
            for number, (kind, name) in enumerate(kinds.items(), 1):
                yield f"    {kind.__name__} {name} = {number};"
            yield "  }\n}"
    else:
        yield 'import "kvstore/v1/client.proto";\n' if file == "admin" else ""
        yield f"service {file.capitalize()}Service {{"
        for call in CALLS.values():
            if sys.modules[call.request.__module__] in modules:
                yield from _comment(field_texts(call.request)[""], "  ")
                yield f"  rpc {call.name}({call.name}Request) returns ({call.reply.__name__});"
        yield "}"
    for module in modules:
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                yield from _enum(kind) if issubclass(kind, enum.Enum) else _message(kind)


def _message(kind: Any) -> Iterator[str]:
    if kind in BY_HAND:  # defined in common.proto
        return
    texts, hints = field_texts(kind), typing.get_type_hints(kind, include_extras=True)
    yield ""
    if kind not in CALLS:
        yield from _comment(texts[""])
    yield f"message {kind.__name__}{'Request' if kind in CALLS else ''} {{"
    for number, name in enumerate(kind._fields, 1):
        written = _type(hints[name], kind._field_defaults.get(name))
        absent = "empty" if written in ("bytes", "string") else "absent"
        text = re.sub("^None", absent.capitalize(), texts.get(name, "")).replace("None", absent)
        yield from _comment(text, "  ")
        yield f"  {written} {name} = {number};"
    yield "}"


def _enum(kind: type[enum.Enum]) -> Iterator[str]:
    texts = field_texts(kind)
    prefix = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).upper()
    yield ""
    yield from _comment(texts[""])
    yield f"enum {kind.__name__} {{"
    if all(field.value for field in kind):
        yield f"  {prefix}_UNSPECIFIED = 0;"
    for field in kind:
        yield from _comment(texts.get(field.name, ""), "  ")
        yield f"  {prefix}_{field.name} = {field.value};"
    yield "}"


def _type(hint: Any, default: object = None) -> str:
    """Return the type of a field. Numbers without ``RowCount`` are bytes: one per key, and
    small."""
    base, *rules = typing.get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
    if typing.get_origin(base) is Sequence:
        (item,) = typing.get_args(base)
        rows = next((rule for rule in rules if isinstance(rule, RowCount)), None)
        if item is Key:
            return "Keys"
        if item is not int:
            return f"repeated {_type(item)}"
        if rows is None:
            return "bytes"
        return "repeated fixed64" if default == () and not rows.like else "Column"
    if typing.get_origin(base) in (typing.Union, UnionType):
        base = typing.get_args(base)[0]
    return SCALARS.get(base) or str(base.__name__)


def _comment(text: str, indent: str = "") -> Iterator[str]:
    begin = f"{indent}// "
    yield from textwrap.wrap(text, 100, initial_indent=begin, subsequent_indent=begin)


def generate(target: Path) -> list[Path]:
    """Write the files below ``target``; return their relative paths."""
    from grpc_tools import protoc

    version = importlib.metadata.version("grpcio-tools")
    if version != GENERATOR:
        raise SystemExit(f"grpcio-tools {version} is installed; install grpcio-tools=={GENERATOR}")
    (target / PACKAGES[0]).mkdir(parents=True, exist_ok=True)
    for file in FILES:
        lines = "\n".join(proto_lines(file))
        (target / PACKAGES[0] / f"{file}.proto").write_text(lines + "\n")
    names = [
        str(path.relative_to(root))
        for root in (SOURCES, target)
        for path in _in_packages(root, "*.proto")
    ]
    plugin = Path(sys.executable).with_name("protoc-gen-mypy")
    arguments = [
        "protoc",
        f"-I{SOURCES}",
        f"-I{target}",
        f"-I{importlib.resources.files('grpc_tools') / '_proto'}",
    ]
    arguments += [f"--plugin=protoc-gen-mypy={plugin}", f"--python_out={target}"]
    arguments += [f"--mypy_out=quiet:{target}", *names]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    return [path.relative_to(target) for path in _in_packages(target, *GENERATED)]


def _in_packages(root: Path, *patterns: str) -> list[Path]:
    folders = [root / package for package in PACKAGES]
    return sorted(
        path for folder in folders for pattern in patterns for path in folder.glob(pattern)
    )


def differing() -> list[Path]:
    """Return generated files that are missing, superfluous or outdated."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {path: (Path(folder) / path).read_bytes() for path in generate(Path(folder))}
    there = {path.relative_to(ROOT) for path in _in_packages(ROOT, *GENERATED)}
    return sorted(
        path
        for path in there | fresh.keys()
        if path not in there or (ROOT / path).read_bytes() != fresh.get(path)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate kvstore/v1 and etcd's messages.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = differing()
    for path in stale:
        sys.stderr.write(f"{path} is not what its sources say: run python proto/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
