"""The identity for which a server makes calls: each is checked by the permissions of the requesting
peer, then made with the server's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from kvstore.calls import Request
from kvstore.security import permissions
from kvstore.security.identity import Identity

_ACTING: Final[ContextVar[Identity | None]] = ContextVar("impersonated", default=None)


@contextlib.contextmanager
def impersonate(who: Identity | None) -> Iterator[None]:
    """Make calls in the block, and in threads and tasks started there, for ``who``; None: for this
    process."""
    before = _ACTING.set(who)
    try:
        yield
    finally:
        _ACTING.reset(before)


def impersonated() -> Identity | None:
    """Return the identity for which calls are made here; None: this process."""
    return _ACTING.get()


def check_acting(request: Request) -> None:
    """
    Raises:
        PermissionDeniedError: the peer may not make this call.
    """
    if (who := _ACTING.get()) is not None:
        permissions.check(who, request)
