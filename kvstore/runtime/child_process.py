"""Child processes, which live no longer than the process that started them.

Memory that a master or a client contributes is served by a child, not by a thread, so that it does
not compete with the parent for an interpreter. Parent and child share a socket pair. The child
reports in one line of JSON that it serves, or why it cannot. After that the pair is silent. Its
end, which comes however the parent dies, tells the child to stop cleanly and leave nothing behind.
A parent that stops its child sends ``STOP`` first. A child without ``STOP`` knows that the parent
was killed, and a master's node then leaves its memory to the node of the next master.

A child imports what its parent would import, and nothing from the working folder
(``kvstore.runtime.interpreter``). It has a process group of its own: a Ctrl-C in a terminal reaches
the parent only, which may still need the child, and ends it. It starts with no signal blocked.
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

START_TIMEOUT_S: Final = 60.0
"""Time for a child to join its master, and to reserve little memory."""

RESERVE_BYTES_PER_S: Final = 256 << 20
"""The slowest rate of reserving memory that is waited for: usually 2 GiB/s, less on a busy host."""

STOP_TIMEOUT_S: Final = 10.0
LINE_BYTES_MAX: Final = 1 << 16
_MAY_BE_SECRET: Final = {"master", "metadata_server"}
"""Settings of a node that may hold a password, in an ``etcd://...``."""

STOP: Final = b"stop\n"
"""What a parent that stops its child says, before it closes its end."""


class Child:
    """A child process, as its parent has it. Threads: any."""

    def __init__(
        self, process: subprocess.Popen[bytes], link: socket.socket, said: dict[str, Any]
    ) -> None:
        """Internal: use ``start``."""
        self._process = process
        self._link = link
        self.said: Final = said
        """What the child reported of itself: a node its ``name``, a master its ``port``."""

    @classmethod
    def start(
        cls,
        module: str,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        timeout_s: float = START_TIMEOUT_S,
        pass_fds: Sequence[int] = (),
    ) -> Self:
        """Run ``python -P -m module`` and wait until it serves.

        The child inherits the descriptors ``pass_fds``, by their numbers.

        Its standard output is dropped, what it logs goes to our standard error. Settings in the
        environment or a file do not reach it: ``flags`` and ``environ`` are all it gets. What may
        hold a password is in ``environ``, because every user of the host can read the flags.

        Raises:
            KVStoreError: the child's own error; StartupError: it could not be started, or ended
            without a word, for example because the thread's ``CancelToken`` was set;
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
                    env=interpreter.environment(_inherited(os.environ) | dict(environ or {})),
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
        """Called in the child of a fork: closes our end of the link, which would hide that the
        parent has ended."""
        self._link.close()

    def wait(self) -> int:
        """Blocks until the child ends. Returns its exit status."""
        return self._process.wait()

    def kill(self) -> None:
        """Ends it at once, also if it is stopped or hangs. Does not block."""
        self._process.kill()

    def stop(self, *, orphaned: bool = False) -> None:
        """Lets it clean up, and kills it after ``STOP_TIMEOUT_S``. Idempotent.

        ``orphaned``: end it as if we were killed, so that it may keep its memory for our successor.
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


def _inherited(environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` without our supervisor's socket and without settings, because a child gets only
    those that it is given. But ``KVSTORE_NATIVE`` stays: it runs compiled code if we do."""
    return {
        variable: value
        for variable, value in environ.items()
        if variable == "KVSTORE_NATIVE"
        or not (variable.startswith("KVSTORE_") or variable == sd_notify.SOCKET_VARIABLE)
    }


def start_node(
    *, memory: int, keep_orphaned: bool = False, **settings: str | int | bool | None
) -> Child:
    """A node of ``memory`` bytes, joined to ``master``; ``said["name"]`` is its name.

    ``keep_orphaned``: it is the node of a master, and leaves its memory when we are killed.
    ``settings``: other fields of ``NodeConfig``; ``port`` is free by default, None: the usual one.
    """
    given: dict[str, str | int | bool | None]
    given = {"host": "127.0.0.1", "port": 0, "keep": False, "memory": memory, **settings}
    told = {key: given.pop(key) for key in _MAY_BE_SECRET & given.keys()}
    flags = [text for key, value in given.items() for text in _flag(key, value)]
    return Child.start(
        "kvstore.cli.node", *(["--keep-orphaned"] if keep_orphaned else []), *flags,
        environ={f"KVSTORE_NODE_{key.upper()}": str(value) for key, value in told.items()},
        timeout_s=_start_timeout_s(memory),
    )  # fmt: skip


def start_master(*, memory: int) -> Child:
    """A whole store of ``memory`` bytes on loopback; its gRPC port is ``said["port"]``."""
    return Child.start(
        "kvstore.cli.master", "--port", "0", "--memory", str(memory), "--host", "127.0.0.1",
        "--http-port", "0",
        timeout_s=_start_timeout_s(memory),
    )  # fmt: skip


def _ended(status: int) -> str:
    """How a process ended: its return code in words."""
    if status >= 0:
        return f"ended with status {status}"
    return f"was ended by signal {-status} ({signal.strsignal(-status)})"


def _flag(key: str, value: str | int | bool | None) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [] if value is None else [f"--{name}", str(value)]


def _start_timeout_s(memory: int) -> float:
    return START_TIMEOUT_S + memory / RESERVE_BYTES_PER_S


def _wake_on_parent_death() -> None:
    """Makes the kernel wake this process when its parent dies. A stopped process (SIGSTOP, a
    debugger) would keep the port and the memory that the parent's successor needs."""
    import ctypes  # here, because few processes are children

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGCONT), 0, 0, 0)


class ParentLink:
    """The child's side of the pair; all methods do nothing where there is no parent."""

    def __init__(self, fd: int | None) -> None:
        self._socket = None if fd is None else socket.socket(fileno=fd)
        if fd is not None:
            _wake_on_parent_death()
        self.waits = fd is not None
        """Whether a parent waits for our report, and tells its user why we cannot start."""

    @property
    def fd(self) -> int | None:
        """Readable when the parent is gone, or stops us."""
        return None if self._socket is None else self._socket.fileno()

    def notify_ready(self, **what: str | int) -> None:
        self._send(what)

    def notify_progress(self, step: str) -> None:
        """Tells the parent what takes so long ("waits for ..."), for its error after a time-out."""
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
        """Whether the parent is gone without having stopped us."""
        if self._socket is None:
            return False
        try:
            return not self._socket.recv(len(STOP), socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def __enter__(self) -> Self:
        """The block is all that a child does: a parent that still waits is told why it ends."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        """Returns whether the parent was told the error, so that it needs no word on stderr."""
        told = False
        if self.waits and isinstance(error, KVStoreError):
            self.notify_error(error)
            told = True
        elif self.waits and isinstance(error, Exception):
            self.notify_error(InternalError(f"unexpected {type(error).__name__}: {error}"))
        if self._socket is not None:
            self._socket.close()
        return told

    def _send(self, what: dict[str, Any]) -> None:
        self.waits = False
        if self._socket is not None:
            with contextlib.suppress(OSError):  # the parent is gone; its end is noticed elsewhere
                self._socket.sendall(json.dumps(what).encode() + b"\n")


NO_PARENT: Final = ParentLink(None)
"""The link of a process that a user or a service manager has started."""
