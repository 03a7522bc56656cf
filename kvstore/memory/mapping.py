"""A client's mapping of a segment on its host.

Copies use one mapping. Values that programs read without a copy are in a second one, which the
processor cannot write to: torch has no read-only tensors, and a write into a tensor would change
the object for all clients.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable
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
"""How long ``close`` waits for threads that fill page tables: milliseconds, or longer on a host
without free memory."""


class Mapping:
    """See the module. Threads: any."""

    def __init__(self, mapped: mmap.mmap, superblock: layout.Superblock, fd: int) -> None:
        """Internal: use ``attach`` or ``of``. Takes over ``mapped`` and ``fd``."""
        self._fd = fd
        self.uuid: Final = superblock.uuid
        self.size: Final = superblock.size
        self.memory: Final = memoryview(mapped)
        """All of the segment, mapped while it is referenced."""
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
        """Maps the entry ``shm_name`` if it is the segment of this ``uuid``.

        Fills page tables in the background (150 ms per GiB of small pages, 1 ms of huge ones): page
        faults slow a get down to a third, a put to a tenth.

        Raises:
            OSError, ValueError: the entry is removed, replaced, another user's, not a node's, or in
                another container's ``/dev/shm``; ``str`` is one line.
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
        """As ``attach``, by a file descriptor, writable if that is. Takes over ``fd``, also if it
        raises."""
        try:
            superblock = _checked(fd, what, uuid)
            writable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
            how = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return cls(_mapped(fd, what, superblock.size, how), superblock, fd)
        except BaseException:
            os.close(fd)
            raise

    def readonly_view(self) -> memoryview | None:
        """The segment, for values that programs read in place, mapped at the first call. It claims
        to be writable, because torch accepts no other, but a write kills this process (SIGSEGV).
        None: the address space is too small (``ulimit -v``)."""
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
        """The generation of the owner's mount; 0: the owner, or ``close``, has closed it."""
        return 0 if self._is_closed else self._words[layout.GENERATION_OFFSET // 8]

    @property
    def is_current(self) -> bool:
        """Whether the owner has not closed the segment, and its file still has a name."""
        with contextlib.suppress(OSError):  # ``close`` is called meanwhile
            return self.generation != 0 and os.fstat(self._fd).st_nlink > 0
        return False

    def watch(self, generation: int) -> Callable[[], bool]:
        """A function that checks whether the owner's mount still has ``generation``; keeps the
        memory mapped."""
        start = layout.GENERATION_OFFSET
        word = self.memory[start : start + 8].cast("Q")
        return lambda: word[0] == generation

    def close(self) -> None:
        """Closes the mapping, and ends its threads. The memory is unmapped when no call and no view
        refers to it. Idempotent."""
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
    """Raises OSError or ValueError: it is not the segment of this ``uuid``, as a node made it."""
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
    """A memoryview that claims to be writable, over a read-only mapping, which it keeps."""
    memory = memoryview(mapped)
    address = address_of(memory)
    array: Any = (ctypes.c_char * len(memory)).from_address(address)
    array.keep = memory
    _SHOWN[address] = array
    return memoryview(array).cast("B")


def any_shown(views: Iterable[memoryview]) -> bool:
    """Return whether any of these is in a read-only mapping."""
    arrays = [ref() for ref in _SHOWN.valuerefs()]  # half the time of ``items``
    mapped = [(ctypes.addressof(array), len(array)) for array in arrays if array is not None]
    return bool(mapped) and any(
        start <= address < start + size
        for address in map(address_of, views)
        for start, size in mapped
    )
