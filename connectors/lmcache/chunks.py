"""Puts and gets the chunks of LMCache inside an engine, as objects of the store.

An object is LMCache's bytes followed by LMCache's own description of them (``RemoteMetadata``),
whatever ``save_chunk_meta`` says. So a chunk of any length, serialized or not, comes back as it
was. On an error a get is a miss, and a put is left undone; the guard logs when the store keeps
failing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from lmcache.utils import CacheEngineKey
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat, MemoryObj
from lmcache.v1.protocol import RemoteMetadata, get_remote_metadata_bytes
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend
from numpy.typing import NDArray

from kvstore.calls import PutOutcome
from kvstore.connectors.engine.guard import Deadline, Guard, slices
from kvstore.connectors.lmcache.identity import ChunkNamespaces
from kvstore.connectors.lmcache.memory import (
    layout_of,
    memory_of,
    name_of,
    release,
    text_of,
)
from kvstore.errors import KVStoreError

log: Final = logging.getLogger("kvstore.lmcache")


class Chunks:
    """The chunks of one model. Threads: any."""

    def __init__(
        self,
        guard: Guard,
        memory: LocalCPUBackend,
        model: str,
        full: RemoteMetadata,
        *,
        model_id: str | None,
        more: Mapping[str, object],
    ) -> None:
        """
        Args:
            memory: the memory in which gets allocate.
            full: LMCache's description of a chunk of full length.
            model_id, more: as for ``ChunkNamespaces``.
        """
        self._guard = guard
        self._client = guard.client
        self._memory = memory
        self._model = model
        self._full = full
        self._layout = layout_of(tuple(full.shapes), tuple(full.dtypes))
        self._description_bytes = int(get_remote_metadata_bytes())
        self._namespaces = ChunkNamespaces(guard.client, log, model_id=model_id, more=more)
        self._namespace()  # begins to read the weights, so that later calls find the result

    def sizes(self, keys: Sequence[CacheEngineKey]) -> list[int | None]:
        """Per key the bytes of its object, which is now leased, or None: a miss, or an error."""
        namespace = self._namespace()
        if namespace is not None:
            try:
                return Deadline(self._guard).lookup(_names(keys), namespace)
            except KVStoreError as error:
                log.debug("%s", error)
        return [None] * len(keys)

    def keys(self) -> list[str]:
        """LMCache's names of the stored objects, without those whose key is only a digest. Raises
        KVStoreError."""
        namespace = self._namespace()
        if namespace is None:
            return []
        texts = (text_of(row.key) for row in self._client.list_objects(namespace=namespace))
        return [text for text in texts if text is not None]

    def put(self, keys: Sequence[CacheEngineKey], memories: Sequence[MemoryObj]) -> None:
        """Puts as many of the first chunks as there is room for."""
        namespace = self._namespace()
        if namespace is None:
            return
        parts = [[memory_of(memory), _description(memory)] for memory in memories]
        values = dict(zip(_names(keys), parts, strict=True))
        deadline = Deadline(self._guard)
        try:
            for some in slices(list(values.items())):
                outcomes = deadline.run(
                    lambda ms, some=some: self._client.put_many(  # type: ignore[misc]
                        some, namespace=namespace, partial=True, timeout_ms=ms
                    ),
                    size=_size([value for _, value in some]),
                )
                if PutOutcome.NO_SPACE in outcomes:
                    return
        except KVStoreError as error:
            log.debug("some of %d chunks not put: %s", len(keys), error)

    def get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Per key its chunk, in memory of LMCache that the caller owns, or None: a miss, an error,
        or no free memory."""
        names = _names(keys)
        allocated: dict[int, MemoryObj] = {}
        found: dict[int, MemoryObj] = {}
        namespace = self._namespace()
        if namespace is not None:
            deadline = Deadline(self._guard)
            try:
                self._allocate_all(deadline, namespace, names, allocated)
                for some in slices(list(allocated)):
                    memories = {index: allocated[index] for index in some}
                    found |= self._read_into(deadline, namespace, names, memories)
            except KVStoreError as error:
                log.debug("%s", error)
            finally:
                release([each for index, each in allocated.items() if index not in found])
        return [found.get(index) for index in range(len(keys))]

    def remove(self, key: CacheEngineKey) -> bool:
        """Removes a chunk; returns whether there was one."""
        namespace = self._namespace()
        if namespace is None:
            return False
        [name] = _names([key])
        try:
            return self._guard.run(
                lambda ms: self._client.remove(name, namespace=namespace, timeout_ms=ms)
            )
        except KVStoreError as error:
            log.debug("%s", error)
            return False

    def close(self) -> None:
        """Closes the client: calls under way in other threads fail."""
        self._namespaces.stop()
        self._client.close()
        self._namespaces.join()

    # --- steps --------------------------------------------------------------------------------

    def _namespace(self) -> str | None:
        return self._namespaces.of(self._model, self._layout)

    def _allocate_all(
        self,
        deadline: Deadline,
        namespace: str,
        names: Sequence[bytes],
        allocated: dict[int, MemoryObj],
    ) -> None:
        """Fills ``allocated``: memory for each stored object, by index. Raises KVStoreError."""
        own = self._description_bytes
        chunks: dict[int, RemoteMetadata] = {}
        others: list[tuple[int, int]] = []
        for index, size in enumerate(deadline.lookup(names, namespace)):
            if size == self._full.length + own:
                chunks[index] = self._full
            elif size is not None and size > own:
                others.append((index, size - own))
        for some in slices(others):
            chunks |= self._descriptions(deadline, namespace, names, some)
        for index, chunk in chunks.items():
            if (memory := self._allocate(chunk)) is not None:
                allocated[index] = memory

    def _descriptions(
        self,
        deadline: Deadline,
        namespace: str,
        names: Sequence[bytes],
        places: Sequence[tuple[int, int]],
    ) -> dict[int, RemoteMetadata]:
        """Reads the descriptions of chunks, given by index and length; returns by index those that
        LMCache can have put. Raises KVStoreError."""
        own = self._description_bytes
        read = [np.empty(own, np.uint8) for _ in places]
        ranges = [[(length, into)] for (_, length), into in zip(places, read, strict=True)]
        sizes = deadline.run(
            lambda ms: self._client.get_ranges(
                [names[index] for index, _ in places], ranges, namespace=namespace, timeout_ms=ms
            )
        )
        return {
            index: chunk
            for (index, length), into, size in zip(places, read, sizes, strict=True)
            if size == length + own and (chunk := _read(into, length)) is not None
        }

    def _allocate(self, chunk: RemoteMetadata) -> MemoryObj | None:
        if chunk.fmt == MemoryFormat.BINARY_BUFFER:
            return BytesBufferMemoryObj(bytearray(chunk.length))
        # Does not wait until memory is given back: computing the chunk takes less time.
        memory = self._memory.allocate(chunk.shapes, chunk.dtypes, chunk.fmt, busy_loop=False)
        if memory is not None and memory.get_size() != chunk.length:
            release([memory])
            return None
        return memory

    def _read_into(
        self,
        deadline: Deadline,
        namespace: str,
        names: Sequence[bytes],
        allocated: Mapping[int, MemoryObj],
    ) -> dict[int, MemoryObj]:
        """Reads into ``allocated``; returns its entries that were read. Raises KVStoreError."""
        own = self._description_bytes
        buffers = [[memory_of(each), np.empty(own, np.uint8)] for each in allocated.values()]
        read = deadline.run(
            lambda ms: self._client.get_into(
                [names[index] for index in allocated], buffers, namespace=namespace, timeout_ms=ms
            ),
            size=_size(buffers),
        )
        return {
            index: memory
            for (index, memory), buffer, size in zip(allocated.items(), buffers, read, strict=True)
            if size == _size([buffer]) and np.array_equal(buffer[1], _description(memory))
        }


def _names(keys: Sequence[CacheEngineKey]) -> list[bytes]:
    return [name_of(key.to_string()) for key in keys]


def _size(parts: Sequence[Sequence[NDArray[Any]]]) -> int:
    return sum(part.nbytes for each in parts for part in each)


def _description(memory: MemoryObj) -> NDArray[np.uint8]:
    described = RemoteMetadata(
        memory.get_size(), memory.get_shapes(), memory.get_dtypes(), memory.get_memory_format()
    )
    return np.frombuffer(described.serialize(), np.uint8)


def _read(description: NDArray[np.uint8], length: int) -> RemoteMetadata | None:
    """The description of an object of ``length`` bytes; None: this LMCache cannot have put it."""
    try:
        chunk = RemoteMetadata.deserialize(description.tobytes())
    except (ValueError, LookupError):
        return None
    return chunk if chunk.length == length else None
