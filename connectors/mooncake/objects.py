"""Puts and gets by Mooncake's keys, from and into memory at addresses. Errors are codes."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, starmap
from typing import Any, Final, TypeVar

import numpy as np

from kvstore.calls import Placements, PutOutcome
from kvstore.client.client import Client
from kvstore.client.values import Payload, Storable
from kvstore.connectors.common.guarded_client import GuardedClient, slices
from kvstore.connectors.mooncake.mooncake_types import BufferHandle, Code, ReplicateConfig, code_of
from kvstore.errors import BufferMismatchError, ClosedError, KVStoreError, ValueTooLargeError
from kvstore.limits import KEY_BYTES_MAX, REPLICAS_MAX
from kvstore.native import steps

log = logging.getLogger("kvstore.mooncake")

_OUTCOMES: Final = {
    PutOutcome.STORED: Code.OK,
    PutOutcome.FOUND: Code.OK,
    PutOutcome.BEING_WRITTEN: Code.OK,  # as in Mooncake: the same content will soon be stored
    PutOutcome.NO_SPACE: Code.NO_AVAILABLE_HANDLE,
    PutOutcome.REFUSED: Code.TRANSFER_FAIL,
}

ResultT = TypeVar("ResultT")
Found = list[memoryview] | Code
"""Host memory at some addresses, or the code of an error."""


def any_overlap(runs: Iterable[tuple[Iterable[int], Iterable[int]]]) -> bool:
    """Return whether any two memory ranges overlap, given by lists of addresses and sizes."""
    spans = sorted((at, at + size) for run in runs for at, size in zip(*run, strict=False) if size)
    return any(stop > start for (_, stop), (start, _) in pairwise(spans))


class ObjectAccess:
    """The objects of one client. Without a client every call is INVALID_PARAMS. Threads: any."""

    def __init__(self, guard: GuardedClient | None) -> None:
        self._guard = guard

    def close(self) -> None:
        if self._guard is not None:
            self._guard.client.close()

    @property
    def is_connected(self) -> bool:
        return self._guard is not None

    def client(self) -> Client:
        """Raises ClosedError."""
        return self._guarded().client

    def _guarded(self) -> GuardedClient:
        if self._guard is None:
            raise ClosedError("the store is not set up, or closed")
        return self._guard

    def run(self, call: Callable[[Client, int], ResultT], *, size: int = 0) -> ResultT:
        """As ``call``, but raises KVStoreError."""
        guard = self._guarded()
        return guard.run(lambda timeout_ms: call(guard.client, timeout_ms), size=size)

    def call(self, call: Callable[[Client, int], ResultT], *, size: int = 0) -> ResultT | Code:
        """Return the result of ``call(client, timeout_ms)``, which transfers ``size`` bytes, or its
        error."""
        return _coded(lambda: self.run(call, size=size))

    def run_logged(self, call: Callable[[], object]) -> Code:
        """Make a call and return its code; log an error."""
        try:
            call()
        except KVStoreError as error:
            log.error("%s", error)  # noqa: TRY400  # the message says it all
            return code_of(error)
        return Code.OK

    def payloads(
        self, pointers: Sequence[Sequence[int]], sizes: Sequence[Sequence[int]]
    ) -> list[Payload | Code]:
        """Return for each key the memory at its addresses, of the host or of a device, which the
        caller keeps allocated. Empty if there are not as many pointers as sizes."""
        if len(pointers) != len(sizes):
            return []
        return [self._payload(*each) for each in zip(pointers, sizes, strict=True)]

    def payloads_of(self, pointers: Sequence[int], sizes: Sequence[int]) -> list[Payload | Code]:
        """As ``payloads``, with one address per key."""
        return self.payloads([(pointer,) for pointer in pointers], [(size,) for size in sizes])

    def _payload(self, pointers: Sequence[int], sizes: Sequence[int]) -> Payload | Code:
        if len(pointers) != len(sizes):
            return Code.INVALID_PARAMS
        return _coded(lambda: self.client().payload_at(pointers, sizes))

    def memories_of(self, pointers: Sequence[int], sizes: Sequence[int]) -> list[Found]:
        """As ``payloads_of``, for host memory only."""
        if len(pointers) != len(sizes):
            return []
        return [self.memory((at,), (size,)) for at, size in zip(pointers, sizes, strict=True)]

    def memory(self, pointers: Sequence[int], sizes: Sequence[int]) -> Found:
        if len(pointers) != len(sizes):
            return Code.INVALID_PARAMS
        spans = [(start, size) for start, size in zip(pointers, sizes, strict=True) if size]
        return _coded(lambda: list(starmap(self.client().memory_at, spans)))

    def put(
        self,
        keys: Sequence[str],
        values: Sequence[Storable | Code],
        config: ReplicateConfig | None,
        *,
        overwrite: bool = False,
    ) -> list[int]:
        """Put the values that are not codes; return per key 0 or a code. If a key occurs twice, its
        first value counts; with ``overwrite``, its last one."""
        if len(keys) != len(values):
            return [Code.INVALID_PARAMS] * len(keys)
        wanted: dict[bytes, Storable] = {}
        names = names_of(keys)
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, Code) and name and (overwrite or name not in wanted):
                wanted[name] = value
        replicas = None if config is None else _replicas(config)
        outcomes: dict[bytes, int] = {}
        for some in slices(list(wanted.items())):
            outcomes |= self._put_some(some, replicas, overwrite)
        return [
            value if isinstance(value, Code) else outcomes.get(name, Code.INVALID_PARAMS)
            for name, value in zip(names, values, strict=True)
        ]

    def _put_some(
        self, items: Sequence[tuple[bytes, Storable]], replicas: int | None, overwrite: bool
    ) -> dict[bytes, int]:
        try:
            outcomes = self.run(
                lambda client, ms: client.put_many(
                    items, replicas=replicas, overwrite=overwrite, partial=True, timeout_ms=ms
                ),
                size=sum(_size(value) for _, value in items),
            )
        except KVStoreError as error:
            if isinstance(error, ValueTooLargeError) and len(items) > 1:  # other items may fit
                each = [self._put_some([item], replicas, overwrite) for item in items]
                return {name: code for one in each for name, code in one.items()}
            log.debug("%s", error)
            return dict.fromkeys((name for name, _ in items), code_of(error))
        codes = [_OUTCOMES[outcome] for outcome in outcomes]
        return dict(zip((name for name, _ in items), codes, strict=True))

    def get_into(self, keys: Sequence[str], buffers: Sequence[Payload | Code]) -> list[int]:
        host = [part for buffer in buffers if isinstance(buffer, list) for part in buffer]
        if len(keys) != len(buffers) or steps.overlap(host) is not None:
            return [Code.INVALID_PARAMS] * len(keys)
        codes: list[int] = [
            buffer if isinstance(buffer, Code) else Code.OBJECT_NOT_FOUND for buffer in buffers
        ]
        wanted = [
            (index, name, memory)
            for index, (name, memory) in enumerate(zip(names_of(keys), buffers, strict=True))
            if name and not isinstance(memory, Code)
        ]
        for some in slices(wanted):
            read = self._get_some([name for _, name, _ in some], [memory for *_, memory in some])
            for (index, *_), code in zip(some, read, strict=True):
                codes[index] = code
        return codes

    def _get_some(self, names: list[bytes], memories: list[Payload]) -> list[int]:
        try:
            read = self.run(
                lambda client, ms: client.get_into(names, memories, timeout_ms=ms),
                size=sum(map(_size, memories)),
            )
        except BufferMismatchError as error:
            if len(names) == 1:
                return [code_of(error)]
            pairs = zip(names, memories, strict=True)
            return [self._get_some([name], [memory])[0] for name, memory in pairs]
        except KVStoreError as error:
            log.debug("%s", error)
            return [code_of(error)] * len(names)
        return [Code.OBJECT_NOT_FOUND if size is None else size for size in read]

    def get_ranges(
        self, key: str, pointers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> list[int]:
        """Return per range the bytes read, or a code. A range that fails does not affect the
        others."""
        code = self.get_range(key, pointers, sizes, offsets)
        if code >= 0:
            return list(sizes)
        if code != Code.INVALID_PARAMS or len(sizes) <= 1 or any_overlap([(pointers, sizes)]):
            return [code] * len(sizes)
        each = zip(pointers, sizes, offsets, strict=True)
        return [self.get_range(key, [at], [size], [offset]) for at, size, offset in each]

    def get_range(
        self, key: str, pointers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> int:
        """Read ranges of an object; return the total bytes read, or a code."""
        ranges = self.ranges(pointers, sizes, offsets)
        if isinstance(ranges, Code):
            return ranges
        found = self.call(
            lambda client, ms: client.get_ranges(name_of(key), ranges, timeout_ms=ms),
            size=sum(sizes),
        )
        if isinstance(found, Code):
            return found
        return Code.OBJECT_NOT_FOUND if found[0] is None else sum(sizes)

    def ranges(
        self, pointers: Sequence[int], sizes: Sequence[int], offsets: Sequence[int]
    ) -> list[tuple[int, memoryview]] | Code:
        """Return the offset of each range that is not empty, and its memory; or a code."""
        memory = self.memory(pointers, sizes)
        if isinstance(memory, Code):
            return memory
        if len(offsets) != len(sizes):
            return Code.INVALID_PARAMS
        starts = [offset for offset, size in zip(offsets, sizes, strict=True) if size]
        return list(zip(starts, memory, strict=True))

    def lookup(self, keys: Sequence[str]) -> list[int | None] | Code:
        """Return per key the size of its payload, or None. Objects found are leased."""
        return self._call_for_each(
            keys, lambda client, names, ms: client.lookup(names, timeout_ms=ms), None
        )

    def are_stored(self, keys: Sequence[str], *, lease: bool = True) -> list[bool] | Code:
        """Return per key whether its object is stored. With ``lease`` those found are leased."""
        return self._call_for_each(
            keys,
            lambda client, names, ms: client.exists_many(names, lease=lease, timeout_ms=ms),
            False,
        )

    def _call_for_each(
        self,
        keys: Sequence[str],
        call: Callable[[Client, Sequence[bytes], int], list[ResultT]],
        absent: ResultT,
    ) -> list[ResultT] | Code:
        """Return per key the result of ``call(client, names, timeout_ms)``; ``absent`` for empty
        keys."""
        names = names_of(keys)
        asked = names if all(names) else [name for name in names if name]
        told = self.call(
            lambda client, ms: [each for some in slices(asked) for each in call(client, some, ms)]
        )
        if isinstance(told, Code) or asked is names:
            return told
        by_name = dict(zip(asked, told, strict=True))
        return [by_name.get(name, absent) for name in names]

    def remove(self, keys: Sequence[str]) -> list[int]:
        names = names_of(keys)
        codes: dict[bytes, int] = {}
        for some in slices([name for name in dict.fromkeys(names) if name]):
            codes |= zip(some, self._remove_some(some), strict=True)
        return [codes.pop(name, Code.OBJECT_NOT_FOUND) for name in names]

    def _remove_some(self, names: Sequence[bytes]) -> list[int]:
        removed = self.call(lambda client, ms: client.remove_many(names, timeout_ms=ms))
        if isinstance(removed, Code):
            return [removed] * len(names)
        return [Code.OK if was_there else Code.OBJECT_NOT_FOUND for was_there in removed]

    def placed(self, name: bytes) -> Placements | None:
        """Return the locations of the object's copies; None: it has none, or an error occurred."""
        stat = self.call(lambda client, ms: client.stat(name, timeout_ms=ms))
        if stat is None or isinstance(stat, Code):
            return None
        return stat.detail.placements if stat.detail.placements.segments else None

    def handles(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        sizes = self.lookup(keys)
        if isinstance(sizes, Code):
            return [None] * len(keys)
        arrays = [None if size is None else np.empty(size, np.uint8) for size in sizes]
        buffers: list[Found] = [
            Code.OBJECT_NOT_FOUND if array is None else [array.data] for array in arrays
        ]
        read = self.get_into(keys, buffers)
        return [
            None if array is None or code < 0 else BufferHandle.of(array[:code])
            for array, code in zip(arrays, read, strict=True)
        ]


def _coded(call: Callable[[], ResultT]) -> ResultT | Code:
    """Return the result of a call, or the code of its error."""
    try:
        return call()
    except KVStoreError as error:
        log.debug("%s", error)
        return code_of(error)


def names_of(keys: Iterable[str | bytes]) -> list[bytes]:
    """Return the store's keys. Raises TypeError, also for a single key instead of a list."""
    if isinstance(keys, str | bytes):
        raise TypeError(f"expected a list of keys, not {keys!r}")
    return [name_of(key) for key in keys]


def name_of(key: str | bytes) -> bytes:
    """Return the store's key for Mooncake's. A long name is truncated, and ends with its digest.

    Raises TypeError: the key is neither a str nor bytes.
    """
    try:
        text = isinstance(key, str)
        name = key.encode(errors="surrogateescape") if text else bytes(memoryview(key))  # type: ignore[union-attr,arg-type]
    except (TypeError, UnicodeEncodeError):
        raise TypeError(f"a key is a str or bytes, not {key!r}") from None
    if len(name) <= KEY_BYTES_MAX:
        return name
    digest = b"#sha256:" + hashlib.sha256(name).hexdigest().encode()
    return name[: KEY_BYTES_MAX - len(digest)] + digest


def _replicas(config: ReplicateConfig) -> int:
    """Return the number of copies in memory: one if all were requested elsewhere. 0 is invalid."""
    elsewhere = config.nof_replica_num + config.dfs_replica_num
    return min(config.replica_num or min(elsewhere, 1), REPLICAS_MAX)


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return int(value.nbytes)
