"""vLLM's own connector for Mooncake, on a real engine, with this store in Mooncake's place."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.e2e.engines.conftest import prompt
from tests.e2e.engines.engine import Engine
from tests.e2e.engines.preloaded import ENVIRONMENT, ROOT, ForkServer
from tests.e2e.engines.test_engine import WHOLE, cached, tokens
from tests.support.cluster import Cluster
from tests.support.wait import until

WRITTEN_S = 30.0
"""For what an engine saves in the background to arrive."""

WITHOUT_S = 20.0
"""Four prompts, computed on a busy machine, and some deadlines of 2 s."""

BUILT_IN = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
"""Without a module path: the connector that vLLM brings."""


class AsMooncake(ForkServer):
    """Starts ``kvstore as-mooncake -- python -m module``: a fork would not read PYTHONPATH."""

    def __init__(self) -> None:
        pass

    def start(  # type: ignore[override]
        self,
        module: str,
        arguments: Sequence[str],
        files: tuple[int, int, int],
        environ: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        standard_input, output, errors = files
        command = [sys.executable, "-m", "kvstore.cli.main", "as-mooncake", "--"]
        return subprocess.Popen(
            [*command, sys.executable, "-m", module, *arguments],
            env=ENVIRONMENT | dict(environ or {}), cwd=ROOT, start_new_session=True,
            stdin=standard_input, stdout=output, stderr=errors,
        )  # fmt: skip


@pytest.fixture
def one(store: Cluster, llama: Path, tmp_path: Path) -> Iterator[Engine]:
    settings = {
        "metadata_server": "P2PHANDSHAKE", "master_server_address": store.address,
        "protocol": "tcp", "mode": "standalone-store", "global_segment_size": 0,
        "local_buffer_size": "64MB",
    }  # fmt: skip
    config = tmp_path / "mooncake.json"
    config.write_text(json.dumps(settings))
    environ = {"MOONCAKE_CONFIG_PATH": str(config)}
    with Engine(AsMooncake(), llama, dict(BUILT_IN), environ=environ) as engine:
        yield engine


def test_vllm_finds_again_what_it_has_put(
    store: Cluster, one: Engine, plain: Engine, tmp_path: Path
) -> None:
    assert any("mooncake.store is kvstore" in line for line in one.log)
    prompts = [prompt(seed) for seed in range(3)]
    right = tokens(plain.generate(prompts))

    first = one.generate(prompts)
    assert cached(first) == [0, 0, 0]
    assert tokens(first) == right

    def found() -> bool:
        one.reset()
        again = one.generate(prompts)
        assert tokens(again) == right
        return cached(again) == [WHOLE] * 3

    until(found, within_s=WRITTEN_S)

    for server in (store.master_server, *store.nodes):
        server.kill()
    one.reset()
    started = time.monotonic()
    without = one.generate([prompt(9), *prompts])
    assert time.monotonic() - started < WITHOUT_S, "the engine waits for a store that is gone"
    assert cached(without)[0] == 0
    assert tokens(without)[1:] == right  # loaded under a lease of before, or computed

    store.master()
    store.node(memory="256MiB")

    def found_anew() -> bool:
        one.reset()
        [again] = one.generate([prompt(9)])
        assert again.tokens == tokens(without)[0]
        return again.cached == WHOLE

    until(found_anew, within_s=WRITTEN_S)
