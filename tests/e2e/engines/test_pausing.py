"""Pausing, sleeping and resetting an engine while blocks are loaded into its cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from examples.tiny import BLOCK_TOKENS
from tests.e2e.engines.conftest import StartEngine, prompt
from tests.e2e.engines.engine import transfer_config
from tests.support.cluster import Cluster

WHOLE = 4 * BLOCK_TOKENS

PAUSES = {
    "abort": 'core.pause_scheduler("abort", clear_cache=True); core.resume_scheduler()',
    "keep": 'core.pause_scheduler("keep", clear_cache=True); core.resume_scheduler()',
    "sleep": "core.sleep(1); core.wake_up()",
    "reset": "assert core.reset_prefix_cache(reset_running_requests=True)",
}
KEPT = ("keep", "reset")

BEGIN = """
    import time
    from vllm import SamplingParams
    sampling = SamplingParams(temperature=0, max_tokens=MANY, ignore_eos=True)
    engine = llm.llm_engine
    engine.add_request("r", {"prompt_token_ids": PROMPT}, sampling)
    (request,) = [each for each in core.scheduler.requests.values() if not each.is_finished()]
    while not UNTIL:
        engine.step()
    began = time.monotonic()
    PAUSE
    result = time.monotonic() - began
"""
END = """
    engine = llm.llm_engine
    if not KEPT:  # vLLM tells its own output processor only where that is in another process
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
    result = []
    while core.scheduler.has_requests():
        result += [list(each.outputs[0].token_ids) for each in engine.step() if each.finished]
"""


def filled(code: str, **values: object) -> str:
    for name, value in values.items():
        code = code.replace(name, str(value))
    return code


def test_an_engine_is_paused_while_a_load_hangs(
    store: Cluster, llama: Path, engine: StartEngine
) -> None:
    """The node does not answer, so that the load is under way for as long as it may be. What is
    kept begins anew."""
    settings: dict[str, Any] = {"transports": ["tcp"]}
    one = engine(llama, transfer_config(store.address, **settings))
    (first,) = one.generate([prompt(1)])
    one.saved()
    (node,) = store.nodes
    until = 'request.status.name == "WAITING_FOR_REMOTE_KVS"'
    for name, pause in PAUSES.items():
        one.reset()
        node.freeze()
        try:
            took = one.run(filled(BEGIN, MANY=8, PROMPT=prompt(1), UNTIL=until, PAUSE=pause))
        finally:
            node.resume()
        kept = name in KEPT
        assert took < 2.5, "a load that makes no progress ends after a second"
        assert one.run(filled(END, KEPT=kept)) == ([first.tokens] if kept else []), name
