"""The two ways to use this store from LMCache. docs/engines/lmcache.md says how to configure them.

* ``adapter.py``: ``KVStoreL2Adapter``, the second level of LMCache's daemon (``lmcache server``)
* ``remote.py``: ``KVStoreConnectorAdapter``, the remote storage of LMCache inside an engine;
  ``chunks.py`` puts and gets its objects
* ``identity.py``: the namespaces of both, one for each meaning that bytes can have
* ``locks.py``: keeps leased what the daemon has looked up and not loaded yet
* ``memory.py``: names of objects, and LMCache's memory as arrays of bytes

Each of the two is imported only when it is used, because each needs another half of LMCache.
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
