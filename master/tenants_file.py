"""Watcher of the master's tenants file."""

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
    """Applies changes of the tenants file. Threads: the loop's."""

    def __init__(self, path: str) -> None:
        """Raise ConfigError if the file is not usable."""

        def load() -> _Tenants:
            rules = load_tenants(path)
            return _Tenants(rules, TenantMatcher(rules))

        def accept(before: _Tenants, new: _Tenants) -> _Tenants:
            if before.rules and not new.rules:  # the start of a copy, or a full disk
                raise ConfigError(
                    f"tenants {path}: the changed file contains no tenants", key="tenants"
                )
            return new

        self._file = WatchedFile("tenants", path, load, accept=accept)
        self._applied = self._file.value

    @property
    def rules(self) -> Sequence[TenantRule]:
        return self._applied.rules

    async def follow(self, apply: Apply) -> None:
        """Call ``apply`` with valid changed rules; it may raise InvalidArgumentError."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.poll_once(apply)

    def poll_once(self, apply: Apply) -> None:
        loaded = self._file.value
        if loaded is self._applied:
            return
        try:
            if loaded.rules != self.rules:
                apply(loaded.rules, loaded.matcher)
        except InvalidArgumentError as error:
            self._file.report(error.message)
        else:
            self._applied = loaded
            self._file.report("")
