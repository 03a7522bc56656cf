"""Rules for every test: its kind from its folder, nothing left behind, nothing read from outside.

The order is that of ``SUITES``: what is quick and small first, because its failure explains the
failures after it.
"""

from __future__ import annotations

import importlib.util
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings, strategies

from kvstore.config import NATIVE_VARIABLE
from kvstore.runtime import watched_files
from tests.support import costs, fake_device, leaks, private_shm

ROOT = Path(__file__).parents[1]
NEED_VLLM = ("tests/unit/connectors", "tests/e2e/engines")
"""Their conftest leaves out every file where vLLM is not installed."""
ON_THEIR_OWN = {
    ROOT / "tests/containers": "make test-containers",
    ROOT / "tests/packages": "make test-dist",
    ROOT / "tests/site": "make test-docs",
}
"""Folders that ``make test`` leaves out, and what runs them."""
ENGINES = [file.parent for file in sorted((ROOT / "tests/engines").glob("*/requirements.txt"))]
"""Tests with an engine's own classes. Their conftest leaves out every file where the module of the
folder's name is not installed."""
GPU_VARIABLE = "TEST_GPU"
"""``1``: ``tests/gpu`` uses the real GPU; otherwise kvstore's fake, and ``tests/gpu/real`` is left
out by the folder's conftest."""

QUICK = ("unit", "conformance", "model", "simulation", "stories")
"""What ``make test`` runs, but for the cases that are marked slow."""
SUITES = (*QUICK, "integration", "e2e", "engines", "gpu", "containers", "packages", "site")

# The developer's own settings must not decide a test. KVSTORE_NATIVE=0 chooses what is tested.
for variable in [name for name in os.environ if name.startswith("KVSTORE_")]:
    if variable != NATIVE_VARIABLE:
        del os.environ[variable]
os.environ["KVSTORE_CONFIG"] = ""

# Who runs the tests in the background, or by nohup, lets them ignore Ctrl-C and a closed terminal,
# and processes inherit that.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)

# "fixed" draws the same examples on every machine, so that a red run is red for everybody;
# HYPOTHESIS_PROFILE=explore draws new ones, more of them, and prints how to repeat a failure.
settings.register_profile(
    "fixed",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("quick", settings.get_profile("fixed"), max_examples=50)
settings.register_profile(
    "explore",
    max_examples=1_000,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fixed")
settings.load_profile(PROFILE)

fake_device.add()

_at_start: leaks.Snapshot
_left_behind: list[str] = []


def pytest_report_header() -> str:
    return f"hypothesis profile: {PROFILE}"


def pytest_configure(config: pytest.Config) -> None:
    """A run begins, or a worker of pytest-xdist."""
    config.pluginmanager.register(costs.Costs(strict=os.environ.get("CI") == "true"))
    if not private_shm.give_process_its_own_shared_memory():
        leaks.ignore_shared_memory()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Makes hypothesis' tables of Unicode, 2 s once in a clone, which no case is to pay for.
    strategies.text().validate()
    root = Path(__file__).parent
    for item in items:
        suite = item.path.relative_to(root).parts[0]
        if suite not in SUITES:
            raise pytest.UsageError(f"{item.nodeid}: tests lie in one of {', '.join(SUITES)}")
        item.add_marker(suite)
        where = str(item.path.relative_to(ROOT))
        if suite not in QUICK or where.startswith(NEED_VLLM):
            item.add_marker("slow")
    items.sort(key=lambda item: SUITES.index(item.path.relative_to(root).parts[0]))


@pytest.fixture
def files_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files count as soon as they are written, and not once they are at rest."""
    monkeypatch.setattr(watched_files, "LOOK_S", 0.0)
    monkeypatch.setattr(watched_files, "REST_S", 0.0)


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
    if private_shm.is_worker(session.config):
        session.config.workeroutput["left_behind"] = _left_behind  # type: ignore[attr-defined]
    elif _left_behind and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker has ended; what it left behind is in its last message, unless it was killed."""
    of_worker = getattr(node, "workeroutput", {}).get("left_behind", [])
    _left_behind.extend(f"{node.gateway.id}: {line}" for line in of_worker)


def _not_collected(config: pytest.Config) -> list[str]:
    """Folders that were asked for and left out, why, and what runs them."""
    where = config.invocation_params.dir
    asked = [Path(where, arg.partition("::")[0]).resolve() for arg in config.args]
    ignored = [Path(where, path).resolve() for path in config.getoption("ignore") or ()]
    left_out = [
        (ROOT / folder, "need vLLM: make test-vllm installs it and runs them")
        for folder in NEED_VLLM
        if importlib.util.find_spec("vllm") is None
    ] + [
        (folder, f"need {folder.name}: make test-engines installs it and runs them")
        for folder in ENGINES
        if importlib.util.find_spec(folder.name) is None
    ]
    if os.environ.get(GPU_VARIABLE) != "1":
        left_out.append((ROOT / "tests/gpu/real", "need a GPU: make test-gpu runs them"))
    left_out += [
        (folder, f"are run by {command}")
        for folder, command in ON_THEIR_OWN.items()
        if folder in ignored
    ]
    return [
        f"{folder.relative_to(ROOT)}: {len(list(folder.glob('test_*.py')))} files {why}"
        for folder, why in left_out
        if any(path in (folder, *folder.parents) for path in asked)
    ]


_last_line = ""


def pytest_unconfigure(config: pytest.Config) -> None:
    """After all that pytest prints."""
    if _last_line:
        print(_last_line)


def _skipped(reports: list[pytest.TestReport]) -> str:
    """One line that counts them by reason; empty: there are none."""
    reasons: Counter[str] = Counter()
    for report in reports:
        _, _, why = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, "unknown")
        reasons[why.removeprefix("Skipped: ")] += 1
    told = "; ".join(f"{count} x {why}" for why, count in reasons.most_common())
    return f"skipped: {len(reports)} cases: {told}" if reports else ""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    global _last_line
    _last_line = _skipped(terminalreporter.stats.get("skipped", []))
    if missing := _not_collected(terminalreporter.config):
        terminalreporter.section("not collected")
        for line in missing:
            terminalreporter.line(line)
    if _left_behind:
        terminalreporter.section("left behind by the run")
        for line in _left_behind:
            terminalreporter.line(line)
