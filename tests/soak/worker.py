"""The process of one worker. Works until SIGTERM.

Exit status 0: the worker ended as it was told to; any other status is a violation, which its parent
process sees. ``python -m tests.soak.worker ROLE MASTER WORKER SEED DIRECTORY MS`` is the same in a
new interpreter.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from pathlib import Path

from tests.soak.journal import Journal
from tests.soak.recording_client import Clock, Settings
from tests.soak.workloads import ROLES


def main() -> int:
    role, master, worker, seed, directory, timeout_ms = sys.argv[1:]
    return work(Settings(role, master, int(worker), int(seed), Path(directory), int(timeout_ms)))


def work(settings: Settings) -> int:
    os.environ["KVSTORE_CONFIG"] = ""
    faulthandler.enable()
    journal = Journal(
        settings.directory / f"{settings.worker}.journal", settings.worker, settings.role
    )
    kind = ROLES[settings.role]
    clock = Clock(journal, views=kind.views)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    try:
        kind(settings, journal, clock, stop).run()
    except BaseException as error:
        journal.broke("worker_died", repr(error))
        raise
    finally:
        clock.close()
        journal.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
