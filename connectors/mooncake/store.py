"""``MooncakeDistributedStore``: the class of Mooncake's client, on kvstore's client.

Methods return codes (``mooncake_types.Code``) as Mooncake's do, and raise only for arguments of a
wrong type. ``is_exist`` leases the objects found, so that a get after it finds them. A get of a
complete value verifies its checksum.

Memory by address must be registered (``register_buffer``); otherwise the code is
``INVALID_PARAMS``. Complete values can be put from and got into memory of a CUDA device; other
calls reject it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any, Final

import numpy as np

from kvstore.client.client import Client
from kvstore.client.dtypes import is_plain
from kvstore.client.values import Buffer, Storable
from kvstore.config import parse_size
from kvstore.config.base import MASTER_VARIABLE
from kvstore.connectors.common import mooncake_config
from kvstore.connectors.common.guarded_client import GuardedClient, client_of_an_engine
from kvstore.connectors.mooncake.mooncake_types import (
    BufferDescriptor,
    BufferHandle,
    Code,
    ExistOptions,
    MemoryDescriptor,
    MooncakeHostMemAllocator,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    code_of,
)
from kvstore.connectors.mooncake.objects import ObjectAccess, any_overlap, log, name_of, names_of
from kvstore.connectors.mooncake.put_sessions import PutSessions
from kvstore.connectors.mooncake.tensors import TensorMethods
from kvstore.errors import ClosedError, KVStoreError

_DEFAULT_TENANT: Final = "default"
_SEGMENT_BYTES_MIN: Final = 1 << 20


class MooncakeDistributedStore(TensorMethods):
    """Threads: any, after ``setup``. Usable in the child after a fork."""

    def __init__(self) -> None:
        self._objects = ObjectAccess(None)
        self._hostname = ""
        self._sessions = PutSessions()
        self._reading: set[bytes] = set()
        """Keys of the objects of open get sessions."""
        self._registered: set[int] = set()
        """Addresses at which registered memory begins."""
        self._allocator = MooncakeHostMemAllocator()

    def setup(
        self,
        local_hostname: str | Mapping[str, Any] = "",
        metadata_server: str = "",
        global_segment_size: int | str = 0,
        local_buffer_size: int = 0,
        protocol: str = "tcp",
        rdma_devices: str = "",
        master_server_addr: str = "",
        engine: object = None,
        enable_ssd_offload: bool = False,
        ssd_offload_path: str = "",
        tenant_id: str = _DEFAULT_TENANT,
        enable_client_http_server: bool = False,
        client_http_port: int = 9300,
        *,
        config: Mapping[str, Any] | None = None,
    ) -> int:
        """Connect to a master. The first argument may be a dictionary of the others.

        Args:
            local_hostname: the result of ``get_hostname``.
            global_segment_size: bytes that this process contributes, in a child process that ends
                with it; 0: none. Units of a text are binary, as Mooncake's: ``"16MB"`` is 16 MiB.
            master_server_addr: the kvstore master (``host:port``, or ``etcd://...``); empty: that
                of the variable ``KVSTORE_MASTER`` or of a file, as for ``Client``.
            tenant_id: the namespace; ``"default"``: the configured one.
            metadata_server, local_buffer_size, protocol, rdma_devices, engine, and those of the SSD
                tier and the HTTP server: without effect. ``KVSTORE_CLIENT_PROTOCOL`` and
                ``KVSTORE_CLIENT_DEVICE_NAME`` select a transfer engine.

        Returns: 0, or a code, with the reason in the log; ``setup`` can be called again. A second
        ``setup`` before ``close`` fails, because other threads may use the client and its
        registered memory.
        """
        del metadata_server, local_buffer_size, engine, ssd_offload_path, client_http_port
        given = local_hostname if isinstance(local_hostname, Mapping) else config
        if given is not None:
            known = {*mooncake_config.MEANT, *mooncake_config.IGNORED}
            mooncake_config.tell_unknown((key for key in given if key not in known), known, log)
            master_server_addr = given.get("master_server_addr") or given.get(
                "master_server_address", master_server_addr
            )
            global_segment_size = given.get("global_segment_size", global_segment_size)
            tenant_id = given.get("tenant_id", tenant_id)
            protocol = given.get("protocol", protocol)
            rdma_devices = given.get("rdma_devices", rdma_devices)
            enable_ssd_offload = given.get("enable_ssd_offload", enable_ssd_offload)
            name = local_hostname if isinstance(local_hostname, str) else ""
            local_hostname = str(given.get("local_hostname", name))
        if not isinstance(local_hostname, str):
            raise TypeError(f"local_hostname is a str or a dict, not {local_hostname!r}")
        if self._objects.is_connected:
            log.error("setup failed: it is set up already, call close() first")
            return Code.INVALID_PARAMS
        try:
            client = _connected(master_server_addr, _size(global_segment_size), tenant_id)
        except KVStoreError as error:
            log.error("setup failed: %s", error)
            return code_of(error)
        without = {
            f"protocol {protocol}": protocol not in ("", "tcp"),
            "the SSD tier": enable_ssd_offload,
            "the HTTP server": enable_client_http_server,
            "rdma_devices": bool(rdma_devices),
        }
        if ignored := [name for name, is_set in without.items() if is_set]:
            log.info("setup: no effect here: %s", ", ".join(ignored))
        self._hostname = local_hostname
        self._objects = ObjectAccess(GuardedClient(client, log))
        log.info("setup: master %s, namespace %r", client.config.master, client.config.namespace)
        return Code.OK

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """As ``setup``. Every client here uses shared memory where it can, so Mooncake's dummy
        client is an ordinary one. ``server_address`` is the master's."""
        del mem_pool_size, local_buffer_size
        return self.setup(master_server_addr=server_address)

    def close(self) -> int:
        """Close the client, and drop sessions and registrations. Idempotent."""
        self._objects.close()
        self._objects = ObjectAccess(None)
        self._sessions = PutSessions()
        self._reading = set()
        self._registered = set()
        return Code.OK

    def health_check(self) -> int:
        """Return 0: the master answers; 1: not set up, or closed; 2: the master does not answer."""
        try:
            self._objects.run(lambda client, ms: client.status(timeout_ms=ms))
        except ClosedError:
            return 1
        except KVStoreError:
            return 2
        return 0

    def get_hostname(self) -> str:
        return self._hostname

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Register ``size`` bytes of host memory, or of a CUDA device, which the caller keeps
        allocated until ``unregister_buffer``."""
        code = self._objects.run_logged(lambda: self._objects.client().register(buffer_ptr, size))
        if code == Code.OK:
            self._registered.add(buffer_ptr)
        return code

    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Return 0, or INVALID_PARAMS: no registered memory begins there."""
        if buffer_ptr not in self._registered:
            return Code.INVALID_PARAMS
        self._registered.discard(buffer_ptr)
        return self._objects.run_logged(lambda: self._objects.client().unregister(buffer_ptr))

    def alloc_from_mem_pool(self, size: int) -> int:
        """Return the address of ``size`` new bytes, which last as long as this object; 0: they
        cannot be allocated. The caller registers them like any other memory."""
        return self._allocator.alloc(size)

    def put(self, key: str, value: Buffer | bytes, config: ReplicateConfig | None = None) -> int:
        return self._objects.put([key], [_bytes(value)], config)[0]

    def put_parts(
        self, key: str, *args: Buffer | bytes, config: ReplicateConfig | None = None
    ) -> int:
        """Put a value that is the concatenation of the parts."""
        return self._objects.put([key], [_joined(args)], config)[0]

    def put_batch(
        self,
        keys: Sequence[str],
        values: Sequence[Buffer | bytes],
        config: ReplicateConfig | None = None,
    ) -> int:
        """Return 0, or the first other code."""
        return _worst(self._objects.put(keys, [_bytes(value) for value in values], config))

    def put_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        return self.batch_put_from([key], [buffer_ptr], [size], config)[0]

    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Put a value that is the metadata followed by the data."""
        pointers, sizes = [metadata_buffer_ptr, buffer_ptr], [metadata_size, size]
        return self.batch_put_from_multi_buffers([key], [pointers], [sizes], config)[0]

    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Return per key 0 or a code; NO_AVAILABLE_HANDLE for values that do not fit into a full
        pool."""
        return self._objects.put(keys, self._objects.payloads_of(buffer_ptrs, sizes), config)

    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """As ``batch_put_from``; each value is the concatenation of its buffers."""
        return self._objects.put(keys, self._objects.payloads(all_buffer_ptrs, all_sizes), config)

    def upsert(self, key: str, value: Buffer | bytes, config: ReplicateConfig | None = None) -> int:
        """As ``put``, but replaces an existing value."""
        return self._objects.put([key], [_bytes(value)], config, overwrite=True)[0]

    def upsert_parts(
        self, key: str, *args: Buffer | bytes, config: ReplicateConfig | None = None
    ) -> int:
        return self._objects.put([key], [_joined(args)], config, overwrite=True)[0]

    def upsert_batch(
        self,
        keys: Sequence[str],
        values: Sequence[Buffer | bytes],
        config: ReplicateConfig | None = None,
    ) -> int:
        values_all: list[Storable | Code] = [_bytes(value) for value in values]
        return _worst(self._objects.put(keys, values_all, config, overwrite=True))

    def upsert_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        return self.batch_upsert_from([key], [buffer_ptr], [size], config)[0]

    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Sequence[int],
        sizes: Sequence[int],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        memories = self._objects.payloads_of(buffer_ptrs, sizes)
        return self._objects.put(keys, memories, config, overwrite=True)

    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Sequence[int], config: ReplicateConfig | None = None
    ) -> list[int]:
        """Open sessions; return per key 0, OBJECT_ALREADY_EXISTS, or another code. The parts of an
        object are collected in this process; ``batch_put_session_end`` stores it."""
        if len(keys) != len(sizes):
            return [Code.INVALID_PARAMS] * len(keys)
        there = self.batch_is_exist(keys)
        codes: dict[bytes, int] = {}
        results: list[int] = []
        for name, size, found in zip(names_of(keys), sizes, there, strict=True):
            if found == 1 or codes.get(name) == Code.OK:
                results.append(Code.OBJECT_ALREADY_EXISTS)
            else:
                codes[name] = self._sessions.start(name, size)
                results.append(codes[name])
        return results

    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_dst_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Copy each buffer to its offset; return per key the bytes copied, or a code."""
        if not _have_equal_lengths([keys, all_buffer_ptrs, all_sizes, all_dst_offsets]):
            return [Code.INVALID_PARAMS] * len(keys)
        memories = map(self._objects.ranges, all_buffer_ptrs, all_sizes, all_dst_offsets)
        return [
            ranges if isinstance(ranges, Code) else self._sessions.write(name, ranges)
            for name, ranges in zip(names_of(keys), memories, strict=True)
        ]

    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Put the collected objects; return per key 0 or a code. Ends the sessions in any case."""
        ended = [self._sessions.end(name) for name in names_of(keys)]
        values = [Code.INVALID_PARAMS if code is None else code for code in ended]
        return self._objects.put(keys, values, None)

    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        ended = [self._sessions.end(name) for name in names_of(keys)]
        return [Code.INVALID_PARAMS if code is None else Code.OK for code in ended]

    def get(self, key: str) -> bytes:
        """Return the value; ``b""`` on a miss or an error."""
        return self.get_batch([key])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        return [
            b"" if handle is None else handle.tobytes() for handle in self._objects.handles(keys)
        ]

    def get_buffer(self, key: str) -> BufferHandle | None:
        return self._objects.handles([key])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Return per key a new buffer, or None: a miss, or an error."""
        return self._objects.handles(keys)

    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        return self.batch_get_into([key], [buffer_ptr], [size])[0]

    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Sequence[int], sizes: Sequence[int]
    ) -> list[int]:
        """Return per key the bytes read; OBJECT_NOT_FOUND on a miss, INVALID_PARAMS if the value is
        longer than the buffer, or another code. INVALID_PARAMS for all keys if buffers overlap."""
        return self._objects.get_into(keys, self._objects.payloads_of(buffer_ptrs, sizes))

    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """As ``batch_get_into``; the buffers of a key are filled in order."""
        del prefer_alloc_in_same_node
        return self._objects.get_into(keys, self._objects.payloads(all_buffer_ptrs, all_sizes))

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Sequence[Sequence[int]]],
        all_src_offsets: Sequence[Sequence[Sequence[int]]],
        all_sizes: Sequence[Sequence[Sequence[int]]],
    ) -> list[list[list[int]]]:
        """Read ranges of several objects into several buffers. Return per buffer, key and range the
        bytes read, or a code: INVALID_PARAMS if lists differ in length, or if ranges of two keys
        overlap in the buffer."""
        lists: Sequence[Sequence[Any]] = (all_keys, all_dst_offsets, all_src_offsets, all_sizes)
        results = []
        for index, start in enumerate(buffer_ptrs):
            of_buffer = [row[index] if index < len(row) else [] for row in lists]
            is_even = {len(row) for row in lists} == {len(buffer_ptrs)} and _have_equal_lengths(
                of_buffer
            )
            runs: Any = zip(of_buffer[1], of_buffer[3], strict=False)
            if is_even and (len(of_buffer[0]) < 2 or not any_overlap(runs)):
                results.append([self._ranges_of(start, *row) for row in zip(*of_buffer)])
            else:
                refused = max(1, len(of_buffer[0]))
                results.append([[Code.INVALID_PARAMS] for _ in range(refused)])
        return results

    def _ranges_of(
        self,
        start: int,
        key: str,
        targets: Sequence[int],
        offsets: Sequence[int],
        sizes: Sequence[int],
    ) -> list[int]:
        if not _have_equal_lengths([targets, offsets, sizes]):
            return [Code.INVALID_PARAMS] * max(1, len(targets))
        pointers = [start + target for target in targets]
        return self._objects.get_ranges(key, pointers, sizes, offsets)

    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Return per key 0: its object is leased, or OBJECT_NOT_FOUND, or another code. Reading
        ranges then needs no call to the master."""
        sizes = self._objects.lookup(keys)
        if isinstance(sizes, Code):
            return [sizes] * len(keys)
        found = zip(names_of(keys), sizes, strict=True)
        self._reading.update(name for name, size in found if size is not None)
        return [Code.OBJECT_NOT_FOUND if size is None else Code.OK for size in sizes]

    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Sequence[int]],
        all_sizes: Sequence[Sequence[int]],
        all_src_offsets: Sequence[Sequence[int]],
    ) -> list[int]:
        """Read ranges of objects of a get session; return per key the bytes read, or a code."""
        lists = (all_buffer_ptrs, all_sizes, all_src_offsets)
        is_even = _have_equal_lengths([keys, *lists])
        if not is_even or any_overlap(zip(all_buffer_ptrs, all_sizes, strict=True)):
            return [Code.INVALID_PARAMS] * len(keys)
        return [
            self._objects.get_range(key, pointers, sizes, offsets)
            if name_of(key) in self._reading
            else Code.INVALID_PARAMS
            for key, pointers, sizes, offsets in zip(keys, *lists, strict=True)
        ]

    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        self._reading.difference_update(names_of(keys))
        return Code.OK

    def is_exist(self, key: str, options: ExistOptions | None = None) -> int:
        """Return 1 if stored, else 0, also on an error: some callers take other numbers for a
        hit."""
        return max(self.batch_is_exist([key], options)[0], 0)

    def batch_is_exist(self, keys: Sequence[str], options: ExistOptions | None = None) -> list[int]:
        """Return per key 1: stored, and leased so that a get finds it; 0: not stored; -1: an
        error."""
        del options
        return self._exist(keys, lease=True)

    def probe_key(self, key: str) -> int:
        """As ``is_exist``, but without a lease: a get after it may miss. -1: an error."""
        return self.batch_probe_key([key])[0]

    def batch_probe_key(
        self, keys: Sequence[str], policy: str = "none", candidate_size: int = 1
    ) -> list[int]:
        """Return per key 1: stored; 0: not stored; -1: an error. Nothing is leased.

        With the policy ``"LastHitOnly"`` the keys are candidates of ``candidate_size`` keys each.
        The last candidate whose keys are all stored is leased; only its keys are 1.

        Raises:
            ValueError: another policy, or an incomplete candidate.
        """
        if policy not in ("none", "LastHitOnly"):
            raise ValueError(f"policy is {policy!r}, not 'none' or 'LastHitOnly'")
        if candidate_size < 0:
            raise TypeError(f"candidate_size is {candidate_size}, and not a count")
        if policy == "none" or not keys:
            return self._exist(keys, lease=False)
        if not candidate_size or len(keys) % candidate_size:
            raise ValueError(f"{len(keys)} keys are not candidates of {candidate_size} keys each")
        there = self._exist(keys, lease=False)
        if Code.INTERNAL_ERROR in there:
            return there
        return self._leased_last(keys, there, candidate_size)

    def _leased_last(self, keys: Sequence[str], there: list[int], size: int) -> list[int]:
        """Lease the last stored candidate, unless it is removed before that."""
        mask = [0] * len(keys)
        for start in range(len(keys) - size, -1, -size):
            if all(there[start : start + size]):
                leased = self._exist(keys[start : start + size], lease=True)
                if Code.INTERNAL_ERROR in leased:
                    return [Code.INTERNAL_ERROR] * len(keys)
                if all(leased):
                    mask[start : start + size] = leased
                    break
        return mask

    def _exist(self, keys: Sequence[str], *, lease: bool) -> list[int]:
        stored = self._objects.are_stored(keys, lease=lease)
        if isinstance(stored, Code):
            return [Code.INTERNAL_ERROR] * len(keys)
        return [int(there) for there in stored]

    def get_size(self, key: str) -> int:
        sizes = self._objects.lookup([key])
        if isinstance(sizes, Code):
            return sizes
        return Code.OBJECT_NOT_FOUND if sizes[0] is None else sizes[0]

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        return self.batch_get_replica_desc([key]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return the locations of these objects' copies, without keys that have no complete
        object."""
        status = self._objects.call(lambda client, ms: client.status(timeout_ms=ms))
        if isinstance(status, Code):
            return {}
        nodes = status.nodes_by_segment()
        found = {}
        for key in keys:
            placed = self._objects.placed(name_of(key))
            if placed is not None:
                [size], segments = placed.sizes, placed.segments
                found[key] = [_replica(size, nodes.get(segment, "")) for segment in segments]
        return found

    def remove(self, key: str, force: bool = False) -> int:
        """Return 0, OBJECT_NOT_FOUND, or another code. Also removes an object that is being read,
        so ``force`` changes nothing; readers keep its bytes until their lease ends."""
        return self.batch_remove([key], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        del force
        return self._objects.remove(keys)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove objects whose key matches the pattern; return their number, or a code."""
        try:
            pattern = re.compile(regex_pattern)
        except re.error:
            return Code.INVALID_PARAMS

        def matching(client: Client, _: int) -> list[str]:
            rows = client.list_objects(namespace=client.config.namespace)
            keys = (row.key.decode(errors="surrogateescape") for row in rows)
            return [key for key in keys if pattern.search(key)]

        keys = self._objects.call(matching)
        if isinstance(keys, Code):
            return keys
        return self.batch_remove(keys, force).count(Code.OK)

    def remove_all(self, force: bool = False) -> int:
        """Remove every object of the namespace; return their number, or a code."""
        del force
        return self._objects.call(lambda client, _: client.clear(client.config.namespace))

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove these objects; with ``segment_name`` only those with all copies on that node.
        Return the keys of the removed objects."""
        if segment_name:
            held = self.batch_get_replica_desc(keys)
            keys = [
                key
                for key, copies in held.items()
                if all(_node_of(copy) == segment_name for copy in copies)
            ]
        return [
            key for key, code in zip(keys, self.batch_remove(keys), strict=True) if code == Code.OK
        ]


def _size(given: int | str) -> int:
    """Parse a size with binary units. Raises InvalidArgumentError."""
    return parse_size(mooncake_config.size_of(given))


def _connected(master: str, memory: int, tenant: str) -> Client:
    """Return a client whose master answers. Raises KVStoreError, and then leaves no client open."""
    given: dict[str, Any] = {}
    if tenant != _DEFAULT_TENANT:
        given["namespace"] = tenant
    if memory > 0:
        given["memory"] = max(memory, _SEGMENT_BYTES_MIN)
    if master:
        given["master"] = master
        if os.environ.get(MASTER_VARIABLE, master) != master:
            log.warning("setup: %s names another master than the caller's", MASTER_VARIABLE)
    client = client_of_an_engine(**given)
    try:
        client.status()
    except BaseException:
        client.close()
        raise
    return client


def _bytes(value: Buffer | bytes) -> memoryview | Code:
    """Return the bytes of any buffer; INVALID_PARAMS for a masked array, or a buffer of pointers.
    Raises TypeError: not a buffer."""
    data = memoryview(value)  # type: ignore[arg-type]
    if not is_plain(data) or isinstance(value, np.ma.MaskedArray):
        return Code.INVALID_PARAMS
    return data.cast("B") if data.c_contiguous and data.nbytes else memoryview(data.tobytes())


def _joined(parts: Iterable[Buffer | bytes]) -> list[memoryview] | Code:
    several = [_bytes(part) for part in parts]
    plain = [part for part in several if not isinstance(part, Code)]
    return plain if len(plain) == len(several) else Code.INVALID_PARAMS


def _have_equal_lengths(lists: Sequence[Sized]) -> bool:
    return len({len(row) for row in lists}) == 1


def _worst(codes: list[int]) -> int:
    return next((code for code in codes if code), Code.OK)


def _replica(size: int, node: str) -> ReplicaDescriptor:
    memory = MemoryDescriptor(BufferDescriptor(size, node))
    return ReplicaDescriptor(ReplicaStatus.COMPLETE, memory)


def _node_of(copy: ReplicaDescriptor) -> str:
    return copy.get_memory_descriptor().buffer_descriptor.transport_endpoint
