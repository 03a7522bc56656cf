"""Generates ``kvstore/v1`` and ``kvstore/etcd/rpc_pb2`` from ``proto/kvstore``.

    python proto/generate.py            write the generated modules
    python proto/generate.py --check    compare them with what is committed; 1 when they differ

The generator is grpcio-tools with mypy-protobuf (both of the ``dev`` extra). Its version is pinned:
code that a newer one writes does not run on the oldest protobuf that we allow.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.resources
import sys
import tempfile
from pathlib import Path

GENERATOR = "1.73.1"
ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
PACKAGES = (Path("kvstore/v1"), Path("kvstore/etcd"))


def generate(target: Path) -> list[Path]:
    """Writes the modules below ``target``; returns their paths relative to it."""
    from grpc_tools import protoc

    version = importlib.metadata.version("grpcio-tools")
    if version != GENERATOR:
        raise SystemExit(f"grpcio-tools {version} is installed; install grpcio-tools=={GENERATOR}")
    names = [str(path.relative_to(SOURCES)) for path in _in_packages(SOURCES, "*.proto")]
    plugin = Path(sys.executable).with_name("protoc-gen-mypy")
    arguments = [
        "protoc",
        f"-I{SOURCES}",
        f"-I{importlib.resources.files('grpc_tools') / '_proto'}",
    ]
    arguments += [f"--plugin=protoc-gen-mypy={plugin}", f"--python_out={target}"]
    arguments += [f"--mypy_out=quiet:{target}", *names]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    return [path.relative_to(target) for path in _in_packages(target, "*_pb2.py*")]


def _in_packages(root: Path, pattern: str) -> list[Path]:
    return sorted(path for package in PACKAGES for path in (root / package).glob(pattern))


def differing() -> list[Path]:
    """Generated files that are missing, superfluous or not what the sources say."""
    with tempfile.TemporaryDirectory() as folder:
        fresh = {path: (Path(folder) / path).read_bytes() for path in generate(Path(folder))}
    there = {path.relative_to(ROOT) for path in _in_packages(ROOT, "*_pb2.py*")}
    return sorted(
        path
        for path in there | fresh.keys()
        if path not in there or (ROOT / path).read_bytes() != fresh.get(path)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate Python from proto/.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if not parser.parse_args().check:
        generate(ROOT)
        return 0
    stale = differing()
    for path in stale:
        sys.stderr.write(f"{path} is not what proto/ says: run python proto/generate.py\n")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
