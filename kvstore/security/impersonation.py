"""For whom a server makes its own calls: it checks each call by the rights of the peer that has
asked for it, before it makes it with its own."""

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
    """Calls inside the block, and in threads and tasks that it starts, are made for ``who``; None:
    for this process itself."""
    before = _ACTING.set(who)
    try:
        yield
    finally:
        _ACTING.reset(before)


def impersonated() -> Identity | None:
    """For whom calls are made here; None: for this process itself."""
    return _ACTING.get()


def check_acting(request: Request) -> None:
    """
    Raises:
        PermissionDeniedError: the peer may not make this call.
    """
    if (who := _ACTING.get()) is not None:
        permissions.check(who, request)
