"""System calls and threads that the kernel, its limits or a sandbox around it refuse."""

from __future__ import annotations

import errno
import threading
import traceback
from functools import cache
from typing import Final

from kvstore.errors import StartupError

THREADS: Final = 16
"""Threads of a client or a server, most of them gRPC's."""


def refused_call(error: BaseException | None) -> StartupError | None:
    """Return an error that names the refused call, with advice; None: another kind of error."""
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return StartupError(
            "the system refuses to start a thread",
            advice="Raise its limits: pids.max of the control group (systemd: TasksMax=, Docker: "
            "--pids-limit), ulimit -u, kernel.threads-max. Docker before 20.10.10 refuses clone3.",
        )
    if not isinstance(error, OSError) or error.errno not in (errno.EPERM, errno.ENOSYS):
        return None
    call = traceback.extract_tb(error.__traceback__)[-1]
    return StartupError(
        f"{error}, in {call.name}: {call.line}",
        advice="If a sandbox (seccomp, gVisor) or an old kernel refuses this call, allow it there.",
    )


@cache
def check_threads() -> None:
    """Start and end ``THREADS`` threads: gRPC hangs or ends the process if one is refused.

    Raises:
        StartupError: the system refuses one.
    """
    end = threading.Event()
    threads = [threading.Thread(target=end.wait, daemon=True) for _ in range(THREADS)]
    try:
        for thread in threads:
            thread.start()
    except RuntimeError as error:
        raise refused_call(error) or error from None
    finally:
        end.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
