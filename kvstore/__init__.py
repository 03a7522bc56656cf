"""kvstore: a distributed KV cache store for LLM inference.

    from kvstore import Client

    with Client("127.0.0.1:50001") as client:
        client.put("greeting", tensor)
        tensor = client.get("greeting")

The public API is here and in ``kvstore.errors``. Names are loaded when they are first used, so that
``import kvstore`` imports no torch, grpc or numpy.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from kvstore import errors
from kvstore._version import __version__
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.calls import HintAction, HintOutcome, PutOutcome
    from kvstore.client.async_client import AsyncClient
    from kvstore.client.client import Client
    from kvstore.client.hints import Hint
    from kvstore.client.leases.lease_table import Lease
    from kvstore.config import ClientConfig, MasterConfig, NodeConfig

# gRPC's C core logs failed binds and closed connections to standard error; kvstore raises errors
# for them. gRPC reads this variable at its import. A value set by the program takes precedence.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_HOMES = {
    "AsyncClient": "kvstore.client.async_client",
    "Client": "kvstore.client.client",
    "ClientConfig": "kvstore.config",
    "Hint": "kvstore.client.hints",
    "HintAction": "kvstore.calls",
    "HintOutcome": "kvstore.calls",
    "Lease": "kvstore.client.leases.lease_table",
    "MasterConfig": "kvstore.config",
    "NodeConfig": "kvstore.config",
    "PutOutcome": "kvstore.calls",
}

__all__ = [
    "AsyncClient",
    "Client",
    "ClientConfig",
    "Hint",
    "HintAction",
    "HintOutcome",
    "KVStoreError",
    "Lease",
    "MasterConfig",
    "NodeConfig",
    "PutOutcome",
    "__version__",
    "errors",
]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'kvstore' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
