"""Connectivity probe: the master connects to a node's address after the join.

A node behind a firewall, with an address of another family or a wrong ``--advertise`` looks alive,
because it opened its stream itself. So the master opens a data connection as clients do, and shows
the result in the status. It is only the master's view of the network, so nothing else depends on
it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from kvstore.calls import SegmentInfo
from kvstore.errors import KVStoreError, SegmentUnmountedError
from kvstore.master.capabilities import MASTER, describe_segment
from kvstore.runtime.clock import uptime
from kvstore.security.data_port_tls import ClientTls
from kvstore.transport.tcp_client import ClientConnection

REACH_S: Final = 2.0
"""Connect timeout: a lost packet is sent again after one second."""

AGAIN_S: Final = 30.0
"""Pause before an unreachable node is probed again."""

AT_ONCE: Final = 4
"""Concurrent probes, each in a thread: all nodes join when a master starts."""

Reach = Callable[[Sequence[SegmentInfo]], Awaitable[str]]


class ConnectivityProbe:
    """Probes nodes. Use it in one event loop's thread."""

    def __init__(self, tls: ClientTls | None = None) -> None:
        """``tls``: the master's identity, for nodes that encrypt; or None."""
        self._tls = tls
        self._slots = asyncio.Semaphore(AT_ONCE)

    async def __call__(self, segments: Sequence[SegmentInfo]) -> str:
        """Return an error if a segment with an address is not reachable there, else ""."""
        async with self._slots:
            return await asyncio.to_thread(_probe_error, segments, self._tls)


def _probe_error(segments: Sequence[SegmentInfo], tls: ClientTls | None) -> str:
    deadline = uptime() + REACH_S
    for segment in segments:
        if not segment.address:
            continue
        connection = ClientConnection(describe_segment(segment, MASTER), tls=tls)
        try:
            connection.handshake(deadline)
        except SegmentUnmountedError:
            pass  # fenced in the meantime: the node joins again
        except KVStoreError as error:
            return error.message
        finally:
            connection.close()
    return ""
