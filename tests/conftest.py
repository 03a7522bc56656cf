"""Rules for every test: its kind from its folder, nothing left behind, nothing read from outside.

The order is that of ``SUITES``: what is quick and small first, because its failure explains the
failures after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import leaks

SUITES = ("unit", "conformance", "model", "simulation", "integration", "e2e", "netns")

# The developer's own settings must not decide a test.
for variable in [name for name in os.environ if name.startswith("KVSTORE_")]:
    del os.environ[variable]
os.environ["KVSTORE_CONFIG"] = ""

# "fixed" draws the same examples on every machine, so that a red run is red for everybody;
# HYPOTHESIS_PROFILE=explore draws new ones, more of them, and prints how to repeat a failure.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore",
    max_examples=1_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
settings.load_profile(PROFILE)

_at_start: leaks.Snapshot
_left_behind: list[str] = []


def pytest_report_header() -> str:
    return f"hypothesis profile: {PROFILE}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).parent
    for item in items:
        suite = item.path.relative_to(root).parts[0]
        if suite not in SUITES:
            raise pytest.UsageError(f"{item.nodeid}: tests lie in one of {', '.join(SUITES)}")
        item.add_marker(suite)
    items.sort(key=lambda item: SUITES.index(item.path.relative_to(root).parts[0]))


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """Fails the test after which there is more than before it.

    What a fixture of a wider scope holds was there before: such fixtures are set up first.
    """
    before = leaks.snapshot()
    yield
    found = leaks.leaked(before)
    if found:
        pytest.fail("left behind:\n  " + "\n  ".join(found), pytrace=False)


def pytest_sessionstart() -> None:
    global _at_start
    _at_start = leaks.snapshot()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """The same for fixtures of a wider scope, which have been torn down by now."""
    found = leaks.leaked(_at_start)
    # Descriptors that logging and capturing open for the whole run are not the tests'.
    _left_behind.extend(line for line in found if not line.startswith("descriptor"))
    if _left_behind and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _left_behind:
        terminalreporter.section("left behind by the run")
        for line in _left_behind:
            terminalreporter.line(line)
