"""Which names a browser may have reached this port by.

A web page from elsewhere can have a name of its own point to this address (DNS rebinding). Its
browser then treats what is served here as part of that page, and lets it read it. The request says
by which name it came, in ``Host``; a name that the operator does not know is refused. An address is
no name, so nobody can have it point elsewhere.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

from kvstore.errors import InvalidArgumentError
from kvstore.network.addresses import split_address


class Hosts:
    """The names by which this port may be reached."""

    def __init__(self, names: Iterable[str]) -> None:
        """``names``: beside addresses and ``localhost``; without ports."""
        self._names = {"localhost", *(name.lower() for name in names)}

    def allow(self, given: Sequence[str]) -> bool:
        """``given``: the ``Host`` headers of a request."""
        if len(given) != 1:
            return False
        try:
            host = split_address(given[0], default_port=0)[0].lower()
        except InvalidArgumentError:
            return False
        return host in self._names or _is_address(host)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
