"""Checks that a node's memory can be reached at its address: the master connects after the join.

A node behind a firewall, on an address of another family, or with a wrong ``--advertise`` looks
alive: its heartbeats come by the stream that it has opened itself. So the master opens a data
connection as a client does, with the segment's token or as a holder, and shows the result in the
status. That is only the master's view of the network, so nothing else depends on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvstore.calls import SegmentInfo
from kvstore.errors import KVStoreError, SegmentGoneError
from kvstore.master.capabilities import MASTER, describe_segment
from kvstore.runtime.clock import uptime
from kvstore.security.data_port_tls import ClientTls
from kvstore.transport.tcp_client import ClientConnection

REACH_S: Final = 2.0
"""How long connecting may take: a lost packet is sent again after one second."""

AGAIN_S: Final = 30.0
"""Pause before the master tries again to reach a node that it could not reach."""

AT_ONCE: Final = 4
"""Nodes that are tried at the same time, each in a thread: all nodes join when a master starts."""

Reach = Callable[[Sequence[SegmentInfo]], Awaitable[str]]
"""The type of ``ConnectivityProbe.__call__``: tells why the memory of a node cannot be reached."""


class ConnectivityProbe:
    """See the module. Use it in one event loop's thread."""

    def __init__(self, tls: ClientTls | None = None) -> None:
        """``tls``: the master's identity, for nodes that encrypt; None: it has none."""
        self._tls = tls
        self._places = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, segments: Sequence[SegmentInfo]) -> str:
        """Why a segment cannot be reached; empty: each one with an address is served there."""
        async with self._places:
            return await asyncio.to_thread(_why_not, segments, self._tls)


def _why_not(segments: Sequence[SegmentInfo], tls: ClientTls | None) -> str:
    deadline = uptime() + REACH_S
    for segment in segments:
        if not segment.address:
            continue
        connection = ClientConnection(describe_segment(segment, MASTER), tls=tls)
        try:
            connection.handshake(deadline)
        except SegmentGoneError:
            pass  # fenced meanwhile: the node joins anew
        except KVStoreError as error:
            return error.message
        finally:
            connection.close()
    return ""
