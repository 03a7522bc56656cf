"""The identity for which a server makes calls: each is checked by the permissions of the requesting
peer, then made with the server's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Final

from kvstore.calls import Request
from kvstore.security import permissions
from kvstore.security.identity import ADMIN, Identity

ITSELF: Final = Identity("", frozenset((ADMIN,)))
"""The process that makes the calls: it may make all of them."""

_ACTING: Final = ContextVar("impersonated", default=ITSELF)


@contextlib.contextmanager
def impersonate(identity: Identity) -> Iterator[None]:
    """Calls inside the block, and in threads and tasks that it starts, are for ``identity``."""
    before = _ACTING.set(identity)
    try:
        yield
    finally:
        _ACTING.reset(before)


def impersonated() -> Identity:
    """The identity for which calls are made here; ``ITSELF`` by default."""
    return _ACTING.get()


def check_acting(request: Request) -> None:
    """
    Raises:
        PermissionDeniedError: the peer may not make this call.
    """
    permissions.check(_ACTING.get(), request)
