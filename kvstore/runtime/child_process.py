"""Child processes that end with their parent.

A child process serves the memory of a master or a client, so that it does not compete with the
parent for an interpreter. Over a socket pair the child reports readiness or its error in one line
of JSON. After that, end of file tells the child to stop cleanly and leave nothing behind. A parent
that stops its child sends ``STOP`` first. Without ``STOP`` the parent was killed, and a master's
node leaves its memory to the node of the next master.

A child imports the same modules as its parent, none from the working folder
(``kvstore.runtime.interpreter``). It has its own process group, so that Ctrl-C in a terminal
reaches only the parent, which ends it. It starts with no signal blocked.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

from kvstore.errors import BY_CODE, DeadlineExceededError, InternalError, KVStoreError, StartupError
from kvstore.runtime import descriptors, interpreter, logs, sd_notify
from kvstore.runtime.cancellation import current
from kvstore.runtime.clock import uptime
from kvstore.runtime.refused_calls import refused_call

START_TIMEOUT_S: Final = 60.0
"""Time for a child to join its master, and to reserve little memory."""

RESERVE_BYTES_PER_S: Final = 256 << 20
"""The slowest acceptable rate of reserving memory: usually 2 GiB/s, less on a busy host."""

STOP_TIMEOUT_S: Final = 10.0
LINE_BYTES_MAX: Final = 1 << 16
_MAY_BE_SECRET: Final = {"master", "metadata_server"}
"""Settings of a node that may contain a password, in an ``etcd://...``."""

STOP: Final = b"stop\n"
"""The message of a parent that stops its child, before it closes its end."""


class Child:
    """The parent's handle of a child process. Threads: any."""

    def __init__(
        self, process: subprocess.Popen[bytes], link: socket.socket, said: dict[str, Any]
    ) -> None:
        """Internal: use ``start``."""
        self._process = process
        self._link = link
        self.said: Final = said
        """The child's report: a node its ``name``, a master its ``port``."""

    @classmethod
    def start(
        cls,
        module: str,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
        pass_fds: Sequence[int] = (),
    ) -> Self:
        """Start ``python -P -m module`` and wait until it serves.

        The child inherits the file descriptors ``pass_fds``, by their numbers.

        Its standard output is dropped; it logs to our standard error. It gets no settings from the
        environment or a file except ``flags`` and ``environ``. Pass passwords in ``environ``: every
        user of the host can read the flags.

        Raises:
            KVStoreError: the child's own error; StartupError: it could not be started, or ended
            without a report, for example because the thread's ``CancelToken`` was set;
            DeadlineExceededError: it did not report in time. The child has ended then.
        """
        try:
            descriptors.keep_standard()
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise StartupError(
                f"{module} could not be started: {error.strerror or error}"
            ) from error
        command = interpreter.command(
            "-m", module, "--config", "", "--log-level", "warning",
            "--log-format", logs.form_in_use(), "--parent-fd", str(theirs.fileno()), *flags,
        )  # fmt: skip
        with theirs:
            try:
                process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno(), *pass_fds],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    env=interpreter.environment(inherited_environment() | dict(environ or {})),
                    process_group=0,
                )
            except OSError as error:
                ours.close()
                raise StartupError(
                    f"{module} could not be started: {error.strerror or error} ({command[0]})"
                ) from error
        child = cls(process, ours, {})
        deadline, step = uptime() + timeout_s, "starts"
        stop = current()
        try:
            with (
                ours.makefile("rb") as lines,
                stop.on_cancel(process.kill) if stop else contextlib.nullcontext(),
            ):
                while True:
                    ours.settimeout(max(deadline - uptime(), 0.001))
                    said = json.loads(lines.readline(LINE_BYTES_MAX) or b"{}")
                    if "step" not in said:
                        break
                    step = said["step"]
            child.said.update(said)
        except TimeoutError:
            child.stop()
            raise DeadlineExceededError(
                f"{module} was not ready within {timeout_s:.0f} s: it still {step}"
            ) from None
        except BaseException:
            child.stop()
            raise
        if "error" not in said and said:
            return child
        child.stop()
        if said:
            kind = BY_CODE.get(said["error"], InternalError)
            raise kind(said["message"], advice=said["advice"], **said["fields"])
        raise StartupError(
            f"{module} {_ended(process.returncode)} before it was ready, and did not say why",
            advice="What Python and the system said is on the standard error of this process; "
            f"{shlex.join([*command[: command.index('--config')], '--help'])} shows whether it "
            "starts at all.",
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close_after_fork(self) -> None:
        """Close our end of the link in the child of a fork, which would hide the parent's end."""
        self._link.close()

    def wait(self) -> int:
        """Block until the child ends; return its exit status."""
        return self._process.wait()

    def kill(self) -> None:
        """Kill it at once, even if it is stopped or hangs. Does not block."""
        self._process.kill()

    def stop(self, *, orphaned: bool = False) -> None:
        """Stop it cleanly, or kill it after ``STOP_TIMEOUT_S``. Idempotent.

        ``orphaned``: as if we were killed, so that it may keep its memory for our successor.
        """
        with contextlib.suppress(OSError):
            if not orphaned:
                self._link.sendall(STOP)
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def inherited_environment() -> dict[str, str]:
    """Return our environment without our supervisor's socket and without settings, except
    ``KVSTORE_NATIVE``: the child runs compiled code if we do."""
    return {
        variable: value
        for variable, value in os.environ.items()
        if variable == "KVSTORE_NATIVE"
        or not (variable.startswith("KVSTORE_") or variable == sd_notify.SOCKET_VARIABLE)
    }


def start_node(
    *, memory: int, keep_orphaned: bool = False, **settings: str | int | bool | None
) -> Child:
    """Start a node of ``memory`` bytes, joined to ``master``; ``said["name"]`` is its name.

    ``keep_orphaned``: it is a master's node, and leaves its memory if we are killed. ``settings``:
    other fields of ``NodeConfig``; ``port`` is any free one by default, None: the usual one.
    """
    given: dict[str, str | int | bool | None]
    given = {"host": "127.0.0.1", "port": 0, "keep": False, "memory": memory, **settings}
    told = {key: given.pop(key) for key in _MAY_BE_SECRET & given.keys()}
    flags = [text for key, value in given.items() for text in _flag(key, value)]
    return Child.start(
        "kvstore.cli.node", *(["--keep-orphaned"] if keep_orphaned else []), *flags,
        environ={f"KVSTORE_NODE_{key.upper()}": str(value) for key, value in told.items()},
        timeout_s=start_timeout_s(memory),
    )  # fmt: skip


def start_master(*, memory: int) -> Child:
    """Start a complete store of ``memory`` bytes on loopback; its gRPC port is ``said["port"]``."""
    return Child.start(
        "kvstore.cli.master", "--port", "0", "--memory", str(memory), "--host", "127.0.0.1",
        "--http-port", "0",
        timeout_s=start_timeout_s(memory),
    )  # fmt: skip


def _ended(status: int) -> str:
    """Describe the return code of a process."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status)})"


def _flag(key: str, value: str | int | bool | None) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [] if value is None else [f"--{name}", str(value)]


def start_timeout_s(memory: int) -> float:
    return START_TIMEOUT_S + memory / RESERVE_BYTES_PER_S


def end_with_parent(pid: int) -> None:
    """Make the kernel kill this process when the thread that started it ends. ``pid``: of the
    parent, which may have ended before this call."""
    _signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != pid:
        raise SystemExit(f"the parent {pid} has ended")


def _signal_on_parent_death(number: signal.Signals) -> None:
    import ctypes  # here, because few processes are children

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(number), 0, 0, 0)


class ParentLink:
    """The child's side of the pair; all methods do nothing without a parent."""

    def __init__(self, fd: int | None) -> None:
        self._socket = None if fd is None else socket.socket(fileno=fd)
        if fd is not None:
            # If stopped (SIGSTOP, a debugger), we would keep the port and the memory that the
            # parent's successor needs.
            _signal_on_parent_death(signal.SIGCONT)
        self.waits = fd is not None
        """Whether a parent waits for our report, and shows the user our errors."""

    @property
    def fd(self) -> int | None:
        """A file descriptor that is readable when the parent has ended or stops us."""
        return None if self._socket is None else self._socket.fileno()

    def notify_ready(self, **what: str | int) -> None:
        self._send(what)

    def notify_progress(self, step: str) -> None:
        """Report the current step ("waits for ...") for the parent's error after a timeout."""
        if self.waits:
            self._send({"step": step})
            self.waits = True

    def notify_error(self, error: KVStoreError) -> None:
        self._send(
            {
                "error": error.code,
                "message": error.message,
                "advice": error.advice,
                "fields": error.fields,
            }
        )

    @property
    def parent_died(self) -> bool:
        """Return whether the parent ended without stopping us."""
        if self._socket is None:
            return False
        try:
            return not self._socket.recv(len(STOP), socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def __enter__(self) -> Self:
        """Enter the whole work of a child: a waiting parent receives its error."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Return whether the parent received the error, so that stderr need not show it."""
        told = False
        known = error if isinstance(error, KVStoreError) else refused_call(error)
        if self.waits and known is not None:
            self.notify_error(known)
            told = True
        elif self.waits and isinstance(error, Exception):
            self.notify_error(InternalError(f"unexpected {type(error).__name__}: {error}"))
        if self._socket is not None:
            self._socket.close()
        return told

    def _send(self, what: dict[str, Any]) -> None:
        self.waits = False
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the parent has ended, which is detected elsewhere
                self._socket.sendall(json.dumps(what).encode() + b"\n")


NO_PARENT: Final = ParentLink(None)
"""The link of a process started by a user or a service manager."""
