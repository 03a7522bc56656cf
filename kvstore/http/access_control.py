"""Access control for HTTP ports of masters, nodes and the proxy.

A request that changes something is *trusted* if it has the HTTP token. If no token is configured,
connections from loopback are trusted. With a token loopback needs it too, because behind a proxy on
this host every request comes from loopback.

A browser on this host also connects from loopback, for any page. So requests other than health and
metrics are refused under unknown host names (``AllowedHosts``), and those that need trust also if
the browser reports another site as origin. Without CORS headers other sites can neither send JSON
or ``Authorization``, nor read responses."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from kvstore.errors import InvalidArgumentError, PermissionDeniedError
from kvstore.http.connection_limiter import Handler
from kvstore.http.ports import HttpSecurity
from kvstore.runtime import host
from kvstore.runtime.addresses import is_address, split_address
from kvstore.security.credentials import shown_identity
from kvstore.security.identity import ADMIN, UNAUTHENTICATED, Identity, validated_identity
from kvstore.security.impersonation import impersonate
from kvstore.security.permissions import check_numbers
from kvstore.security.revocation_list import RevocationList

HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers of every response."""

FORGED: Final = "A page of another site has made this request.\n"
UNKNOWN: Final = (
    "This needs a certificate of this cluster: curl --cert FILE --cacert FILE, or import what "
    "openssl pkcs12 -export -in FILE writes into the browser. "
)
LOCKED: Final = "This needs the token of this port: Authorization: Bearer TOKEN\n"


class AccessHints(NamedTuple):
    """Hints for users whose requests are refused."""

    names: str
    token: str


OF_MASTER: Final = AccessHints(
    "or have the master know the name: kvstore-master --http-names NAME",
    "kvstore-master --http-token-file FILE",
)


class AllowedHosts:
    """The host names that requests to this port may use.

    A web page can point its own name to this address (DNS rebinding) to read responses as part of
    its site. So requests with an unknown name in ``Host`` are refused. Addresses cannot be
    redirected in this way.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Create it. ``names``: names without ports besides addresses and ``localhost``."""
        self._names = {"localhost", *(name.lower() for name in names)}

    def allow(self, given: Sequence[str]) -> bool:
        """Return whether the name is allowed. ``given``: the ``Host`` headers of a request."""
        if len(given) != 1:
            return False
        try:
            host = split_address(given[0], default_port=0)[0].lower()
        except InvalidArgumentError:
            return False
        return host in self._names or is_address(host)


_STILL: Final[ContextVar[Callable[[], bool]]] = ContextVar("still", default=lambda: True)


def identity_still_valid() -> bool:
    """Return whether the requester's identity is still valid, for long responses."""
    return _STILL.get()()


HTTP_TOKEN: Final = validated_identity("http-token", [ADMIN])
"""The identity of requests with a port's HTTP token, if authentication is enabled."""


class AccessControl:
    """The rules of a port whose requests have no identities. Use it in one event loop at a time."""

    def __init__(
        self,
        hosts: AllowedHosts | None,
        *,
        token: str = "",
        reads: str = "all",
        advice: AccessHints = OF_MASTER,
    ) -> None:
        """
        Args:
            hosts: the names by which browsers may come; None: any. Use None only if nothing can be
                changed, or only with a token, which no page of another site has.
            token: the token of this port; empty: there is none.
            reads: who may read: ``all``, or those who have the ``token``.
            advice: advice for those who are refused.
        """
        self._hosts = hosts
        self._token = token.encode()
        self._reads_need_token = reads == "token"
        self._advice = advice

    def name_of(self, request: web.Request) -> str:
        """The name of the identity that sends the request; empty: it has none."""
        return ""

    def require_known_host(self, handler: Handler) -> Handler:
        """Guard public content, such as the page: any request with an allowed host name."""
        return self._guarded(handler, self._misdirected)

    def require_read(self, handler: Handler) -> Handler:
        """Guard reads: the request has an allowed host name, and may read."""
        return self._guarded(self._acting(handler), self._misdirected, self._unread)

    def require_write(self, handler: Handler) -> Handler:
        """Guard changes: the request is trusted."""
        return self._guarded(self._acting(handler), self.check_trusted)

    def require_all_namespaces(self, handler: Handler) -> Handler:
        """Guard content about all namespaces: as ``require_read``, for identities that may see
        it."""
        return self._guarded(self._acting(handler), self._misdirected, self._unread, self._blind)

    def check_trusted(self, request: web.Request) -> web.Response | None:
        """Return the refusal of a request that is not trusted; None: it is."""
        return (
            self._misdirected(request) or _cross_site_refusal(request) or self._untrusted(request)
        )

    def require_metrics(self, handler: Handler) -> Handler:
        """Guard metrics: the request may read, under any host name."""
        return self._guarded(handler, self._unread, self._blind)

    def _guarded(
        self, handler: Handler, *checks: Callable[[web.Request], web.Response | None]
    ) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            for check in checks:
                if (refusal := check(request)) is not None:
                    return refusal
            return await handler(request)

        return guarded

    def _acting(self, handler: Handler) -> Handler:
        """The handler, run for the identity of its request."""
        return handler

    def _blind(self, request: web.Request) -> web.Response | None:
        """The refusal of a request that may not see all namespaces; None: it may."""
        return None

    def _misdirected(self, request: web.Request) -> web.Response | None:
        if self._hosts is None or self._hosts.allow(request.headers.getall("Host", [])):
            return None
        return _refusal(421, f"This name is not known here. Use an address, {self._advice.names}\n")

    def _unread(self, request: web.Request) -> web.Response | None:
        if not self._reads_need_token or self._has_token(request):
            return None
        return _unauthorized()

    def _untrusted(self, request: web.Request) -> web.Response | None:
        if self._token:
            return None if self._has_token(request) else _unauthorized()
        if is_loopback(request):
            return None
        return _refusal(
            403,
            "Without a token this is answered from loopback only. Give this port a token: "
            f"{self._advice.token}\n",
        )

    def _has_token(self, request: web.Request) -> bool:
        given = request.headers.getall("Authorization", [])
        if len(given) != 1 or not self._token:
            return False
        scheme, _, token = given[0].partition(" ")
        sent = token.strip().encode("utf-8", "surrogateescape")
        return scheme.lower() == "bearer" and hmac.compare_digest(sent, self._token)


class IdentityAccessControl(AccessControl):
    """The rules of a port whose requests have identities: loopback and the settings of reads do not
    count. Every request except those for health and for the page itself needs an identity, or the
    token, and its handler runs for that identity (``kvstore.security.impersonation``)."""

    def __init__(
        self, hosts: AllowedHosts | None, revoked: RevocationList, *, token: str = ""
    ) -> None:
        super().__init__(hosts, token=token)
        self._revoked = revoked

    def name_of(self, request: web.Request) -> str:
        return self._identity_of(request).name

    def _acting(self, handler: Handler) -> Handler:
        async def acting(request: web.Request) -> web.StreamResponse:
            identity = self._identity_of(request)
            if not identity.name:  # revoked since it was checked
                return self._unidentified()
            still = _STILL.set(lambda: bool(self._identity_of(request).name))
            try:
                with impersonate(identity):
                    return await handler(request)
            finally:
                _STILL.reset(still)

        return acting

    def _identity_of(self, request: web.Request) -> Identity:
        """The identity of the request's certificate or token; UNAUTHENTICATED: it has neither, or
        the identity is revoked or has ended."""
        if self._has_token(request):
            return HTTP_TOKEN
        transport = request.transport
        shown = None if transport is None else transport.get_extra_info("peercert")
        identity = shown_identity(shown)
        is_out = identity.until <= time.time() or self._revoked.has(identity)
        return UNAUTHENTICATED if is_out else identity

    def _blind(self, request: web.Request) -> web.Response | None:
        identity = self._identity_of(request)
        if not identity.name:  # revoked since it was checked
            return self._unidentified()
        try:
            check_numbers(identity)
        except PermissionDeniedError as error:
            return _refusal(403, f"{error}\n")
        return None

    def _unread(self, request: web.Request) -> web.Response | None:
        return None if self._identity_of(request).name else self._unidentified()

    _untrusted = _unread

    def _unidentified(self) -> web.Response:
        if self._token:
            return _unauthorized(f"{UNKNOWN}The token of this port will do, too.\n")
        return _unauthorized(f"{UNKNOWN}Or give this port --http-token-file FILE.\n", "Certificate")


def is_loopback(request: web.Request) -> bool:
    """Return whether the connection comes from a loopback address; headers do not count."""
    peer = None if request.transport is None else request.transport.get_extra_info("peername")
    address = str(peer[0]).partition("%")[0].removeprefix("::ffff:") if peer else ""
    return host.is_loopback(address)


def _cross_site_refusal(request: web.Request) -> web.Response | None:
    """Return the refusal of a request that a browser sent for a page of another site; None:
    allowed."""
    sites = request.headers.getall("Sec-Fetch-Site", [])
    origins = request.headers.getall("Origin", [])
    if all(site.lower() in ("none", "same-origin") for site in sites) and all(
        _netloc(origin) == request.host.lower() for origin in origins
    ):
        return None
    return _refusal(403, FORGED)


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _refusal(status: int, text: str) -> web.Response:
    return web.Response(status=status, text=text, headers=HEADERS)


def _unauthorized(text: str = LOCKED, scheme: str = "Bearer") -> web.Response:
    headers = {**HEADERS, "WWW-Authenticate": f'{scheme} realm="kvstore"'}
    return web.Response(status=401, text=text, headers=headers)


def access_control(secured: HttpSecurity, hosts: AllowedHosts | None) -> AccessControl:
    """Return the access control of a port. Raises ConfigError."""
    if secured.auth:
        revoked = RevocationList(secured.revoked)
        return IdentityAccessControl(hosts, revoked, token=secured.token)
    return AccessControl(hosts, token=secured.token, reads=secured.reads)
