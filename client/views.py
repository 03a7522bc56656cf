"""Memory of the pool in the caller's hands: leased views, and allocations to compute into.

Both are numpy arrays over the mapped segment (or torch tensors over such an array). What they
promise follows the memory and not one Python object: slices, reshapes and tensors made of it all
keep the first array alive, and its finalizer ends the promise. One background thread, started with
the first view, renews what lives in good time; ``Lease.held`` says whether that worked without a
gap so far.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvstore import calls
from kvstore.calls import SegmentInfo
from kvstore.client.values import Bytes1D
from kvstore.errors import KVStoreError
from kvstore.limits import DEFAULT_NAMESPACE, Key, Namespace

if TYPE_CHECKING:
    from kvstore.client.values import Value

log = logging.getLogger("kvstore.client")

RENEW_PAUSE_S: Final = 0.01
"""Between two attempts to renew one lease, at least; those due so soon are renewed together."""

RENEW_KEYS_MAX: Final = 4_096
"""In one call: well below the bound of a batch, and no long one for the master."""

Ask = Callable[[calls.Request, float], calls.Reply]
"""The request and the seconds it may take; raises KVStoreError."""


class Named(NamedTuple):
    """What is held: one version of an object."""

    namespace: Namespace
    key: Key
    epoch: int
    counter: int


class Granted(NamedTuple):
    """What is held: an allocation that has no name yet."""

    epoch: int
    token: int
    segment: SegmentInfo
    offset: int
    """Of the extent."""
    size: int
    """Payload bytes."""


class Lease:
    """The promise that some memory of the pool keeps its bytes. Any thread may look at it."""

    def __init__(self, held: Named | Granted, until: float, size: int) -> None:
        self.what = held
        self.size = size
        """Bytes of memory, from the address that it is known by."""
        self._until = until
        self._kept = True
        self.holders = 1
        """Arrays over this memory; 0: let go."""
        self.renew_at = 0.0
        self.plan_renewal()

    @property
    def held(self) -> bool:
        """Whether the promise has held without a gap until now. False is final."""
        if self._kept and self.holders and time.monotonic() >= self._until:
            self._kept = False
        return self._kept

    @property
    def seconds_left(self) -> float:
        """For how much longer it holds if it is never renewed again."""
        return max(0.0, self._until - time.monotonic()) if self.held else 0.0

    def extend(self, until: float) -> None:
        if self.held and until > self._until:
            self._until = until
            self.plan_renewal()

    def plan_renewal(self) -> None:
        """When a third of what is left is over: so a renewal that fails is tried again, sooner
        each time, and several times before the end."""
        now = time.monotonic()
        self.renew_at = now + max((self._until - now) / 3, RENEW_PAUSE_S)

    def become(self, named: Named, until: float) -> None:
        """The allocation was put: it is an object now."""
        self.what = named
        self._until = until
        self.plan_renewal()

    def __repr__(self) -> str:
        return f"<Lease held={self.held} seconds_left={self.seconds_left:.1f} of {self.what}>"


class Views:
    """All views and allocations of one client, by the address of their memory."""

    def __init__(self, ask: Ask, *, lease_margin_s: float) -> None:
        self._ask = ask
        self._margin_s = lease_margin_s
        # Reentrant: a finalizer may run in a thread that holds it.
        self._lock = threading.RLock()
        self._leases: dict[int, Lease] = {}  # by address of the first payload byte
        self._dropped: list[Granted] = []  # allocations that died unput, to be revoked
        self._changed = threading.Event()
        self._wake_at = math.inf
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, array: Bytes1D, held: Named | Granted, until: float) -> Lease:
        """Watch ``array``, the first array over some payload, until its memory is let go."""
        address = array.ctypes.data
        with self._lock:
            lease = self._leases.get(address)
            if lease is not None and lease.what == held and lease.held:
                lease.holders += 1
                lease.extend(until)
            else:
                lease = self._leases[address] = Lease(held, until, array.nbytes)
            weakref.finalize(array, self._let_go, address, lease).atexit = False
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(
                    target=self._renew_forever, name="kvstore-renew", daemon=True
                )
                self._thread.start()
            if lease.renew_at < self._wake_at:
                self._changed.set()
        return lease

    def of(self, value: Value | memoryview) -> Lease | None:
        """The lease under the memory that ``value`` starts in, None: it is not of this pool."""
        address = _address(value)
        lease = self._leases.get(address)
        if lease is None:
            for start, other in list(self._leases.items()):
                if start <= address < start + other.size:
                    return other
        return lease

    def allocation(self, data: memoryview) -> Lease | None:
        """The allocation whose memory starts with ``data``, if it is one that was not put yet."""
        lease = self._leases.get(_address(data)) if self._leases and data.nbytes else None
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

    def _let_go(self, address: int, lease: Lease) -> None:
        with self._lock:
            lease.holders -= 1
            if lease.holders:
                return
            if self._leases.get(address) is lease:
                del self._leases[address]
        if isinstance(lease.what, Granted):
            self._dropped.append(lease.what)
            self._changed.set()

    def _renew_forever(self) -> None:
        while not self._closing.is_set():
            with self._lock:  # whoever adds one that is due sooner sees the time, and wakes us
                leases = list(self._leases.values())
                self._wake_at = min(
                    (lease.renew_at for lease in leases if lease.held), default=math.inf
                )
            pause = min(self._wake_at - time.monotonic(), threading.TIMEOUT_MAX)
            if pause > 0:
                self._changed.wait(pause)
            self._changed.clear()
            if self._closing.is_set():
                return
            self._revoke_dropped()
            soon = time.monotonic() + RENEW_PAUSE_S
            self._renew([lease for lease in leases if lease.renew_at <= soon and lease.held])

    def _renew(self, due: list[Lease]) -> None:
        named: dict[Namespace, list[tuple[Lease, Named]]] = {}
        granted: dict[int, list[tuple[Lease, Granted]]] = {}
        for lease in due:
            what = lease.what
            if isinstance(what, Named):
                named.setdefault(what.namespace, []).append((lease, what))
            else:
                granted.setdefault(what.epoch, []).append((lease, what))
        for namespace, all_objects in named.items():
            for start in range(0, len(all_objects), RENEW_KEYS_MAX):
                objects = all_objects[start : start + RENEW_KEYS_MAX]
                request = calls.Renew(
                    namespace,
                    [what.key for _, what in objects],
                    [what.epoch for _, what in objects],
                    [what.counter for _, what in objects],
                    0,
                    (),
                )
                self._renew_batch(request, [lease for lease, _ in objects])
        for epoch, all_granted in granted.items():
            for start in range(0, len(all_granted), RENEW_KEYS_MAX):
                allocations = all_granted[start : start + RENEW_KEYS_MAX]
                tokens = [what.token for _, what in allocations]
                request = calls.Renew(DEFAULT_NAMESPACE, (), (), (), epoch, tokens)
                self._renew_batch(request, [lease for lease, _ in allocations])

    def _renew_batch(self, request: calls.Renew, leases: list[Lease]) -> None:
        asked = time.monotonic()
        patience = min(lease.seconds_left for lease in leases)
        try:
            renewed = self._ask(request, max(0.05, patience / 2))
        except KVStoreError as error:
            log.warning("lease_renewal_failed leases=%d error=%s", len(leases), error)
            for lease in leases:
                lease.plan_renewal()
            return
        assert isinstance(renewed, calls.Renewed)
        held = (*renewed.keys_held, *renewed.tokens_held)
        promised_ms = renewed.lease_ms if request.keys else renewed.deadline_ms
        for lease, still in zip(leases, held, strict=True):
            if still:
                lease.extend(asked + promised_ms / 1000 - self._margin_s)
            else:
                # Removed, or a new master that does not know it: the bytes stay until the last
                # promise ends, and ``held`` turns false then.
                lease.plan_renewal()

    def _revoke_dropped(self) -> None:
        while self._dropped:
            lost = self._dropped.pop()
            try:
                self._ask(calls.PutRevoke(lost.epoch, [lost.token], True), 1.0)
            except KVStoreError as error:
                log.debug("revoke_failed token=%d error=%s", lost.token, error)


def _address(value: Value | memoryview) -> int:
    data_ptr = getattr(value, "data_ptr", None)  # a torch tensor, without importing torch
    if data_ptr is not None:
        return int(data_ptr())
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if isinstance(value, memoryview) and value.nbytes:
        return int(np.frombuffer(value, np.uint8).ctypes.data)
    return 0
