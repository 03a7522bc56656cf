"""The gRPC channels of a stub: one per master, replaced after a call without a reply.

A gRPC channel reconnects only while a call polls it, and a call fails at once while it is not
connected. Measured: a master was back after 0.5 s, and its client noticed after 10 s. A new channel
connects within its first call.

A channel that is idle for ``IDLE_S`` closes its connection before the master does, because gRPC
would report that on the standard error of a program that imported gRPC before kvstore. A channel
does so only once (https://github.com/grpc/grpc/issues/38454), so the next call gets a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import grpc

from kvstore.client.rpc.retries import ConnectionBrokenError
from kvstore.errors import ClosedError
from kvstore.limits import FRAME_BYTES_MAX
from kvstore.runtime.clock import uptime
from kvstore.runtime.resolver import NameResolutionError, grpc_target
from kvstore.security.credentials import Credentials, open_channel

IDLE_S: Final = 25.0
"""At most doubled: less than a master's 60 s within 10 % (``grpc.max_connection_idle_ms``)."""

CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", FRAME_BYTES_MAX),
    ("grpc.max_send_message_length", FRAME_BYTES_MAX),
    # gRPC's own backoff grows to two minutes, which would delay the detection of a restart.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Masters are on the local network, which a web proxy may not reach.
    ("grpc.enable_http_proxy", 0),
    # Channels of two clients in one process share nothing, so neither closes the other's.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
)


class TrackedChannel:
    def __init__(self, channel: grpc.Channel, now: float) -> None:
        self.channel = channel
        self.used = now
        self.calls: set[object] = set()
        """A token per call; the call removes it in one step, whatever a signal handler raises."""
        self.in_doubt = False
        """Set by a call without a reply; the next call then gets a new channel."""


class ChannelPool:
    """The channels of one stub, by address. Threads: any."""

    def __init__(
        self,
        credentials: Credentials | None = None,
        *,
        idle_s: float = IDLE_S,
        clock: Callable[[], float] = uptime,
    ) -> None:
        """Create an empty pool. ``idle_s``: gRPC rounds less than 1 s up to 1 s."""
        self._credentials = credentials
        self._idle_s = idle_s
        self._options = (*CHANNEL_OPTIONS, ("grpc.client_idle_timeout_ms", int(idle_s * 1_000)))
        self._clock = clock
        self._lock = threading.Lock()
        self._by_address: dict[str, TrackedChannel] = {}
        self._retired: set[TrackedChannel] = set()
        self._closed = False

    @contextmanager
    def acquire(self, address: str, deadline: float) -> Iterator[TrackedChannel]:
        """Yield the channel for one call. Raises ClosedError, ConnectionBrokenError."""
        target, named = address, tuple[tuple[str, str], ...]()
        known = self._by_address.get(address)
        if known is None or self._is_idle(known):
            try:
                target, named = grpc_target(address, deadline)
            except NameResolutionError as error:
                raise ConnectionBrokenError(str(error), sent=False) from None
        me = object()
        with self._lock:
            if self._closed:
                raise ClosedError("the client is closed")
            lent = self._by_address.get(address)
            if lent is not None and self._is_idle(lent):
                self._retired.add(lent)
                lent = None
            if lent is None:
                channel = open_channel(target, self._credentials, self._options + named)
                lent = self._by_address[address] = TrackedChannel(channel, self._clock())
            lent.calls.add(me)
        try:
            yield lent
        finally:
            lent.used = self._clock()
            lent.calls.discard(me)
            with self._lock:
                if lent.in_doubt and self._by_address.get(address) is lent:
                    del self._by_address[address]
                    self._retired.add(lent)
                over = [each for each in self._retired if not each.calls]
                self._retired.difference_update(over)
            for each in over:
                each.channel.close()

    def _is_idle(self, channel: TrackedChannel) -> bool:
        """Return whether the channel has closed its connection, or is about to."""
        return not channel.calls and self._clock() - channel.used > 0.9 * self._idle_s

    def close(self) -> None:
        with self._lock:
            self._closed = True
            channels = [*self._by_address.values(), *self._retired]
            self._by_address.clear()
            self._retired.clear()
        for lent in channels:
            lent.channel.close()
