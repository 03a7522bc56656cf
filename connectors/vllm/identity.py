"""Computes this engine's fingerprint from what its workers say, for the connector and the tier.

    outdated ── the workers say what their weights are ──► known: used, and announced
       ▲                                                    │
       └── a call to the workers, or a reset of the caches ─┘        off: for a reason that stays

A new fingerprint is used only after a call of ``move``: the owner of the identity decides whether
the blocks that the engine holds allow it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from kvstore.client.sync import Client
from kvstore.connectors.engine.fleet import Announcer
from kvstore.connectors.vllm import fingerprint as fingerprints
from kvstore.connectors.vllm.core import Core
from kvstore.connectors.vllm.messages import WorkerIdentity
from kvstore.fleet import Record

log = logging.getLogger("vllm.kvstore")

ANNOUNCE_EVERY_S: Final = 30.0
"""The announcement is repeated, because a master may restart and the store may evict it."""

NO_PREFIX_CACHING: Final = (
    "prefix caching is off. vLLM turns it off by itself if a model or its attention backend cannot "
    "continue from a cached prefix; loaded blocks would then give wrong tokens. The connector "
    "cannot tell whether vLLM or --no-enable-prefix-caching turned it off."
)


class Identity:
    """See the module. For the scheduler's thread; any thread may read ``fingerprint``."""

    def __init__(
        self, client: Client, core: Core | None, engine: Record, *, model_id: str, what: str
    ) -> None:
        """
        Args:
            engine: this engine's fleet record, without the fields that depend on the workers.
            model_id: the operator's name for the weights; "": use their digest.
            what: the word for what is loaded and saved, in the log: blocks or chunks.
        """
        self.fingerprint = ""
        """The current fingerprint; "": not known, so that nothing is loaded or saved."""
        self.last = ""
        """The fingerprint that was used last; "": none so far."""
        self.is_outdated = True
        """Whether the workers have to be asked for their weights."""
        self.is_off = False
        self.announcer = Announcer(client, log, every_s=ANNOUNCE_EVERY_S)
        self._core = core
        self._engine = engine
        self._model_id = model_id
        self._what = what
        self._first_weights = ""
        for warning in fingerprints.hash_warnings(engine.description):
            log.warning("FLEET: %s", warning)

    def switch_off(self, reason: str) -> None:
        if not self.is_off:
            log.warning("this engine neither loads nor saves %s: %s", self._what, reason)
        self.is_off, self.is_outdated, self.fingerprint = True, False, ""

    def outdate(self) -> None:
        """The weights may have changed: nothing is loaded or saved until they are known again."""
        if not self.is_off:
            self.is_outdated, self.fingerprint = True, ""

    def ask(
        self, function: Callable[..., WorkerIdentity | None], *arguments: object
    ) -> list[WorkerIdentity]:
        """Asks the workers for their identities, between two steps; see ``Core.ask``. Switches this
        engine off if their weights cannot be identified."""
        assert self._core is not None
        hellos = [each for each in self._core.ask(function, *arguments) if each]
        self.is_outdated = False
        errors = [each.error for each in hellos if each.error]
        if errors or not hellos:
            self.switch_off(f"its weights could not be identified: {(errors or ['no answer'])[0]}")
        elif not all(each.prefix_caching for each in hellos):
            self.switch_off(NO_PREFIX_CACHING)
        return hellos

    def take(self, hellos: Sequence[WorkerIdentity]) -> Record | None:
        """The fleet record that follows from ``hellos`` (in the order of ranks), if its fingerprint
        differs from the last one; None: it is the same, and is used again."""
        described = self._engine.description
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

    def move(self, record: Record, **more: object) -> None:
        """Uses and announces this fingerprint from now on. Args: as for ``Announcer.announce``."""
        former, self.last = self.last, record.fingerprint
        if former:
            log.info("weights_changed fingerprint=%s before=%s", self.last, former)
        self.announcer.announce(record, former=former, **more)
        self.fingerprint = self.last
