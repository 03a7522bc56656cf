"""The live what-if: a child process of the master, whatever becomes of it."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.cluster import Cluster
from tests.support.processes import KVSTORE, children_of, free_port, run_python
from tests.support.wait import until


@pytest.fixture(autouse=True)
def _what_if(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_MASTER_WHAT_IF", "true")


def what_ifs_of(master: int) -> list[int]:
    found = []
    for pid in children_of(master):
        with contextlib.suppress(OSError):
            if b"kvstore.planner.what_if" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def test_a_master_estimates_what_other_memory_would_find(tmp_path: Path, browser: Browser) -> None:
    port = free_port()
    with Cluster(tmp_path, settings={"http_port": port}) as store:
        store.start(memory="4MiB")
        client = store.client()
        values = [bytes(10_000)] * 16
        requests = 0

        def estimates() -> bool:
            nonlocal requests
            requests += 1
            keys = [f"{requests % 100}-{number}" for number in range(16)]
            if (found := client.match_prefix(keys)) < 16:
                parent = keys[found - 1] if found else None
                client.put_chain(keys[found:], values[found:], parent=parent)
            return bool(client.status().what_if)

        def rows() -> dict[tuple[str, int], int]:
            estimates()
            return {(row.policy, row.memory): row.found_ppm for row in client.status().what_if}

        until(estimates, within_s=60)
        sizes = sorted({memory for _, memory in rows()})
        assert [size * 4 // sizes[2] for size in sizes] == [1, 2, 4, 8, 16, 32]
        # The first round finds nothing; from the second on all chains are in the largest pool.
        until(lambda: rows()["density", sizes[-1]] > 600_000, within_s=60)
        assert rows()["lru", sizes[2]] < 300_000
        shown = run_python(*KVSTORE, "what-if", "--master", store.address, within_s=30, check=True)
        assert "density" in shown.stdout
        browser.open(port, "misses")
        until(lambda: len(browser.texts("#what-if-rows tr")) == len(rows()))
        assert browser.complaints() == []

        (child,) = what_ifs_of(store.master_server.pid)
        os.kill(child, signal.SIGKILL)
        until(lambda: not client.status().what_if)
        client.match_prefix(["0-0"])  # the master goes on
