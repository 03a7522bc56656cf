"""The file of tenants, as a master follows it: looked at each second, from the start on."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.config.tenants import load_tenants
from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.tenants import TenantRule

log = logging.getLogger("kvstore.master")

LOOK_S: Final = 1.0


class TenantsFile:
    """See the module. Threads: the loop's."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            ConfigError: the file cannot be used.
        """
        self._path = path
        self._seen = self._state()
        self.rules: Sequence[TenantRule] = load_tenants(path)
        """The last ones that could be used."""
        self._wrong = ""

    def _state(self) -> tuple[int, int, int]:
        state = os.stat(self._path) if os.path.exists(self._path) else None
        return (state.st_mtime_ns, state.st_ino, state.st_size) if state else (0, 0, 0)

    async def follow(self, apply: Callable[[Sequence[TenantRule]], None]) -> None:
        """Calls ``apply`` with other rules, when the file has changed; it may raise
        InvalidArgumentError. A file that became wrong is logged once; the rules stay."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look(apply)

    def look(self, apply: Callable[[Sequence[TenantRule]], None]) -> None:
        try:
            seen = self._state()
            if seen == self._seen:
                return
            rules = load_tenants(self._path)
            if rules != self.rules:
                apply(rules)
                self.rules = rules
            self._seen = seen
        except (ConfigError, InvalidArgumentError) as error:
            self._tell(error.message)
        except OSError as error:
            self._tell(str(error))
        else:
            self._wrong = ""

    def _tell(self, wrong: str) -> None:
        if wrong != self._wrong:
            self._wrong = wrong
            log.warning("tenants_not_changed file=%s reason=%r", self._path, wrong)
