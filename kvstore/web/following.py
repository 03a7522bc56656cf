"""Follows the events of a store over HTTP: the other end of ``GET /api/v1/events``."""

from __future__ import annotations

import functools
import http.client
import itertools
import json
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from kvstore.addresses import split_address
from kvstore.config import HTTP_TOKEN_VARIABLE
from kvstore.errors import InvalidArgumentError, PermissionDeniedError, UnavailableError

SILENT_S: Final = 25.0
"""A stream that is silent for so long is dead: heartbeats come every 10 s."""

PAUSE_S: Final = 0.5
"""Between two attempts to connect."""

_UNAVAILABLE: Final = 503


class Told(NamedTuple):
    """One event of the stream."""

    name: str
    """``stored``, ``removed``, ``cleared``, ``whole``, ``gap`` or ``begin``."""
    data: dict[str, Any]
    """Of ``stored``: ``namespace``, ``key``, ``parent`` (both in hex; None: no parent), ``size``,
    ``depth``; of ``removed``: ``namespace`` and ``key``."""
    place: str
    """``EPOCH-NUMBER``, to resume after; empty: none yet."""


def follow(
    addresses: Iterable[str],
    *,
    namespace: str = "",
    whole: bool = True,
    since: str = "",
    patience_s: float | None = None,
    token: str = "",
    cacert: str = "",
    failed: Callable[[str], None] = lambda _: None,
) -> Iterator[Told]:
    """Yields events as they come, across restarts of masters and elections. Blocks.

    Args:
        addresses: ``host:port`` or ``https://host:port`` of each master's HTTP; the one that
            leads is found. Or an endless iterator that says where to connect next.
        namespace: only objects of it; empty: of all.
        whole: begin with all that is visible, and again whenever events were missed (``cleared``,
            ``stored`` ..., ``whole``); applied in order, the events give the exact set.
        since: resume after this place.
        patience_s: how long no master may answer; None: for ever.
        token: of these ports, if they want one.
        cacert: file with the certificates (PEM) that theirs are checked against; empty: those of
            the system.
        failed: called with the reason when a connection fails or ends, before the next attempt.

    Raises:
        UnavailableError: ``patience_s`` is over, or a master has no events;
        PermissionDeniedError: the token is missing or wrong;
        InvalidArgumentError: ``since``, ``cacert`` or an address is wrong.
    """
    tls = functools.cache(lambda: _tls(cacert))
    place = since
    heard = time.monotonic()
    why = "no master answers"
    for address in itertools.cycle(addresses) if isinstance(addresses, Sequence) else addresses:
        try:
            for told, after in _read(address, namespace, whole, place, token, tls):
                place = after
                if told is not None:
                    yield told
                heard = time.monotonic()
            why = f"{address} has ended its stream"
        except (OSError, http.client.HTTPException) as error:
            why = f"{address}: {error}"
        failed(why)
        if patience_s is not None and time.monotonic() - heard > patience_s:
            raise UnavailableError(f"no events for {patience_s:.0f} s: {why}")
        time.sleep(PAUSE_S)


def _tls(cacert: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cacert or None)
    except OSError as error:
        raise InvalidArgumentError(f"cacert {cacert} is of no use: {error}") from None


def _connection(address: str, tls: Callable[[], ssl.SSLContext]) -> http.client.HTTPConnection:
    scheme, _, place = address.rpartition("://")
    host, port = split_address(place.rstrip("/"))
    if scheme == "https":
        return http.client.HTTPSConnection(host, port, timeout=SILENT_S, context=tls())
    if scheme not in ("", "http"):
        raise InvalidArgumentError(f"{address} is no address of HTTP")
    return http.client.HTTPConnection(host, port, timeout=SILENT_S)


def _read(
    address: str,
    namespace: str,
    whole: bool,
    since: str,
    token: str,
    tls: Callable[[], ssl.SSLContext],
) -> Iterator[tuple[Told | None, str]]:
    """One connection; yields what came, and the place after it."""
    query = {"snapshot": int(whole), **({"namespace": namespace} if namespace else {})}
    connection = _connection(address, tls)
    try:
        headers = {"Last-Event-ID": since} if since else {}
        headers |= {"Authorization": f"Bearer {token}"} if token else {}
        connection.request("GET", f"/api/v1/events?{urlencode(query)}", headers=headers)
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            said = answer.read(1_000).decode(errors="replace").strip()
            if answer.status == _UNAVAILABLE:
                raise OSError(said)
            if answer.status == http.client.UNAUTHORIZED:
                raise PermissionDeniedError(
                    f"{address}: the token is missing or wrong",
                    advice=f"Give --http-token-file, or {HTTP_TOKEN_VARIABLE}.",
                )
            kind = InvalidArgumentError if answer.status == 400 else UnavailableError
            raise kind(f"{address}: {said}", advice="Start the master with --events on.")
        buffer = b""
        while data := answer.read1(1 << 16):
            *blocks, buffer = (buffer + data).split(b"\n\n")
            for block in blocks:
                told, since = _parsed(block.decode(), since)
                yield told, since
    finally:
        connection.close()


def _parsed(block: str, place: str) -> tuple[Told | None, str]:
    name, data = "", ""
    for line in block.split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            place = value
        elif field == "event":
            name = value
        elif field == "data":
            data = value
    return (Told(name, json.loads(data), place) if data else None), place
