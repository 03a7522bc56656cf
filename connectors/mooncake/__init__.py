"""The Python interface of Mooncake Store, over this store: what engines that know Mooncake import
from ``mooncake.store``.

* ``store.py``: ``MooncakeDistributedStore``, its client
* ``tensors.py``: its methods for torch tensors
* ``sessions.py``: objects that are put and got part by part
* ``names.py``: its codes, enumerations and small classes

How ``import mooncake.store`` comes to find this: ``kvstore.mooncake``.
"""

from kvstore.connectors.mooncake.names import (
    BufferHandle,
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
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "bind_to_numa_node",
]
