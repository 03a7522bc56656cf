"""Optional programs and packages that some tests need: skipped without, but never in CI.

``CI=true`` in the environment turns the skip into a failure, so that it cannot hide there.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

from kvstore.transport.mooncake import probe
from kvstore.transport.mooncake.engine import EngineSettings

ENGINE = EngineSettings(
    os.environ.get("MOONCAKE_TEST_PROTOCOL", "tcp"), os.environ.get("MOONCAKE_TEST_DEVICE", "")
)
"""What the tests of the transfer engine run on: a machine with a card says rdma."""


def need_program(name: str, package: str) -> str:
    """The path of a program."""
    path = shutil.which(name)
    if path is None:
        skip(f"there is no {name}; on Debian: apt-get install {package}")
    return path


def engine_or_skip_reason() -> str | None:
    """Why there is no transfer engine; None: there is one."""
    for finding in probe()[:2]:
        if not finding.ok:
            return f"{finding.what}: {finding.found}. {finding.advice}"
    return None


def need_engine() -> None:
    if (reason := engine_or_skip_reason()) is not None:
        skip(reason)


def skip(reason: str) -> NoReturn:
    import pytest  # not for the programs that tests start

    if os.environ.get("CI") == "true":
        pytest.fail(f"CI must have it: {reason}")
    pytest.skip(reason)
