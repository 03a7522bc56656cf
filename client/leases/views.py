"""Pool memory in direct use: leased views, and allocations to compute into.

Both are numpy arrays over the mapped segment (or torch tensors over such an array). The lease
belongs to the first array over the memory: slices, reshapes and tensors keep it alive, and its
finalizer ends the lease. A background thread, started with the first view or read, renews these
leases, and gives back what the client has not used in time (``Returnable``).
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kvstore import calls
from kvstore.calls import SegmentInfo
from kvstore.client.leases.lease_table import (
    AllocationLease,
    Lease,
    LeaseTable,
    Mounted,
    ObjectLease,
    Watched,
    found_at,
)
from kvstore.errors import KVStoreError
from kvstore.runtime.clock import uptime
from kvstore.runtime.tasks import CLOSE_S, join_all, start_thread

log = logging.getLogger("kvstore.client")

BROKEN_PAUSE_S: Final = 0.2


MakeCall = Callable[[calls.Request, float], calls.Reply]
"""Makes a call within a timeout in seconds; raises KVStoreError."""


class Returnable(Protocol):
    """What a client gives back to the master if it does not use it in time."""

    on_hold: Callable[[], object] | None
    """Called when there is something to give back."""

    def __len__(self) -> int: ...
    def due_at(self) -> float:
        """Return when it is to be given back (``uptime()``), if it is not used until then."""
        ...

    def give_back(self) -> Sequence[calls.Request]:
        """Take all or some of it, and return the calls that give that back."""
        ...


class _ArrayReference(weakref.ref["NDArray[np.generic]"]):
    """A weak reference to an array, at a sixth of the cost of ``weakref.finalize``."""

    __slots__ = ("address", "array", "lease", "storage", "wakes")

    address: int
    array: int
    """``id`` of the array, unique while the array lives."""
    lease: Lease
    storage: int
    """Identifies the storage of the tensor over it; 0: there is none."""
    wakes: weakref.ref[NDArray[np.generic]] | None
    """Of an allocation: wakes the renewal thread when it is dropped."""

    __hash__ = object.__hash__  # of the reference: an array has no hash

    def __eq__(self, other: object) -> bool:
        return self is other


class ArrayTracker:
    """The arrays in use, and the lease of each.

    A lease belongs to the first array over its memory. Derived arrays lead back to it by ``base``,
    memoryviews by ``obj``, tensors by their storage. If that trace is lost (DLPack, or a tensor
    made by the program), the address decides; of several leases on it, the one that promises least.

    The finalizer of an array runs only two C functions, ``deque.append`` and ``SimpleQueue.put``:
    it may run between any two steps of any thread, with any lock held, and a signal handler that
    raises must not interrupt it. ``remove_dead`` does the rest. Any thread may read; one at a time
    may call the other methods.
    """

    def __init__(
        self,
        clock: Callable[[], float] = uptime,
    ) -> None:
        self.leases = LeaseTable(clock)
        self._allocations: set[_ArrayReference] = set()
        self.woken: SimpleQueue[object] = SimpleQueue()
        """Wakes the renewal thread. Finalizers may call its ``put``, which takes no lock."""
        self._arrays: dict[int, _ArrayReference] = {}
        self._storages: dict[int, _ArrayReference] = {}
        self._let_go: deque[weakref.ref[NDArray[np.generic]]] = deque()
        self.let_go = self._let_go.append
        """Records that an array was dropped."""

    @property
    def allocated(self) -> int:
        return len(self._allocations)

    def add(self, arrays: Iterable[Watched], mounted: Mounted) -> list[Lease]:
        """As ``ViewManager.add_many``. A signal handler may raise between any two steps: before the
        watch is in ``_arrays`` the lease is in no table; after that, the finalizer releases what
        exists."""
        leases: list[Lease] = []
        lease_for = self.leases.lease_for
        for array, address, held, until, place, value in arrays:
            lease = lease_for(address, array.nbytes, held, until, mounted, place)
            storage = 0 if value is array else _storage(value)
            self._watch_array(array, address, lease, storage, self.let_go)
            leases.append(lease)
        return leases

    def _watch_array(
        self,
        array: NDArray[np.generic],
        address: int,
        lease: Lease,
        storage: int,
        ended: Callable[[weakref.ref[NDArray[np.generic]]], object],
    ) -> None:
        is_granted = type(lease.what) is AllocationLease
        wakes = weakref.ref(array, self.woken.put) if is_granted else None  # called after ``ended``
        watch = _ArrayReference(array, ended)
        watch.wakes = wakes
        watch.address, watch.lease = address, lease
        watch.array, watch.storage = id(array), storage
        self._arrays[id(array)] = watch
        self.leases.enter(address, lease, watch)
        if is_granted:
            self._allocations.add(watch)
        if storage:
            self._storages[storage] = watch

    def remove_one_dead(self) -> None:
        """Switch to running ``remove_dead`` whenever an array is freed, and in no thread."""
        for watch in list(self._arrays.values()):
            array = watch()
            if array is not None:
                self._watch_array(
                    array, watch.address, watch.lease, watch.storage, self._remove_last_dead
                )
                watch.lease.holders.discard(watch)
                self._allocations.discard(watch)
        self.remove_dead([])

    def _remove_last_dead(self, watch: weakref.ref[NDArray[np.generic]]) -> None:
        self.let_go(watch)
        self.remove_dead([])

    def remove_dead(self, dropped: list[AllocationLease]) -> None:
        """Remove dropped arrays; add their unput allocations to ``dropped``. Repeatable."""
        while self._let_go:
            watch = self._let_go[0]
            assert isinstance(watch, _ArrayReference)
            if self._arrays.get(watch.array) is watch:  # otherwise another array has its id
                self._arrays.pop(watch.array, None)
            if watch.storage and self._storages.get(watch.storage) is watch:
                self._storages.pop(watch.storage, None)
            self._allocations.discard(watch)
            granted = self.leases.release(watch.address, watch.lease, watch)
            if granted is not None:
                dropped.append(granted)
            with contextlib.suppress(IndexError, ValueError):  # another thread was faster
                self._let_go.remove(watch)

    def of(self, value: object) -> Lease | None:
        """Return the lease of the view or allocation from which ``value`` was made, or None."""
        watch = self._watch(value)
        if watch is not None:
            return watch.lease
        leases = [lease for _, lease in self.leases.containing(_address(value))]
        return next((lease for lease in leases if not lease.is_held), leases[0] if leases else None)

    def allocation(self, data: memoryview) -> Lease | None:
        """Return the unput allocation whose memory starts with ``data``."""
        if not self.allocated or not data.nbytes:
            return None
        watch, address = self._watch(data), _address(data)
        if watch is not None:
            lease = watch.lease
            is_it = watch.address == address and isinstance(lease.what, AllocationLease)
            return lease if is_it else None
        if not self.leases.starts_at(address):
            return None
        leases = self.leases.containing(address)
        granted = [
            lease
            for start, lease in leases
            if start == address and isinstance(lease.what, AllocationLease)
        ]
        if len(leases) == 1 and granted:
            return granted[0]
        # Several leases cover this memory. A lost allocation must not be put; others are copied.
        return next((lease for lease in granted if not lease.is_held), None)

    def end(self) -> None:
        for watch in list(self._arrays.values()):
            watch.lease.end()

    def _watch(self, value: object) -> _ArrayReference | None:
        while True:
            if isinstance(value, np.ndarray):
                watch = self._arrays.get(id(value))
                if watch is not None and watch() is value:
                    return watch
                value = value.base
            elif isinstance(value, memoryview):
                value = value.obj
            elif storage := _storage(value):
                watch = self._storages.get(storage)
                return watch if watch is not None and watch() is not None else None
            else:
                return None


class ViewManager:
    def __init__(
        self,
        ask: MakeCall,
        *,
        lease_margin_s: float,
        returnables: Sequence[Returnable],
        watch: Callable[[SegmentInfo], Mounted] | None = None,
    ) -> None:
        """``watch``: ``TransportSelector.watch``; None: a lease runs out after a new mount."""
        self._ask = ask
        self._watch = watch
        self._margin_s = lease_margin_s
        self._watches = ArrayTracker()
        self.of, self.allocation = self._watches.of, self._watches.allocation
        self._begin(returnables)

    def _begin(self, returnables: Sequence[Returnable]) -> None:
        self._returnables = returnables
        self._armed: set[Returnable] = set()
        for held in returnables:
            held.on_hold = partial(self._give_back_later, held)
        # Reentrant: the collector may run a program's own finalizer here, which calls the client.
        self._lock = threading.RLock()
        self._dropped: list[
            AllocationLease
        ] = []  # allocations dropped without a put, to be revoked
        self._wake_at = math.inf
        self._closing = threading.Event()
        self._started: list[threading.Thread] = []
        """Threads started by concurrent callers; only one of them continues."""
        self._thread: threading.Thread | None = None

    def add_many(
        self,
        arrays: Iterable[Watched],
        mounted: Mounted,
    ) -> list[Lease]:
        """Watch arrays, each the first over its payload, until dropped."""
        with self._lock:
            self._remove_dead()
            leases = self._watches.add(arrays, mounted)
            if leases and min(lease.renew_at for lease in leases) < self._wake_at:
                self._watches.woken.put(None)
        self._start()
        return leases

    def _start(self) -> None:
        if self._thread is None and not self._closing.is_set():
            self._started.append(start_thread("kvstore-renew", self._renew_forever))

    @property
    def allocated(self) -> int:
        return self._watches.allocated

    def stop_renewing(self) -> None:
        """Stop renewals. A call in progress ends when its stub is closed."""
        self._closing.set()
        self._watches.woken.put(None)

    def close(self) -> None:
        """Stop renewals. Views stay readable; their leases run out."""
        self.stop_renewing()
        join_all(self._started, CLOSE_S)
        self._watches.remove_one_dead()

    def reset_after_fork(self, returnables: Sequence[Returnable]) -> None:
        """Drop all leases in the child of a fork: the parent renews and ends them."""
        self._watches.end()
        closed = self._closing.is_set()
        self._begin(returnables)
        if closed:
            self._closing.set()
            self._watches.remove_one_dead()

    def __len__(self) -> int:
        with self._lock:
            self._remove_dead()
            return len(self._watches.leases)

    def _remove_dead(self) -> None:
        self._watches.remove_dead(self._dropped)

    def _relocate(self, moved: list[Lease]) -> None:
        """Look up objects whose segments were mounted again, one by one, until a call fails."""
        for lease in moved:
            lease.plan_renewal()
        for lease in moved:
            what, requested_at = lease.what, uptime()
            if not isinstance(what, ObjectLease) or self._watch is None or not lease.is_held:
                continue
            try:
                patience_s = max(0.05, lease.remaining_s / 2)
                found = self._ask(calls.Lookup(what.namespace, [what.key]), patience_s)
                assert isinstance(found, calls.LookupReply)
                segments = calls.DescribeSegments(found.placements.segments)
                described = self._ask(segments, patience_s)
                assert isinstance(described, calls.DescribeSegmentsReply)
            except KVStoreError as error:
                if self._closing.is_set():
                    return
                log.warning("lease_renewal_failed leases=%d error=%s", len(moved), str(error))
                for each in moved:
                    each.plan_retry()
                return
            segment = found_at(lease, found, described)
            if segment is not None:
                until = requested_at + found.lease_ms / 1000 - self._margin_s
                lease.mounted_again(self._watch(segment), until)

    def _renew_forever(self) -> None:
        with self._lock:
            if self._thread is not None:  # several callers have started it
                return
            self._thread = threading.current_thread()
        while not self._closing.is_set():
            try:
                self._wait()
                if not self._closing.is_set():
                    self._revoke_dropped()
                    self._renew()
                    self._give_back_due()
            except Exception:
                # This is a bug. The next round retries.
                log.exception("lease_renewal_broken views=%d", len(self._watches.leases))
                self._closing.wait(BROKEN_PAUSE_S)

    def _wait(self) -> None:
        """Wait until a renewal is due, or there is an allocation to revoke."""
        with self._lock:  # ``add_many`` sees this time, and wakes the thread if one is due sooner
            self._remove_dead()
            self._wake_at = self._watches.leases.wake_at()
            for held in list(self._armed):
                self._wake_at = min(self._wake_at, held.due_at())
        pause = min(self._wake_at - uptime(), threading.TIMEOUT_MAX)
        if pause > 0 and not self._dropped:
            with contextlib.suppress(Empty):
                self._watches.woken.get(timeout=pause)
        with contextlib.suppress(Empty):
            while True:
                self._watches.woken.get_nowait()
        with self._lock:
            self._remove_dead()

    def _renew(self) -> None:
        with self._lock:
            self._remove_dead()
            due, moved = self._watches.leases.due(), self._watches.leases.moved()
        self._relocate(moved)
        for renewal in due:
            requested_at = uptime()
            try:
                renewed = self._ask(renewal.request, renewal.patience_s)
            except KVStoreError as error:
                if self._closing.is_set():
                    return
                renewal.failed(error)
            else:
                assert isinstance(renewed, calls.RenewReply)
                renewal.on_reply(renewed, requested_at, self._margin_s)

    def _give_back_later(self, held: Returnable) -> None:
        if held not in self._armed and not self._closing.is_set():
            self._armed.add(held)
            try:
                self._start()
            except RuntimeError:  # no thread available: it waits for the next call, or ends by time
                self._armed.discard(held)
            self._watches.woken.put(None)

    def _give_back_due(self) -> None:
        """Give back what no call has used or given back in time. Until then the thread stays armed,
        so that a busy client does not wake it with each call."""
        for held in list(self._armed):
            if held.due_at() > uptime():
                continue
            while held:
                self._give_back(held, 1.0)
            self._armed.discard(held)
            if held:  # since the check
                self._armed.add(held)

    def give_back_now(self, patience_s: float) -> None:
        """Give back all that is held; what a call that fails was to give back ends by time."""
        for held in self._returnables:
            if held:
                self._give_back(held, patience_s)

    def _give_back(self, held: Returnable, patience_s: float) -> None:
        for request in held.give_back():
            try:
                self._ask(request, patience_s)
            except KVStoreError as error:
                log.debug("give_back_failed call=%s error=%s", type(request).__name__, error)

    def _revoke_dropped(self) -> None:
        while self._dropped:
            lost = self._dropped.pop()
            try:
                self._ask(calls.PutRevoke(lost.epoch, [lost.token], True), 1.0)
            except KVStoreError as error:
                log.debug("revoke_failed token=%d error=%s", lost.token, str(error))


def _storage(value: object) -> int:
    """Return an id of a tensor's storage while it lives; 0: no tensor, or no storage."""
    storage = getattr(value, "untyped_storage", None)  # without importing torch
    if storage is None:
        return 0
    try:
        return int(storage()._cdata)
    except (AttributeError, RuntimeError):  # sparse, or without memory
        return 0


def _address(value: object) -> int:
    data_ptr = getattr(value, "data_ptr", None)  # a torch tensor, without importing torch
    if data_ptr is not None:
        return int(data_ptr())
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if isinstance(value, memoryview) and value.nbytes:
        return int(np.frombuffer(value, np.uint8).ctypes.data)
    return 0
