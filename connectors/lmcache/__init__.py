"""This store behind LMCache's daemon. docs/engines/lmcache.md says how to configure it.

* ``adapter.py``: ``KVStoreL2Adapter``, the second level of the daemon (``lmcache server``)
* ``identity.py``: the namespaces of its objects, one for each meaning that bytes can have
* ``locks.py``: keeps leased what the daemon has looked up and not loaded yet
* ``memory.py``: names of objects, and LMCache's memory as arrays of bytes
"""

from kvstore.connectors.lmcache.adapter import KVStoreL2Adapter

__all__ = ["KVStoreL2Adapter"]
