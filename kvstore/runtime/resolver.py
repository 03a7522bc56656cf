"""Resolution of host names, and connections to hosts, within a deadline.

``getaddrinfo`` has no deadline: if the name server is silent, it blocks for ten seconds and more.
So it runs in a thread per name, and callers wait until their deadlines. If the name server is
silent or fails, the last known addresses are used. Numeric addresses need no thread.

A lookup thread ends when the resolver gives up; the process can end before.
"""

from __future__ import annotations

import _thread
import os
import socket
import threading
from collections import OrderedDict
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple

from kvstore.errors import without_frames
from kvstore.runtime.addresses import join_address, split_address
from kvstore.runtime.cancellation import check_current, current
from kvstore.runtime.clock import uptime

PATIENCE_S: Final = 0.3
"""Time until a silent name server is ignored and the last known addresses are used. A name server
in a cluster answers within milliseconds; a lost datagram is sent again after 5 s."""

RESOLVE_S: Final = 5.0
"""Time that a starting program waits for the addresses of a name."""

REMEMBERED_MAX: Final = 1_024
"""Names whose addresses are remembered; nodes choose the names that they advertise."""

LOOKUPS_MAX: Final = 64
"""Names looked up at once, each by a thread."""


_TEMPORARY: Final = (socket.EAI_AGAIN, socket.EAI_SYSTEM)


class NameResolutionError(OSError):
    """A name without addresses, or a timeout. ``str`` is the reason."""


class Address(NamedTuple):
    """An address for ``socket.connect``."""

    family: socket.AddressFamily
    place: tuple[str, int] | tuple[str, int, int, int]

    @property
    def text(self) -> str:
        """Numeric ``host:port``."""
        return join_address(self.place[0], self.place[1])


_Resolved = list[Address] | socket.gaierror


class _Resolver:
    """Pending lookups, and the addresses of earlier ones. Threads: any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[str, list[SimpleQueue[_Resolved | None]]] = {}
        """The waiting callers of each pending lookup."""
        self.found: OrderedDict[str, list[Address]] = OrderedDict()

    def request(self, host: str) -> SimpleQueue[_Resolved | None]:
        """Return a queue for the result. Raises NameResolutionError: too many pending lookups."""
        answer: SimpleQueue[_Resolved | None] = SimpleQueue()
        with self.lock:
            waiting = self.waiting.get(host)
            if waiting is not None:
                waiting.append(answer)
                return answer
            if len(self.waiting) >= LOOKUPS_MAX:
                raise NameResolutionError(
                    f"{host!r} is not looked up: the name server has not answered for "
                    f"{LOOKUPS_MAX} other names"
                )
            # Started under the lock, so that a signal cannot leave an entry without a thread.
            # ``Thread.start`` waits in Python code, which a signal can interrupt.
            self.waiting[host] = [answer]
            try:
                _thread.start_new_thread(self._resolve, (host,))
            except BaseException:
                self.waiting.pop(host, None)
                raise
        return answer

    def _resolve(self, host: str) -> None:
        try:
            rows = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            answer: _Resolved = [Address(row[0], row[4]) for row in rows]  # type: ignore[arg-type]
        except socket.gaierror as error:
            answer = error
        except (OSError, UnicodeError) as error:
            answer = socket.gaierror(socket.EAI_FAIL, str(error))
        with self.lock:
            if isinstance(answer, list):
                self.found[host] = answer
                self.found.move_to_end(host)
                while len(self.found) > REMEMBERED_MAX:
                    self.found.popitem(last=False)
            waiting = self.waiting.pop(host, [])
        for queue in waiting:
            queue.put(answer)


_lookups = _Resolver()


def _begin_anew() -> None:
    """Reset in the child of a fork: there are no lookup threads, and a lock may be held forever."""
    global _lookups  # noqa: PLW0603  # the parent's is unusable
    _lookups = _Resolver()


os.register_at_fork(after_in_child=_begin_anew)


def resolve(host: str, port: int, deadline: float) -> list[Address]:
    """Return the addresses of ``host``, best first, each with ``port``; at least one. Threads: any;
    a cancelled call ends the wait.

    Args:
        host: a name or a numeric address, without brackets.
        deadline: a ``uptime()`` value.

    Raises:
        NameResolutionError: it has no address, or no name server answered by the deadline.
        ClosedError: the call was cancelled.
    """
    digits = _in_digits(host)
    if digits is not None:
        return [_with_port(digits, port)]
    lookups = _lookups
    old = lookups.found.get(host)
    try:
        answer = _wait(
            lookups.request(host), min(deadline, uptime() + PATIENCE_S) if old else deadline
        )
    except NameResolutionError:
        if not old:
            raise
        answer = None
    if old and (answer is None or getattr(answer, "errno", 0) in _TEMPORARY):
        answer = old
    if isinstance(answer, list):
        return [_with_port(address, port) for address in answer]
    if answer is None:
        raise NameResolutionError(f"no name server has answered for {host!r}")
    raise NameResolutionError(f"the name {host!r} has no address: {answer.strerror}")


def _wait(answer: SimpleQueue[_Resolved | None], until: float) -> _Resolved | None:
    """Return the result; None: none by ``until``."""
    left_s = max(0.0, until - uptime())
    stop = current()
    try:
        if stop is None:
            return answer.get(timeout=left_s)
        with stop.on_cancel(lambda: answer.put(None)):
            said = answer.get(timeout=left_s)
        check_current()
    except Empty:
        return None
    return said


def connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to the first address of ``host`` that accepts a TCP connection. The socket has a
    timeout, which the caller changes.

    The remaining time is divided among the addresses.

    Raises:
        TimeoutError: no address accepted a connection in time.
        OSError: every connection failed; NameResolutionError: as ``resolve``.
        ClosedError: as ``resolve``.
    """
    addresses = resolve(host, port, deadline)
    failure: OSError | None = None
    for number, address in enumerate(addresses):
        left_s = deadline - uptime()
        if left_s <= 0 and failure is not None:
            break
        sock = socket.socket(address.family, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(left_s, 1e-3) / (len(addresses) - number))
            sock.connect(address.place)
        except OSError as error:
            sock.close()
            failure = without_frames(error)
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    assert failure is not None
    try:
        raise failure
    finally:
        del failure  # its traceback refers to this frame


def limit_silence(sock: socket.socket, seconds: int) -> None:
    """Break a TCP connection, also an idle one, whose peer acknowledges nothing for so long: its
    host has vanished, or the network drops its packets. Otherwise the kernel tries for minutes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, seconds * 1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, seconds // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, seconds // 2)


def grpc_target(address: str, deadline: float) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the gRPC target for ``host:port``, with the addresses that this host's resolver knows
    (gRPC's own reads ``/etc/hosts`` and search domains differently), and the options of a channel
    that uses it: the name stays the authority, against which certificates are checked.

    Raises:
        NameResolutionError, ClosedError: as ``resolve``.
    """
    host, port = split_address(address)
    if _in_digits(host) is not None:
        return address, ()
    found = resolve(host, port, deadline)
    if all(each.family == socket.AF_INET for each in found):
        target = "ipv4:" + ",".join(each.text for each in found)
    else:  # a target has one family, in which IPv4 addresses are written as mapped ones
        target = "ipv6:" + ",".join(
            f"[::ffff:{each.place[0]}]:{port}" if each.family == socket.AF_INET else each.text
            for each in found
        )
    return target, (("grpc.default_authority", address),)


def _in_digits(host: str) -> Address | None:
    """Return the numeric address in ``host``; None: it is a name."""
    try:
        version = ip_address(host.partition("%")[0]).version
    except ValueError:
        return None
    if version == 4:
        return Address(socket.AF_INET, (host, 0))
    _, zone, scope = host.partition("%")
    if zone:
        try:
            index = (
                int(scope) if scope.isascii() and scope.isdigit() else socket.if_nametoindex(scope)
            )
        except OSError as error:
            raise NameResolutionError(f"{host!r} names no interface of this host") from error
        return Address(socket.AF_INET6, (host.partition("%")[0], 0, 0, index))
    return Address(socket.AF_INET6, (host, 0, 0, 0))


def _with_port(address: Address, port: int) -> Address:
    host, _, *rest = address.place
    return Address(address.family, (host, port, *rest))  # type: ignore[arg-type]  # as above
