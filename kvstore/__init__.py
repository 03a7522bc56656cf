"""kvstore: a distributed KV cache store for LLM inference.

    from kvstore import Client

    with Client("127.0.0.1:50001") as client:
        client.put("greeting", tensor)
        tensor = client.get("greeting")

Everything public is here or in ``kvstore.errors``. ``import kvstore`` imports no torch, grpc or
numpy: a name is loaded when it is first used.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from kvstore import errors
from kvstore._version import __version__
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.calls import PutOutcome
    from kvstore.client.async_client import AsyncClient
    from kvstore.client.client import Client
    from kvstore.client.leases.lease_table import Lease
    from kvstore.config import ClientConfig, MasterConfig, NodeConfig

# gRPC's C core writes to standard error itself: a port that is taken, which kvstore raises as an
# error, and connections that a server closes. gRPC reads this variable when it is imported. A
# program that sets it, or has imported gRPC before, keeps its own choice.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

_HOMES = {
    "AsyncClient": "kvstore.client.async_client",
    "Client": "kvstore.client.client",
    "ClientConfig": "kvstore.config",
    "Lease": "kvstore.client.leases.lease_table",
    "MasterConfig": "kvstore.config",
    "NodeConfig": "kvstore.config",
    "PutOutcome": "kvstore.calls",
}

__all__ = [
    "AsyncClient",
    "Client",
    "ClientConfig",
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
