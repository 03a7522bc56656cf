"""Mooncake Store's Python interface on this store, for engines that import ``mooncake.store``.

* ``store.py``: ``MooncakeDistributedStore``, Mooncake's client
* ``tensors.py``: its methods for torch tensors
* ``objects.py``: puts and gets by Mooncake's keys and by address
* ``put_sessions.py``: objects that are put in parts
* ``mooncake_types.py``: Mooncake's return codes, enumerations and small classes

``kvstore.connectors.mooncake_shim`` makes ``import mooncake.store`` find this package.
"""

from kvstore.connectors.mooncake.mooncake_types import (
    BufferHandle,
    ExistOptions,
    MooncakeHostMemAllocator,
    ObjectDataType,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    bind_to_numa_node,
)
from kvstore.connectors.mooncake.store import MooncakeDistributedStore

__all__ = [
    "BufferHandle",
    "ExistOptions",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "bind_to_numa_node",
]
