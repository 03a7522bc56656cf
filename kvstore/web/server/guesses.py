"""Slows down who tries tokens at a port for HTTP.

A token has so many bits that nobody finds one by trying. This keeps those who try from filling the
port and its log: after ``FREE`` wrong tokens within ``WINDOW_S`` from one address, answers to
further wrong ones come ``DELAY_S`` late. Nobody is locked out: a right token is never counted and
never waits, also from the same address, which may be that of a whole network behind NAT.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections import OrderedDict
from typing import Final

from aiohttp import web

from kvstore.clocks import uptime
from kvstore.network.waits import CrowdedOutError, Waits

log = logging.getLogger("kvstore.web")

FREE: Final = 10
"""Wrong tokens that are answered at once: of a person who pastes, of a script that was given an old
one."""

WINDOW_S: Final = 60.0
DELAY_S: Final = 1.0

DELAYED_MAX: Final = 16
"""Answers that wait at once. They take places of requests (``serving.REQUESTS_MAX``), so the oldest
is sent when one more comes."""

ADDRESSES_MAX: Final = 1_024
"""Addresses that are remembered, those with the latest wrong tokens."""


class Guesses:
    """The wrong tokens of one port. Use it in one event loop at a time."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, tuple[float, int]] = OrderedDict()
        """By address: since when, and how many."""
        self._delayed = Waits(DELAYED_MAX)

    async def wrong(self, request: web.Request) -> None:
        """Called with a request with a wrong token, before its answer is sent."""
        address = _network(request.remote or "?")
        now = uptime()
        since, count = self._wrong.pop(address, (now, 0))
        if now - since > WINDOW_S:
            since, count = now, 0
        count += 1
        self._wrong[address] = since, count
        if len(self._wrong) > ADDRESSES_MAX:
            self._wrong.popitem(last=False)
        if count <= FREE:
            return
        if count == FREE + 1:
            log.warning("wrong_tokens peer=%s count=%d: answers to it are delayed", address, count)
        with contextlib.suppress(CrowdedOutError, TimeoutError):
            async with self._delayed.wait(DELAY_S):
                await asyncio.Event().wait()

    def __len__(self) -> int:
        return len(self._wrong)


def _network(address: str) -> str:
    """The address; of IPv6 the 64 bits of the network, in which a host chooses its own address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))
