"""Memory of the pool in the caller's hands: leased views, and allocations to compute into.

Both are numpy arrays over the mapped segment (or torch tensors over such an array). What they
promise (``kvstore.client.leases``) follows the memory and not one Python object: slices, reshapes
and tensors made of it all keep the first array alive, and its finalizer ends the promise. One
background thread, started with the first view, renews what lives in good time.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore import calls
from kvstore.calls import SegmentInfo
from kvstore.client.leases import Granted, Lease, LeaseTable, Mounted, Named, Place, found_at
from kvstore.errors import KVStoreError

if TYPE_CHECKING:
    from kvstore.client.values import Value

log = logging.getLogger("kvstore.client")

Ask = Callable[[calls.Request, float], calls.Reply]
"""The request and the seconds it may take; raises KVStoreError."""


Watched = tuple[NDArray[np.generic], int, Named | Granted, float, Place | None]
"""An array to watch, with the address of its first byte, and the rest of ``Views.add``."""


class _Watch(weakref.ref["NDArray[np.generic]"]):
    """Tells when an array's memory is let go; a sixth of what ``weakref.finalize`` costs."""

    __slots__ = ("address", "lease")

    address: int
    lease: Lease

    __hash__ = object.__hash__  # its own, and not the array's, which has none

    def __eq__(self, other: object) -> bool:
        return self is other


class Views:
    """All views and allocations of one client, by the address of their memory."""

    def __init__(
        self,
        ask: Ask,
        *,
        lease_margin_s: float,
        watch: Callable[[SegmentInfo], Mounted] | None = None,
    ) -> None:
        """``watch``: of ``Movers``, to go on with objects whose segments were mounted anew."""
        self._ask = ask
        self._watch = watch
        self._margin_s = lease_margin_s
        # Reentrant: a finalizer may run in a thread that holds it.
        self._lock = threading.RLock()
        self._leases = LeaseTable()
        self._watches: set[_Watch] = set()
        self._dropped: list[Granted] = []  # allocations that died unput, to be revoked
        self._changed = threading.Event()
        self._wake_at = math.inf
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def add(
        self,
        array: NDArray[np.generic],
        held: Named | Granted,
        until: float,
        mounted: Mounted,
        place: Place | None = None,
    ) -> Lease:
        """Watch ``array``, the first array over some payload, until its memory is let go.

        Args:
            array: over the payload.
            held: what it is.
            until: when the promise ends.
            mounted: whether the segment under it is mounted as it was.
            place: of the object; then it is found again when its segment was mounted anew.
        """
        (lease,) = self.add_many([(array, array.ctypes.data, held, until, place)], mounted)
        return lease

    def add_many(
        self,
        arrays: Iterable[Watched],
        mounted: Mounted,
    ) -> list[Lease]:
        """``add`` of several on one segment."""
        leases: list[Lease] = []
        add, watches, let_go = self._leases.add, self._watches, self._let_go
        with self._lock:
            for array, address, held, until, place in arrays:
                lease = add(address, array.nbytes, held, until, mounted, place)
                watch = _Watch(array, let_go)
                watch.address, watch.lease = address, lease
                watches.add(watch)
                leases.append(lease)
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(
                    target=self._renew_forever, name="kvstore-renew", daemon=True
                )
                self._thread.start()
            if leases and min(lease.renew_at for lease in leases) < self._wake_at:
                self._changed.set()
        return leases

    def of(self, value: Value | memoryview) -> Lease | None:
        """The lease under the memory that ``value`` starts in, None: it is not of this pool."""
        return self._leases.around(_address(value))

    def allocation(self, data: memoryview) -> Lease | None:
        """The allocation whose memory starts with ``data``, if it is one that was not put yet."""
        lease = self._leases.at(_address(data)) if self._leases and data.nbytes else None
        return lease if lease is not None and isinstance(lease.what, Granted) else None

    def close(self) -> None:
        """Renew no more. Views stay readable; their promise runs out."""
        self._closing.set()
        self._changed.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def __len__(self) -> int:
        return len(self._leases)

    def _let_go(self, watch: weakref.ref[NDArray[np.generic]]) -> None:
        assert isinstance(watch, _Watch)
        with self._lock:
            self._watches.discard(watch)
            dropped = self._leases.let_go(watch.address, watch.lease)
        if dropped is not None:
            self._dropped.append(dropped)
            self._changed.set()

    def _follow(self, moved: list[Lease]) -> None:
        """Ask for objects whose segments were mounted anew, one by one, until nobody answers."""
        for lease in moved:
            lease.plan_renewal()
        for lease in moved:
            what, asked = lease.what, time.monotonic()
            if not isinstance(what, Named) or self._watch is None or not lease.held:
                continue
            try:
                patience_s = max(0.05, lease.seconds_left / 2)
                found = self._ask(calls.Lookup(what.namespace, [what.key]), patience_s)
                assert isinstance(found, calls.Found)
                segments = calls.DescribeSegments(found.placements.segments)
                described = self._ask(segments, patience_s)
                assert isinstance(described, calls.Segments)
            except KVStoreError as error:
                log.warning("lease_renewal_failed leases=%d error=%s", len(moved), str(error))
                return
            segment = found_at(lease, found, described)
            if segment is not None:
                until = asked + found.lease_ms / 1000 - self._margin_s
                lease.mounted_again(self._watch(segment), until)

    def _renew_forever(self) -> None:
        while not self._closing.is_set():
            with self._lock:  # whoever adds one that is due sooner sees the time, and wakes us
                self._wake_at = self._leases.wake_at()
            pause = min(self._wake_at - time.monotonic(), threading.TIMEOUT_MAX)
            if pause > 0:
                self._changed.wait(pause)
            self._changed.clear()
            if self._closing.is_set():
                return
            self._revoke_dropped()
            with self._lock:
                due, moved = self._leases.due(), self._leases.moved()
            self._follow(moved)
            for renewal in due:
                asked = time.monotonic()
                try:
                    renewed = self._ask(renewal.request, renewal.patience_s)
                except KVStoreError as error:
                    renewal.failed(error)
                else:
                    assert isinstance(renewed, calls.Renewed)
                    renewal.answered(renewed, asked, self._margin_s)

    def _revoke_dropped(self) -> None:
        while self._dropped:
            lost = self._dropped.pop()
            try:
                self._ask(calls.PutRevoke(lost.epoch, [lost.token], True), 1.0)
            except KVStoreError as error:
                log.debug("revoke_failed token=%d error=%s", lost.token, str(error))


def _address(value: Value | memoryview) -> int:
    data_ptr = getattr(value, "data_ptr", None)  # a torch tensor, without importing torch
    if data_ptr is not None:
        return int(data_ptr())
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if isinstance(value, memoryview) and value.nbytes:
        return int(np.frombuffer(value, np.uint8).ctypes.data)
    return 0
