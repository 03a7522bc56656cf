"""The store as a back-end of LMCache's daemon; docs/engines/lmcache.md has its configuration.

* ``adapter.py``: ``KVStoreL2Adapter``, the second level of the daemon (``lmcache server``)
* ``namespaces.py``: the namespaces of its objects
* ``locks.py``: keeps leases between the daemon's lookup and its load
* ``conversions.py``: names of objects, and LMCache's memory as arrays of bytes
"""

from kvstore.connectors.lmcache.adapter import KVStoreL2Adapter

__all__ = ["KVStoreL2Adapter"]
