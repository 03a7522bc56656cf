"""A client's attachment to a segment of its own host.

The memory is mapped once to copy from and to. Values that programs read without a copy are in a
second mapping, which the processor cannot write to: torch has no read-only tensors, and a write
into a tensor would change the object for all clients.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from kvstore.memory import header as layout
from kvstore.memory.allocation import RESERVE_BYTES, mmap_error_text
from kvstore.memory.pages import POPULATE_READ, populate
from kvstore.memory.process_memory import address_of
from kvstore.memory.shm_entries import SHM_PREFIX, directories, is_of_a_node, open_shared
from kvstore.runtime.host import SHM_DIRECTORY
from kvstore.runtime.tasks import join_all, start_thread, uninterrupted

_SHOWN: Final[weakref.WeakValueDictionary[int, Any]] = weakref.WeakValueDictionary()
"""The read-only mappings of this process, as arrays of ctypes, by address."""

CLOSE_S: Final = 5.0
"""How long ``close`` waits for the threads that fill page tables: the kernel fills one piece in
milliseconds, and longer only on a host without free memory."""


class Mapping:
    """A client's attachment to a segment on its own host. Threads: any."""

    def __init__(self, mapped: mmap.mmap, superblock: layout.Superblock, fd: int) -> None:
        """Internal: use ``attach`` or ``of``. Takes over ``mapped`` and ``fd``."""
        self._fd = fd
        self.uuid: Final = superblock.uuid
        self.size: Final = superblock.size
        self.memory: Final = memoryview(mapped)
        """All of the segment. It stays mapped as long as there is a reference to it."""
        self.writable: Final = not self.memory.readonly
        self._words = self.memory[: layout.SUPERBLOCK_BYTES].cast("Q")
        self._shown: memoryview | None = None if self.writable else _readable(mapped)
        self._is_shown = not self.writable
        self._showing = threading.Lock()
        self._is_closed = False
        self._populating: list[threading.Thread] = []
        self._start_populating(mapped if self._shown is None else self._shown)

    @classmethod
    def attach(cls, shm_name: str, uuid: bytes) -> Mapping:
        """Maps the entry ``shm_name`` if it is the segment of this ``uuid``. Clients reach other
        segments over the network.

        Page tables are filled in the background (150 ms per GiB of small pages, 1 ms of huge ones),
        because a get that has to fault its pages in runs at a third of its speed and a put at a
        tenth.

        Raises:
            OSError, ValueError: the entry is gone, replaced, another user's, not made by a node, or
                in another container's ``/dev/shm``; ``str`` says it in one line.
        """
        if not shm_name.startswith(SHM_PREFIX) or "/" in shm_name:
            raise ValueError(f"{shm_name!r} is no name of a segment")
        entry = f"{SHM_DIRECTORY}/{shm_name}"
        why: OSError | ValueError = FileNotFoundError(
            f"{entry} is not here: its node has ended, or is in another container"
        )
        for directory in directories():
            path = f"{directory}/{shm_name}"
            try:
                return cls.of(open_shared(path), uuid, path)
            except FileNotFoundError:
                continue
            except PermissionError:
                why = PermissionError(
                    f"{path} belongs to another user; kvstore-node --shm-group lets a group in"
                )
            except (OSError, ValueError) as error:
                why = error
        raise why

    @classmethod
    def of(cls, fd: int, uuid: bytes, what: str = "the memory handed over") -> Mapping:
        """Maps the segment of this ``uuid`` by a descriptor: to read and write, or to read, as it
        was opened. Takes over ``fd``, also if it raises. The rest is as for ``attach``."""
        try:
            superblock = _checked(fd, what, uuid)
            writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            how = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return cls(_mapped(fd, what, superblock.size, how), superblock, fd)
        except BaseException:
            os.close(fd)
            raise

    def readonly_view(self) -> memoryview | None:
        """All of the segment, for values that programs read where they are; mapped at the first
        call. The memoryview says that it is writable, because torch accepts no other. But a write
        ends this process (SIGSEGV), and changes nothing.

        None: this process may not have so many addresses (``ulimit -v``).
        """
        if not self._is_shown:
            uninterrupted(self._show)
        return self._shown

    def _show(self) -> None:
        with self._showing:
            if not self._is_shown and not self._is_closed:
                with contextlib.suppress(OSError):
                    again = _mapped(self._fd, "its memory", self.size, mmap.ACCESS_READ)
                    self._shown = _readable(again)
                    self._start_populating(self._shown)
                self._is_shown = True

    @property
    def generation(self) -> int:
        """The generation of the owner's mount; 0: the owner has closed the segment, or ``close``
        was called. One aligned word: never torn."""
        return 0 if self._is_closed else self._words[layout.GENERATION_OFFSET // 8]

    @property
    def is_current(self) -> bool:
        """Whether the segment still exists: its owner has not closed it, and its file has a name,
        under which its node finds it again."""
        with contextlib.suppress(OSError):  # ``close`` is called meanwhile
            return self.generation != 0 and os.fstat(self._fd).st_nlink > 0
        return False

    def watch(self, generation: int) -> Callable[[], bool]:
        """Returns a function that tells whether the owner's mount still has ``generation``. The
        function keeps the memory mapped."""
        start = layout.GENERATION_OFFSET
        word = self.memory[start : start + 8].cast("Q")
        return lambda: word[0] == generation

    def close(self) -> None:
        """Marks the mapping as closed, and ends its threads. Drop the mapping then: the memory is
        unmapped when no call and no view refers to it. Idempotent."""
        with self._showing:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._fd)
            populating = self._populating.copy()
        join_all(populating, CLOSE_S)

    def close_after_fork(self) -> None:
        """As ``Transport.close_after_fork``: takes no lock."""
        if not self._is_closed:
            self._is_closed = True
            os.close(self._fd)

    def _start_populating(self, mapped: mmap.mmap | memoryview) -> None:
        thread = start_thread("kvstore-populate", partial(self._populate, mapped))
        self._populating.append(thread)

    def _populate(self, mapped: mmap.mmap | memoryview) -> None:
        with contextlib.suppress(OSError):  # then pages are faulted in at their first use
            for start in range(0, self.size, RESERVE_BYTES):
                length = min(RESERVE_BYTES, self.size - start)
                if self._is_closed or not populate(mapped, start, length, POPULATE_READ):
                    return


def _checked(fd: int, what: str, uuid: bytes) -> layout.Superblock:
    """
    Raises:
        OSError, ValueError: it is not the segment of this ``uuid``, as a node has made it.
    """
    superblock = layout.unpack_superblock(os.pread(fd, layout.SUPERBLOCK_BYTES, 0))
    if superblock is None or superblock.uuid != uuid:
        raise ValueError(f"{what} is the memory of another node, or of an earlier start")
    there = os.fstat(fd)
    if superblock.size > there.st_size:
        raise ValueError(
            f"{what} has {there.st_size} bytes, and its superblock says {superblock.size}"
        )
    if not is_of_a_node(there):
        raise ValueError(f"{what} was not made by a node: everybody may open it")
    if not there.st_nlink:
        raise ValueError("its node has lost the name of its memory, and is to be drained")
    return superblock


def _mapped(fd: int, what: str, size: int, access: int) -> mmap.mmap:
    try:
        mapped = mmap.mmap(fd, size, access=access)
    except OSError as error:
        raise OSError(mmap_error_text(what, size, error)) from None
    mapped.madvise(mmap.MADV_DONTDUMP)
    return mapped


def _readable(mapped: mmap.mmap) -> memoryview:
    """A memoryview that claims to be writable, over a mapping that is not, which it keeps."""
    memory = memoryview(mapped)
    address = address_of(memory)
    array: Any = (ctypes.c_char * len(memory)).from_address(address)
    array.keep = memory
    _SHOWN[address] = array
    return memoryview(array).cast("B")


def is_shown(memory: memoryview) -> bool:
    """Whether this memory is of a mapping that the processor cannot write to."""
    if not _SHOWN:
        return False
    address = address_of(memory)
    return any(start <= address < start + len(each) for start, each in list(_SHOWN.items()))
