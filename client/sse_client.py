"""Object events over HTTP: the client of ``GET /api/v1/events``."""

from __future__ import annotations

import contextlib
import functools
import http.client
import itertools
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlencode

from kvstore.config import HTTP_TOKEN_VARIABLE
from kvstore.errors import InvalidArgumentError, PermissionDeniedError, UnavailableError
from kvstore.runtime.addresses import join_address, split_address
from kvstore.runtime.cancellation import current
from kvstore.security.credentials import MASTER_NAME, Credentials

CONNECT_S: Final = 2.0
"""Connection timeout: a firewall may drop packets."""

SILENT_S: Final = 7.0
"""A stream that is silent for this long is dead: heartbeats come every 2 s."""

PAUSE_S: Final = 0.5

BLOCK_BYTES_MAX: Final = 1 << 20


class StreamEvent(NamedTuple):
    name: str
    """``stored``, ``removed``, ``cleared``, ``complete``, ``gap`` or ``begin``."""
    data: dict[str, Any]
    """``stored``: ``namespace``, ``key``, ``parent`` (both in hex; None: no parent), ``size`` and
    ``depth``; ``removed``: ``namespace`` and ``key``."""
    position: str
    """``EPOCH-NUMBER``, to resume after; empty: none yet."""


def follow(
    addresses: Iterable[str],
    *,
    namespace: str = "",
    under: str = "",
    snapshot: bool = True,
    since: str = "",
    patience_s: float | None = None,
    token: str = "",
    cacert: str = "",
    auth: str = "",
    on_received: Callable[[], None] = lambda: None,
    failed: Callable[[str], None] = lambda _: None,
) -> Iterator[StreamEvent]:
    """Yield events across restarts of masters and elections. Blocks.

    Setting the ``CancelToken`` of the thread closes the present connection.

    Args:
        addresses: ``host:port`` or ``https://host:port`` of each master's HTTP, one of which leads.
            Or an iterator of addresses to try; when it ends, so does ``follow``.
        namespace: only objects of this namespace; empty: of all.
        under: only namespaces with this prefix.
        snapshot: begin with a snapshot of all visible objects, and repeat it whenever events were
            missed (``cleared``, ``stored`` ..., ``complete``); applied in sequence, the events give
            the exact set.
        since: resume after this position.
        patience_s: how long no master may reply; None: forever.
        token: the HTTP token of these ports, if required.
        cacert: PEM file of the trusted CAs; empty: those of the system.
        auth: the certificate file for masters with authentication; their addresses are ``https``,
            and their certificates must be of its CA. Empty: none.
        on_received: called at each sign of life, at least every 2 s.
        failed: called with the reason when a connection fails or ends, before the next attempt.

    Raises:
        UnavailableError: ``patience_s`` is over, or a master has no events; PermissionDeniedError:
            the token is missing or wrong; InvalidArgumentError: ``since``, ``cacert`` or an address
            is wrong; ConfigError: ``auth`` cannot be used; ClosedError: the thread's
            ``CancelToken`` is set.
    """
    tls = Credentials(auth).client if auth else functools.cache(lambda: _tls(cacert))
    name = MASTER_NAME if auth else ""
    query = {"snapshot": int(snapshot), "namespace": namespace, "under": under}
    path = f"/api/v1/events?{urlencode({name: value for name, value in query.items() if value})}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    place = since
    last = time.monotonic()
    reason = "no master replies"
    for address in itertools.cycle(addresses) if isinstance(addresses, Sequence) else addresses:
        try:
            for event, after in _read(address, path, place, headers, tls, name):
                place = after
                on_received()
                if event is not None:
                    yield event
                last = time.monotonic()
            reason = f"{address} has ended its stream"
        except (OSError, http.client.HTTPException) as error:
            reason = f"{address}: {error}"
        failed(reason)
        if patience_s is not None and time.monotonic() - last > patience_s:
            raise UnavailableError(f"no events for {patience_s:.0f} s: {reason}")
        time.sleep(PAUSE_S)


def _tls(cacert: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=cacert or None)
    except OSError as error:
        raise InvalidArgumentError(f"cacert {cacert} is of no use: {error}") from None


def _read(
    address: str,
    path: str,
    since: str,
    headers: dict[str, str],
    tls: Callable[[], ssl.SSLContext],
    name: str,
) -> Iterator[tuple[StreamEvent | None, str]]:
    """Yield each event of one connection (None: a heartbeat) and its position. ``name``: expected
    in the master's certificate; empty: that in ``address``."""
    connection = _connect(address, tls, name)
    with contextlib.closing(connection), _cut_by_stop(connection.sock):
        host, port = connection.sock.getpeername()[:2]
        headers = headers | ({"Last-Event-ID": since} if since else {})
        response = _ask(connection, path, headers)
        if response.status == http.client.MISDIRECTED_REQUEST:
            # The master does not know the name in the ``Host`` header. An address always passes.
            response.read()
            response = _ask(connection, path, headers | {"Host": join_address(host, port)})
        if response.status != http.client.OK:
            text = response.read(1_000).decode(errors="replace").strip()
            if response.status == http.client.SERVICE_UNAVAILABLE:
                raise OSError(text)
            if response.status == http.client.FORBIDDEN:
                raise PermissionDeniedError(f"{address}: {text}")
            if response.status == http.client.UNAUTHORIZED:
                raise PermissionDeniedError(
                    f"{address}: the token is missing or wrong",
                    advice=f"Set {HTTP_TOKEN_VARIABLE}.",
                )
            if response.status == http.client.BAD_REQUEST:
                raise InvalidArgumentError(f"{address}: {text}")
            raise UnavailableError(
                f"{address}: {text}", advice="Start the master with --events on."
            )
        buffer = b""
        while data := response.read1(1 << 16):
            *blocks, buffer = (buffer + data).split(b"\n\n")
            if len(buffer) > BLOCK_BYTES_MAX:
                raise OSError("it sends no event stream")
            for block in blocks:
                try:
                    event, since = _parsed(block.decode(), since)
                except ValueError as error:
                    raise OSError(f"it sends no event stream: {error}") from None
                yield event, since


def _connect(
    address: str, tls: Callable[[], ssl.SSLContext], name: str
) -> http.client.HTTPConnection:
    scheme, _, place = address.rpartition("://")
    host, port = split_address(place.rstrip("/"))
    if scheme not in ("", "http", "https"):
        raise InvalidArgumentError(f"{address} is no address of HTTP")
    made = http.client.HTTPConnection(host, port, timeout=CONNECT_S)
    made.connect()
    if scheme == "https" or (name and not scheme):
        made.sock = tls().wrap_socket(made.sock, server_hostname=name or host)
    made.sock.settimeout(SILENT_S)
    return made


def _ask(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str]
) -> http.client.HTTPResponse:
    connection.request("GET", path, headers=headers)
    return connection.getresponse()


@contextlib.contextmanager
def _cut_by_stop(sock: socket.socket) -> Iterator[None]:
    def cut() -> None:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)

    stop = current()
    with stop.on_cancel(cut) if stop is not None else contextlib.nullcontext():
        yield


def _parsed(block: str, position: str) -> tuple[StreamEvent | None, str]:
    name, data = "", ""
    for line in block.split("\n"):
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "id":
            position = value
        elif field == "event":
            name = value
        elif field == "data":
            data = value
    return (StreamEvent(name, json.loads(data), position) if data else None), position
