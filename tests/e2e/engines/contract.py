"""vLLM's own tests of the connector contract, with this connector in place of theirs.

    python -m tests.e2e.engines.contract vllm-0.32.0.tar.gz MODEL_DIRECTORY [pytest arguments]

The archive is vLLM's source distribution (on PyPI, among the files of its version); the model is
one that ``tiny`` made. Those that are neutral to the connector are run: failed loads, invalid
blocks, errors, what a failed load must not leave in the cache, output aggregation, and of the life
cycles of remote prefill and decode those that need no other connector's parameters (``OTHERS`` do).
There is no store: the connector has to do without.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

UNIT = "tests/v1/kv_connector/unit"
NEUTRAL = (
    "test_kv_load_failure_recovery.py",
    "test_invalid_blocks_correctness.py",
    "test_error_propagation.py",
    "test_cache_pollution_prevention.py",
    "test_output_aggregator.py",
    "test_remote_prefill_lifecycle.py",
    "test_remote_decode_lifecycle.py",
)
OTHERS = (
    # They hand over blocks by the parameters of another connector (do_remote_prefill and the like).
    "test_remote_prefill_lifecycle.py::test_basic_lifecycle",
    "test_remote_prefill_lifecycle.py::test_interleaved_lifecycle",
    "test_remote_prefill_lifecycle.py::test_no_spurious_prefix_caching",
    "test_remote_prefill_lifecycle.py::test_full_block_prompt",
    "test_remote_prefill_lifecycle.py::test_cannot_schedule_after_recv",
    "test_remote_prefill_lifecycle.py::test_cannot_recv",
    "test_remote_prefill_lifecycle.py::test_kv_fetch_stages_cleared_on_abort",
    "test_remote_decode_lifecycle.py::test_basic_lifecycle",
    "test_remote_decode_lifecycle.py::test_short_prompt_lifecycle",
    "test_remote_decode_lifecycle.py::test_prefix_cache_lifecycle",
    "test_remote_decode_lifecycle.py::test_abort_during_kv_transfer",
    "test_remote_prefill_lifecycle.py::test_async_load_reserves_blocks_for_promotion_margin",
    # Recurrent layers in a mode in which vLLM hands out no states, so this connector refuses them.
    "test_remote_prefill_lifecycle.py::test_p_side_chunked_prefill_mamba",
    "test_remote_prefill_lifecycle.py::test_async_load_does_not_double_reserve_mamba_spec_blocks",
)
INSIDE = "--inside"
OURS = {
    "kv_connector": "MooncakeStoreConnector",
    "kv_connector_module_path": "kvstore.connectors.vllm",
    "kv_role": "kv_both",
    "dtype": "float32",
}


class ConnectorPlugin:
    """A pytest plugin: their helpers make configurations that name this connector."""

    def __init__(self, model: str) -> None:
        self._defaults = {**OURS, "model": model}

    def pytest_collection_finish(self) -> None:
        for name, module in list(sys.modules.items()):
            if name.endswith("kv_connector.unit.utils"):
                make = module.create_vllm_config
                code = make.__code__
                names = code.co_varnames[: code.co_argcount]
                values = dict(zip(names[-len(make.__defaults__) :], make.__defaults__, strict=True))
                make.__defaults__ = tuple((values | self._defaults)[each] for each in values)


def main() -> int:
    archive, model, *arguments = sys.argv[1:]
    with tempfile.TemporaryDirectory() as directory, tarfile.open(archive) as opened:
        wanted = [each for each in opened.getmembers() if "/tests/" in each.name]
        opened.extractall(directory, members=wanted, filter="data")
        (root,) = Path(directory).iterdir()
        # In a process of its own: both of us call our tests ``tests``.
        command = [sys.executable, __file__, INSIDE, str(Path(model).resolve()), *arguments]
        return subprocess.run(command, cwd=root, check=False).returncode


def inside() -> int:
    _, _, model, *arguments = sys.argv
    sys.path[0] = "."
    files = [f"{UNIT}/{name}" for name in NEUTRAL]
    options = [
        "-c",
        "/dev/null",
        "--rootdir",
        ".",
        "--confcutdir",
        UNIT,
        "-p",
        "no:cacheprovider",
        "-q",
        *arguments,
    ]
    for name in OTHERS:
        options += ["--deselect", f"{UNIT}/{name}"]
    return int(pytest.main([*options, *files], plugins=[ConnectorPlugin(model)]))


if __name__ == "__main__":
    sys.exit(inside() if sys.argv[1] == INSIDE else main())
