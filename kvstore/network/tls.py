"""TLS of servers whose files are replaced while they serve."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable

from kvstore.errors import ConfigError


def mark_of(path: str | os.PathLike[str]) -> object:
    """Differs once the file was replaced, changed, or given another mode; None: it is not there."""
    try:
        state = os.stat(path)  # follows links, as those by which Kubernetes replaces secrets
    except OSError:
        return None
    return state.st_mtime_ns, state.st_ino, state.st_size, state.st_mode


def renewing(
    load: Callable[[], ssl.SSLContext],
    mark: Callable[[], object],
    log: logging.Logger,
    of: str = "",
) -> ssl.SSLContext:
    """The context of a server. Each handshake looks whether there is something new, and uses it
    once it can be loaded; until then the old one serves.

    Args:
        load: makes a context of what is there now; raises ConfigError.
        mark: differs from the last one when there is something new.
        of: the file to name in the log when it was renewed; empty: that is logged elsewhere.

    Raises:
        ConfigError: what is there now cannot be used.
    """
    now = mark(), load()

    def choose(connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        del name, first
        nonlocal now
        if (found := mark()) != now[0]:
            now = found, now[1]
            try:
                now = found, load()
            except ConfigError as error:
                log.warning("certificate_not_renewed reason=%s", error)
            else:
                if of:
                    log.info("certificate_renewed cert=%s", of)
        connection.context = now[1]

    context = load()
    context.sni_callback = choose  # is called even if the client sends no server name
    return context


def no_passphrase() -> str:
    """Instead of a question at the terminal, for a key that has one."""
    raise ValueError("the key has a passphrase")
