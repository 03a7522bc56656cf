"""Computes this engine's fingerprint from its workers' reports, for the connector and the tier.

    outdated ── the workers report their weights ────────► known: used, and announced
       ▲                                                    │
       ├── a call to the workers that may replace them ─────┤        off: for a reason that stays
       │                                                    │
       └── samples differ ◄── doubted ◄── the caches reset ─┤
             ▲                   ▼                          │
             └─ differ ◄── samples are equal: used for loads; all are read ── equal ─► known

A new fingerprint is used only after a call of ``move``: the owner of the identity decides whether
the blocks that the engine holds allow it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import chain
from typing import Any, Final

from kvstore.calls.fleet_records import FleetRecord
from kvstore.client.client import Client
from kvstore.connectors.common.fleet import FleetAnnouncer
from kvstore.connectors.vllm.messages import WorkerIdentity
from kvstore.connectors.vllm.scheduler.engine_core import EngineCoreAccess
from kvstore.connectors.vllm.weights import fingerprint as fingerprints

log = logging.getLogger("vllm.kvstore")

NO_PREFIX_CACHING: Final = (
    "prefix caching is off. vLLM turns it off by itself if a model or its attention backend cannot "
    "continue from a cached prefix; loaded blocks would then give wrong tokens. The connector "
    "cannot tell whether vLLM or --no-enable-prefix-caching turned it off."
)

RANDOM_HASHES: Final = (
    "FLEET: %s starts from a random seed in each engine, so no two engines ever share a block. Set "
    "PYTHONHASHSEED to the same number everywhere, or use --prefix-caching-hash-algo sha256_cbor."
)


class FingerprintTracker:
    """See the module. For the scheduler's thread; any thread may read ``fingerprint``."""

    def __init__(
        self, client: Client, core: EngineCoreAccess | None, engine: FleetRecord, *, model_id: str,
        what: str, without_draft: Callable[[Collection[str]], Mapping[str, Any]] | None = None,
    ) -> None:  # fmt: skip
        """
        Args:
            engine: this engine's fleet record, without the fields that depend on the workers.
            without_draft: the record's description without these layers of a draft model; None: the
                pages of such layers are never stored separately.
            model_id: the operator's name for the weights; "": use their digest.
            what: the unit of loads and saves in the log: blocks or chunks.
        """
        self.fingerprint = ""
        """The current fingerprint; "": not known, so that nothing is loaded or saved."""
        self.last = ""
        """The fingerprint that was used last; "": none so far."""
        self.draft = ""
        """Digest of the workers' draft model; see ``fingerprint.draft_of``."""
        self.is_outdated = True
        """Whether the workers must report their weights."""
        self.is_doubted = False
        """Whether the workers must compare samples of their weights."""
        self.is_off = False
        self.announcer = FleetAnnouncer(client, log)
        self._core = core
        self._engine = engine
        self._without_draft = without_draft
        self._model_id = model_id
        self._what = what
        self._first_weights = ""
        self._checks: dict[int, int] = {}
        """By rank: the number of the check of its weights in progress."""
        algorithm = str(engine.description.get("hash_algorithm"))
        if fingerprints.is_random(algorithm):
            log.warning(RANDOM_HASHES, algorithm)

    def switch_off(self, reason: str) -> None:
        if not self.is_off:
            log.warning("this engine neither loads nor saves %s: %s", self._what, reason)
        self.is_off, self.is_outdated, self.fingerprint = True, False, ""

    @property
    def is_verified(self) -> bool:
        """Whether all weights of all workers have been read since they were doubted."""
        return bool(self.fingerprint) and not self.is_doubted and not self._checks

    def invalidate(self) -> None:
        """Load and save nothing until the weights, which may have changed, are known again."""
        self._checks, self.is_doubted = {}, False
        if not self.is_off:
            self.is_outdated, self.fingerprint = True, ""

    def require_recheck(self) -> None:
        """Require a recheck after a reset of the caches: engines whose weights are replaced without
        a call to the workers reset them afterwards."""
        self.is_doubted = bool(self.fingerprint)

    def recheck(self, function: Callable[..., tuple[int, int] | None], *arguments: object) -> None:
        """Request samples of the weights from the workers, between two steps, and start a check of
        all of them. See ``EngineCoreAccess.call``."""
        assert self._core is not None
        self._checks = dict(each for each in self._core.call(function, *arguments) if each)
        self.is_doubted = False
        if not all(self._checks.values()):
            self.invalidate()

    def take_verdicts(self, verdicts: Mapping[int, tuple[int, bool]]) -> None:
        """Handle the results of checks, by rank: each check's number, and whether the weights are
        the same."""
        for rank, (number, same) in verdicts.items():
            if self._checks.get(rank) == number:
                del self._checks[rank]
                if not same:
                    log.warning("weights_changed_untracked rank=%d", rank)
                    self.invalidate()

    def start(
        self, function: Callable[..., WorkerIdentity | None], *arguments: object
    ) -> list[WorkerIdentity]:
        """Request the identities of the workers, between two steps; see ``EngineCoreAccess.call``.
        Switches this engine off if their weights cannot be identified."""
        assert self._core is not None
        hellos = [each for each in self._core.call(function, *arguments) if each]
        self.is_outdated = False
        errors = [hello.error for hello in hellos if hello.error]
        if errors or not hellos:
            self.switch_off(f"its weights could not be identified: {(errors or ['no answer'])[0]}")
        elif not all(hello.prefix_caching for hello in hellos):
            self.switch_off(NO_PREFIX_CACHING)
        return hellos

    def take(self, hellos: Sequence[WorkerIdentity]) -> FleetRecord | None:
        """Return the fleet record for ``hellos`` (in the order of ranks), if its fingerprint
        differs from the last one; None: it is the same, and is used again."""
        self.draft = fingerprints.draft_of(hellos)
        described = self._engine.description
        apart = [hello.draft.layers for hello in hellos if hello.draft is not None]
        if apart and self._without_draft is not None:
            described = self._without_draft(set(chain.from_iterable(apart)))
        weights = fingerprints.identified(described, hellos)["weights"]
        self._first_weights = self._first_weights or weights
        name = self._model_id
        if name and weights != self._first_weights:  # the name is that of the first weights
            name = f"{name}, then {weights}"
        described = fingerprints.identified(described, hellos, name=name)
        fingerprint = fingerprints.fingerprint(described, hellos)
        if fingerprint != self.last:
            return self._engine._replace(fingerprint=fingerprint, description=described)
        self.fingerprint = fingerprint
        return None

    def move(self, record: FleetRecord, **more: object) -> None:
        """Use and announce this fingerprint from now on. Args: as for
        ``FleetAnnouncer.announce``."""
        former, self.last = self.last, record.fingerprint
        if former:
            log.info("weights_changed fingerprint=%s before=%s", self.last, former)
        self.announcer.announce(record, former=former, **more)
        self.fingerprint = self.last
