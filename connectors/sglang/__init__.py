"""A storage back-end of SGLang's HiCache: keeps host pages in a store (docs/engines/sglang.md).

    --enable-hierarchical-cache --hicache-storage-backend dynamic
    --hicache-storage-backend-extra-config '{"backend_name": "kvstore",
        "module_path": "kvstore.connectors.sglang", "class_name": "KVStoreHiCache",
        "interface_v1": 1, "hicache_storage_pass_prefix_keys": true, "master": "10.0.0.7:50001"}'

* ``backend.py``: ``KVStoreHiCache``, which SGLang calls
* ``pools.py``: the pages of a host pool as memory
* ``fingerprint.py``: the description of an engine, from which namespaces follow
"""

from kvstore.connectors.sglang.backend import KVStoreHiCache

__all__ = ["KVStoreHiCache"]
