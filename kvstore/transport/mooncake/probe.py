"""Installed parts of the transfer engine, for ``kvstore doctor``; starts no engine."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from typing import Final, Literal, NamedTuple

from kvstore.errors import TransferEngineError
from kvstore.transport.mooncake.engine import (
    PACKAGE,
    find_package,
    import_engine,
    library_contains,
    rdma_devices,
)

VERBS: Final = Path("/dev/infiniband")

_PROTOCOLS: Final = {"tcp": "TcpTransport", "rdma": "RdmaTransport"}
_METADATA: Final = {
    "P2PHANDSHAKE": "SocketHandShakePlugin",
    "etcd://": "EtcdStoragePlugin",
    "http://": "HTTPStoragePlugin",
    "redis://": "RedisStoragePlugin",
}


class ProbeFinding(NamedTuple):
    what: Literal["package", "libraries", "protocols", "metadata", "devices"]
    ok: bool
    found: str
    advice: str = ""
    """Advice unless it is ``ok``."""


def probe() -> list[ProbeFinding]:
    """Check all parts, up to the first missing one. Imports the engine."""
    library = find_package()
    if library is None:
        advice = f"pip install {PACKAGE}"
        return [ProbeFinding("package", False, "not installed", advice)]
    findings = [ProbeFinding("package", True, _version())]
    try:
        import_engine()
    except TransferEngineError as error:
        return [*findings, ProbeFinding("libraries", False, error.message, error.advice)]
    findings.append(ProbeFinding("libraries", True, "complete"))
    protocols = [name for name, kind in _PROTOCOLS.items() if library_contains(library, kind)]
    findings.append(ProbeFinding("protocols", bool(protocols), ", ".join(protocols) or "none"))
    kinds = [name for name, kind in _METADATA.items() if library_contains(library, kind)]
    findings.append(ProbeFinding("metadata", bool(kinds), ", ".join(kinds)))
    findings.append(_devices())
    return findings


def _version() -> str:
    for name in (PACKAGE, "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "of unknown origin"


def _devices() -> ProbeFinding:
    present = rdma_devices()
    if not present:
        return ProbeFinding(
            "devices",
            False,
            "no RDMA device",
            "Use protocol tcp, or load the driver of the RDMA device.",
        )
    verbs = sorted(VERBS.glob("uverbs*")) if VERBS.is_dir() else []
    closed = [device for device in verbs if not os.access(device, os.R_OK | os.W_OK)]
    if closed or not verbs:
        return ProbeFinding(
            "devices",
            False,
            f"{', '.join(present)}, and {', '.join(map(str, closed)) or VERBS} cannot be opened",
            "Join the group of /dev/infiniband, and pass it into the container.",
        )
    return ProbeFinding("devices", True, ", ".join(present))
