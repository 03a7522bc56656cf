"""vLLM's events, by which a router knows what each engine can load from the store."""

from __future__ import annotations

from pathlib import Path

from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import StartEngine, prompt
from tests.e2e.engines.engine import transfer_config
from tests.support.cluster import Cluster

WHOLE = 4 * BLOCK_TOKENS
REPORTED = "BlockStored"


def test_all_engines_report_what_the_store_has_again_after_a_reset_or_a_restart(
    shared: Cluster, llama: Path, engine: StartEngine
) -> None:
    """``events`` are decoded by vLLM's decoder, and only those of the shared tier."""
    events = {"enable_kv_cache_events": True, "publisher": "null"}
    with engine(llama, transfer_config(shared.address), kv_events_config=events) as writer:
        writer.generate([prompt(41)])
        writer.saved()
        assert writer.events() == [{"kind": REPORTED, "keys": 4}]
        assert writer.reset()  # of vLLM's cache: AllBlocksCleared
        writer.generate([prompt(42, 5)])  # a step
        again = writer.events()
        assert again == [{"kind": REPORTED, "keys": 1}] * 4
    with engine(llama, transfer_config(shared.address), kv_events_config=events) as other:
        (found,) = other.generate([prompt(41)])
        assert found.cached == WHOLE
        assert other.events()[0] == {"kind": REPORTED, "keys": 4}
