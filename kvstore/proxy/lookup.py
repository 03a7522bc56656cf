"""Lookup of the stored part of a prompt, before a prefiller is used.

The fleet records are read in the background, never while a request waits. A lookup has a short
deadline. After several failures in a row lookups pause for a second, so that an unavailable store
does not delay requests. Every failure means "unknown", and the prompt goes to a prefiller.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from kvstore.calls.fleet_records import RECORDS_MAX, FleetRecord
from kvstore.calls.hint_envelopes import EnvelopeAction
from kvstore.client.async_client import AsyncClient
from kvstore.client.hints import ActionResult
from kvstore.config import ClientConfig
from kvstore.console.diagnostics.evidence import read_records
from kvstore.errors import KVStoreError, PermissionDeniedError
from kvstore.limits import FLEET_NAMESPACE, of_tenant
from kvstore.proxy import records
from kvstore.proxy.metrics import Metrics, clock_ms
from kvstore.proxy.records import StoredPrefix
from kvstore.runtime.breaker import Breaker
from kvstore.runtime.tasks import start_task

log = logging.getLogger("kvstore.proxy")

REFRESH_S: Final = 3.0
KEYS_AT_ONCE: Final = 512
"""Keys hashed before the event loop runs other tasks: some milliseconds."""

HINTS_AT_ONCE: Final = 8
"""Hints in progress at the store: few, because the client's threads are for lookups."""

CLIENT_TIMEOUT_MS: Final = 2_000
FAILURES_MAX: Final = 3
REST_MS: Final = 1_000


TIMEOUT_S = 0.02
"""Timeout of a lookup: a small part of the shortest prefill."""


class StoreLookup:
    """Lookups in the store. Usable between ``start`` and ``close``, in one event loop."""

    def __init__(
        self, master: str, *, metrics: Metrics, cluster: str = "", auth: str = "", tenant: str = ""
    ) -> None:
        """``tenant``: of the engines whose records are read; empty: of those without one."""
        self._metrics = metrics
        self._tenant = tenant
        self._fleet = of_tenant(tenant, FLEET_NAMESPACE)
        # Does not read the user's client settings: with them the client may contribute memory.
        self._client = AsyncClient(
            config=ClientConfig(
                master=master, cluster=cluster, timeout_ms=CLIENT_TIMEOUT_MS, auth=auth
            )
        )
        self._breaker = Breaker(failures_max=FAILURES_MAX, open_for=REST_MS)
        self._records: list[FleetRecord] = []
        self._denied: set[str] = set()
        """Fingerprints of the records whose namespaces may not be read."""
        self._hint_slots = asyncio.Semaphore(HINTS_AT_ONCE)
        self._reading: asyncio.Task[None] | None = None
        self._reachable = True

    def start(self) -> None:
        self._reading = start_task("fleet records", self._refresh_forever())

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading
        await self._client.close()

    @property
    def models(self) -> list[str]:
        """The models whose prompts can be looked up."""
        return sorted({name for record in self._records for name in record.models})

    async def stored_tokens(
        self, model: str, token_ids: Sequence[int], salt: str, request_id: str
    ) -> StoredPrefix | None:
        """Return the stored part of the prompt; None: unknown. Raises only CancelledError."""
        record = records.serving(self._records, model)
        if record is None:
            self._metrics.lookups.labels("unknown").inc()
            return None
        if not self._breaker.allows(clock_ms()):
            self._metrics.lookups.labels("failed").inc()
            return None
        self._breaker.begin(clock_ms())
        try:
            with self._metrics.lookup_seconds.time():
                keys = await _keys(record, token_ids, salt)
                blocks = await self._blocks(record, keys) if keys else 0
        except (KVStoreError, TimeoutError) as error:
            self._breaker.failed(clock_ms())
            self._metrics.lookups.labels("failed").inc()
            log.debug("lookup_failed id=%s reason=%s", request_id, str(error) or "late")
            if isinstance(error, PermissionDeniedError):
                self._log_denied(record, error)
            return None
        except BaseException:
            self._breaker.on_abandoned()
            raise
        self._breaker.succeeded()
        self._metrics.lookups.labels("held" if blocks else "missing").inc()
        return StoredPrefix(blocks, record.block_size)

    async def last_key(self, model: str, token_ids: Sequence[int], salt: str) -> bytes | None:
        """Return the key of the prompt's last full block; None: unknown, or there is none."""
        record = records.serving(self._records, model)
        keys = [] if record is None else await _keys(record, token_ids, salt)
        return keys[-1] if keys else None

    async def hint(self, model: str, action: EnvelopeAction) -> ActionResult | None:
        """Carry out a hint in the namespaces of the model's engines; None: unknown, or it failed.
        Raises only CancelledError."""
        record = records.serving(self._records, model)
        result = None
        if record is not None and not self._breaker.is_open(clock_ms()):
            try:
                chains = dict.fromkeys(record.namespaces, ())
                async with self._hint_slots:
                    (result,) = await self._client.apply_hints([action], chains)
            except KVStoreError as error:
                log.debug("hint_failed model=%s reason=%s", model, error)
        outcome = "failed" if result is None else str(result.outcome)
        self._metrics.hints.labels(action.action_id, outcome).inc()
        return result

    async def _blocks(self, record: FleetRecord, keys: list[bytes]) -> int:
        states = record.ends
        chains = [name for name in record.namespaces if name not in states]
        async with asyncio.timeout(TIMEOUT_S):
            reach = await self._client.match_all(keys, namespaces=chains, states=sorted(states))
        return reach.state if states else reach.matched

    async def _refresh_forever(self) -> None:
        while True:
            try:
                await self._read()
                self._logged(reachable=True)
            except KVStoreError as error:
                self._logged(reachable=False, reason=error)
            except Exception as error:
                if self._reachable:
                    log.exception("fleet_not_read")
                self._logged(reachable=False, reason=repr(error))
            await asyncio.sleep(REFRESH_S)

    async def _read(self) -> None:
        read = await self._client._carry_out(read_records, [self._fleet])
        found = [record for record in read if records.is_usable(record)]
        if len(found) != len(self._records):
            log.info("fleet_read records=%d unusable=%d", len(found), len(read) - len(found))
        self._records = found

    def _log_denied(self, record: FleetRecord, error: PermissionDeniedError) -> None:
        """Log the error once for each record."""
        if record.fingerprint not in self._denied and len(self._denied) < RECORDS_MAX:
            self._denied.add(record.fingerprint)
            log.warning(
                "lookup_refused model=%s: its prompts go to a prefiller reason=%s",
                record.model, error,
            )  # fmt: skip

    def _logged(self, *, reachable: bool, reason: object = "") -> None:
        if reachable != self._reachable:
            self._reachable = reachable
            if reachable:
                log.info("store_reachable")
            else:
                log.warning("store_unreachable reason=%s", reason)


async def _keys(record: FleetRecord, token_ids: Sequence[int], salt: str) -> list[bytes]:
    keys: list[bytes] = []
    for key in records.keys(record, token_ids, salt):
        keys.append(key)
        if len(keys) % KEYS_AT_ONCE == 0:
            await asyncio.sleep(0)
    return keys
