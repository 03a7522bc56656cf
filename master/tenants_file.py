"""The file of tenants, as a master follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore.calls.tenants import TenantMatcher, TenantRule
from kvstore.config.tenants import load_tenants
from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.runtime.watched_files import LOOK_S, WatchedFile

Apply = Callable[[Sequence[TenantRule], TenantMatcher], None]


class _Tenants(NamedTuple):
    rules: Sequence[TenantRule]
    matcher: TenantMatcher


class TenantsFileWatcher:
    """See the module. Threads: the loop's."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            ConfigError: the file cannot be used.
        """

        def load() -> _Tenants:
            rules = load_tenants(path)
            return _Tenants(rules, TenantMatcher(rules))

        def accept(before: _Tenants, new: _Tenants) -> _Tenants:
            if before.rules and not new.rules:  # what a copy begins with, and a full disk leaves
                raise ConfigError(f"tenants {path} names no tenant any more", key="tenants")
            return new

        self._file = WatchedFile("tenants", path, load, accept=accept)
        self._applied = self._file.value

    @property
    def rules(self) -> Sequence[TenantRule]:
        """The last ones that could be used."""
        return self._applied.rules

    async def follow(self, apply: Apply) -> None:
        """Calls ``apply`` with other rules, when the file has changed; it may raise
        InvalidArgumentError. With a file that became wrong the rules stay."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.poll_once(apply)

    def poll_once(self, apply: Apply) -> None:
        """As ``follow``, once."""
        found = self._file.value
        if found is self._applied:
            return
        try:
            if found.rules != self.rules:
                apply(found.rules, found.matcher)
        except InvalidArgumentError as error:
            self._file.report(error.message)
        else:
            self._applied = found
            self._file.report("")
