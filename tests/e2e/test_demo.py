"""The demonstration as its users run it, and the engine in it that newcomers copy."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import pytest

from kvstore.calls import PutOutcome
from kvstore.errors import MasterUnreachableError
from tests.e2e.demonstrations import Demonstration

if TYPE_CHECKING:
    import torch

    from examples.engine import Engine
    from kvstore import Client

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec(module) is None, reason=f"{module} not installed")
    for module in ("torch", "transformers")
]

PREFIX_TOKENS = 512
BLOCKS = 8


class Demo(Demonstration):
    """With the shared prefix that these tests expect."""

    def __init__(self, *arguments: str) -> None:
        super().__init__("examples.demo", f"--prefix-tokens={PREFIX_TOKENS}", *arguments)


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    """Put each demonstration here: it is ended with the test, whatever happens."""
    started: list[Demo] = []
    yield started
    for demo in started:
        demo.close()


def test_prefix_of_one_process_is_reused_by_another(demos: list[Demo]) -> None:
    demos.append(demo := Demo("--transport=tcp", "--json", "--stay"))
    report = json.loads(demo.line("^{").string)
    assert re.fullmatch(
        rf"demo: outputs identical, {BLOCKS} of {BLOCKS} blocks reused, 8\.0 MiB moved, "
        r"time to first token \d+ ms -> \d+ ms \(\d+\.\dx\)",
        report["summary"],
    )
    produced, consumed = report["produced"], report["consumed"]
    assert report["ok"]
    assert report["scenario"]["transport"] == "tcp"
    assert produced["pid"] != consumed["pid"]
    assert produced["blocks_stored"] == BLOCKS + 1, "the shared blocks and one of its own"
    assert (consumed["blocks_asked"], consumed["blocks_reused"]) == (BLOCKS + 1, BLOCKS)
    assert consumed["tokens_reused"] == consumed["tokens_computed"]
    assert len(set(consumed["tokens_computed"])) > 8, "a loop of few tokens would prove little"

    page = demo.error(r"Look at (http://127\.0\.0\.1:\d+/)")[1]
    with urllib.request.urlopen(f"{page}api/v1/status", timeout=10) as answer:
        status = json.load(answer)
    assert sum(row["objects"] for row in status["namespaces"]) == BLOCKS + 1
    assert demo.process.poll() is None, "the dashboard stays until the user has seen the blocks"
    status_at_end, lines, _ = demo.output()  # closes its standard input
    assert (status_at_end, lines) == (0, [])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_demo_leaves_nothing(demos: list[Demo], number: signal.Signals) -> None:
    demos.append(demo := Demo())
    demo.line(r"^node ")
    time.sleep(0.5)  # into the start of the producer
    demo.process.send_signal(number)
    status, last, _ = demo.end()
    assert (status, last) == (128 + signal.SIGINT, "demo: interrupted")


def test_killed_node_fails_the_demo(demos: list[Demo]) -> None:
    demos.append(demo := Demo())
    node = int(demo.line(r"^node +pid (\d+)")[1])
    os.kill(node, signal.SIGKILL)
    status, last, _ = demo.end()
    assert (status, last) == (1, f"demo: FAILED: node (pid {node}) ended with status -9")


# --- the engine, without a store ---------------------------------------------------------------


class DictClient:
    """The part of ``Client`` that the engine uses, on a dict."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, torch.Tensor] = {}
        self.lost: set[bytes] = set()
        self.error: Exception | None = None

    def put_chain(
        self, keys: Sequence[bytes], values: Sequence[torch.Tensor], *, namespace: str
    ) -> list[PutOutcome]:
        self._fail()
        self.blocks |= {key: value.clone() for key, value in zip(keys, values)}
        return [PutOutcome.STORED] * len(keys)

    def match_prefix(self, keys: Sequence[bytes], *, namespace: str) -> int:
        self._fail()
        absent = [index for index, key in enumerate(keys) if key not in self.blocks]
        return absent[0] if absent else len(keys)

    def get_into(
        self, keys: Sequence[bytes], buffers: Sequence[torch.Tensor], *, namespace: str
    ) -> list[int | None]:
        self._fail()
        for key, buffer in zip(keys, buffers):
            if key not in self.lost:
                buffer.copy_(self.blocks[key])
        return [None if key in self.lost else len(self.blocks[key]) for key in keys]

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


PROMPT = [(17 * index) % 8191 for index in range(4 * 64 + 40)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    from examples.engine import Engine, KVMemory, build_decoder

    return Engine(build_decoder(seed=0), KVMemory(400), cast("Client", None), "test")


@pytest.fixture
def client(engine: Engine) -> DictClient:
    """A store that holds the blocks of ``PROMPT``."""
    client = DictClient()
    engine.client = cast("Client", client)
    engine.generate(PROMPT, 1, reuse=False)
    assert engine.save(PROMPT) == 4
    return client


def test_reused_blocks_change_no_token(engine: Engine, client: DictClient) -> None:
    computed = engine.generate(PROMPT, 16, reuse=False)
    reused = engine.generate(PROMPT, 16, reuse=True)
    assert (computed.blocks_reused, reused.blocks_reused) == (0, 4)
    assert reused.tokens == computed.tokens
    assert (reused.logits - computed.logits).abs().max() < 1e-3


def test_one_wrong_block_changes_every_token(engine: Engine, client: DictClient) -> None:
    """Otherwise equal tokens would not prove that the bytes were right."""
    computed = engine.generate(PROMPT, 16, reuse=False)
    first, second = list(client.blocks)[:2]
    client.blocks[first] = client.blocks[second]
    reused = engine.generate(PROMPT, 16, reuse=True)
    assert reused.blocks_reused == 4
    assert not any(a == b for a, b in zip(computed.tokens, reused.tokens))


def test_block_lost_after_the_match_is_computed(engine: Engine, client: DictClient) -> None:
    computed = engine.generate(PROMPT, 16, reuse=False)
    client.lost = {list(client.blocks)[2]}
    reused = engine.generate(PROMPT, 16, reuse=True)
    assert reused.blocks_reused == 2
    assert reused.tokens == computed.tokens


def test_store_that_fails_is_a_miss(engine: Engine, client: DictClient) -> None:
    computed = engine.generate(PROMPT, 16, reuse=False)
    client.error = MasterUnreachableError("nobody there")
    reused = engine.generate(PROMPT, 16, reuse=True)
    assert reused.blocks_reused == 0
    assert reused.tokens == computed.tokens
    assert engine.save(PROMPT) == 0


def test_prompt_of_whole_blocks_computes_its_last(engine: Engine, client: DictClient) -> None:
    """The last token must be computed: its logits choose the next one."""
    whole = PROMPT[: 4 * 64]
    reused = engine.generate(whole, 16, reuse=True)
    assert reused.blocks_reused == 3
    assert reused.tokens == engine.generate(whole, 16, reuse=False).tokens


def test_hash_of_a_block_covers_all_tokens_before_it() -> None:
    from examples.engine import block_hashes

    hashes = block_hashes(PROMPT)
    assert len(hashes) == len(set(hashes)) == 4
    changed = block_hashes([1, *PROMPT[1:]])
    assert not set(hashes) & set(changed)
    changed = block_hashes([*PROMPT[:128], 1, *PROMPT[129:]])
    assert [a == b for a, b in zip(hashes, changed)] == [True, True, False, False]
    assert block_hashes(PROMPT[:63]) == []
