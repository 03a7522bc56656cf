"""What is not collected is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]

WITHOUT_VLLM = (
    "import sys; sys.modules['vllm'] = None; import pytest; "
    "sys.exit(pytest.main(['--collect-only', '-q', *sys.argv[1:]]))"
)


def collected(*arguments: str) -> str:
    done = run_python("-c", WITHOUT_VLLM, *arguments)
    return done.stdout


@pytest.mark.slow
def test_without_vllm_a_run_says_which_tests_are_missing() -> None:
    for asked in ("tests/unit/connectors", "tests/unit/../unit/connectors/"):
        said = collected(asked)
        assert "not collected" in said
        assert "tests/unit/connectors: " in said
        assert "make test-vllm" in said
        assert "tests/e2e/engines" not in said


@pytest.mark.slow
def test_a_folder_that_is_ignored_is_said_to_be() -> None:
    said = collected("--ignore", "tests/containers", "--ignore-glob", "*/test_*.py", "tests")
    assert "tests/containers: 2 files are run by make test-containers" in said


def test_a_run_that_does_not_ask_for_them_does_not_say_so() -> None:
    assert "not collected" not in collected("tests/unit/test_collection.py")
