"""LMCache's two doors to this store; which classes a user names: docs/engines/lmcache.md.

* ``adapter.py``: ``KVStoreL2Adapter``, the second level of LMCache's daemon (``lmcache server``)
* ``remote.py``: ``KVStoreConnectorAdapter``, the remote storage of LMCache inside an engine; its
  objects: ``chunks.py``
* ``identity.py``: the namespaces of both, by what their bytes mean
* ``locks.py``: the leases under what the daemon has looked up and not loaded yet
* ``memory.py``: names of objects, and the memory that LMCache hands over

Each door imports only its own half of LMCache.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.connectors.lmcache.adapter import KVStoreL2Adapter
    from kvstore.connectors.lmcache.remote import KVStoreConnectorAdapter

_HOMES = {
    "KVStoreConnectorAdapter": "kvstore.connectors.lmcache.remote",
    "KVStoreL2Adapter": "kvstore.connectors.lmcache.adapter",
}

__all__ = ["KVStoreConnectorAdapter", "KVStoreL2Adapter"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(home), name)
