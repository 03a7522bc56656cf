"""The file of tenants, as a master follows it: looked at each second, from the start on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from kvstore.clocks import uptime
from kvstore.config.tenants import load_tenants
from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.network.tls import mark_of
from kvstore.tenants import TenantMatcher, TenantRule

log = logging.getLogger("kvstore.master")

LOOK_S: Final = 1.0

RETRY_S: Final = 10.0
"""After how long a file is read again that could not be used, and has not changed."""

Apply = Callable[[Sequence[TenantRule], TenantMatcher], None]


class _Found(NamedTuple):
    seen: object
    rules: Sequence[TenantRule]
    matcher: TenantMatcher


class TenantsFile:
    """See the module. Threads: the loop's."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            ConfigError: the file cannot be used.
        """
        self._path = path
        self._seen = mark_of(path)
        self.rules: Sequence[TenantRule] = load_tenants(path)
        """The last ones that could be used."""
        self._wrong = ""

    async def follow(self, apply: Apply) -> None:
        """Calls ``apply`` with other rules, when the file has changed; it may raise
        InvalidArgumentError. A file that became wrong is logged once; the rules stay."""
        wrong: object = None
        again_at = 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            mark = mark_of(self._path)
            if mark == self._seen or (mark == wrong and uptime() < again_at):
                continue
            self._use(await asyncio.to_thread(self._read), apply)  # a long file takes a second
            if self._wrong:
                wrong, again_at = mark, uptime() + RETRY_S

    def look(self, apply: Apply) -> None:
        """Looks at the file once, and waits until it is read."""
        if mark_of(self._path) != self._seen:
            self._use(self._read(), apply)

    def _read(self) -> _Found | str:
        """What the file says now, or why it says nothing."""
        try:
            seen = mark_of(self._path)
            rules = load_tenants(self._path)
            return _Found(seen, rules, TenantMatcher(rules))
        except (ConfigError, InvalidArgumentError) as error:
            return error.message

    def _use(self, found: _Found | str, apply: Apply) -> None:
        wrong = ""
        if isinstance(found, str):
            wrong = found
        else:
            try:
                if found.rules != self.rules:
                    apply(found.rules, found.matcher)
                    self.rules = found.rules
                self._seen = found.seen
            except InvalidArgumentError as error:
                wrong = error.message
        if wrong and wrong != self._wrong:
            log.warning("tenants_not_changed file=%s reason=%r", self._path, wrong)
        self._wrong = wrong
