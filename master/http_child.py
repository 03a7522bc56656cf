"""Supervises the child process that serves the master's HTTP API."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import socket
import time
from collections.abc import Mapping
from typing import Final

from kvstore.errors import ConfigError, KVStoreError, StartupError
from kvstore.master.ipc_channel import SERVED, Answers, MasterChannel
from kvstore.runtime.cancellation import CancelToken
from kvstore.runtime.child_process import Child
from kvstore.runtime.tasks import start_task

log = logging.getLogger("kvstore.master")

RESTART_S: Final = 1.0
RESTART_MAX_S: Final = 30.0
"""First and longest pause before a restart; it doubles after each immediate failure."""

LIVED_S: Final = 60.0
"""Minimum time of service that is not an immediate failure."""

ENDING_S: Final = 5.0
"""Time for a child to exit after it closed its channel."""


async def supervise_http_child(
    listener: socket.socket,
    answers: Answers,
    *,
    feed: MasterChannel | None = None,
    on_demand: bool = False,
    **served: object,
) -> None:
    """Run a child that serves HTTP until this is cancelled; then the child has ended.

    ``feed`` sends events to the child; ``on_demand``: start it at the first connection, which
    waits for it; ``served``: the fields of ``HttpChildOptions`` that it does not determine itself.
    """
    if on_demand:
        await _wait_for_connection(listener)
    environ = {SERVED: json.dumps({**served, "has_events": feed is not None})}
    channel = feed or MasterChannel()
    pause = RESTART_S
    while True:
        began = time.monotonic()
        try:
            ours, theirs = _ends()
            try:
                with theirs:
                    child = await _started({"listener": listener, "channel": theirs}, environ)
            except BaseException:
                ours.close()
                raise
        except KVStoreError as error:
            log.warning("http_not_served reason=%s", error)
        else:
            ended = channel.attach(ours, answers)
            ending = start_task("http child", asyncio.to_thread(child.wait))
            try:
                await asyncio.wait((ended, ending), return_when=asyncio.FIRST_COMPLETED)
                if not ending.done():
                    await _end_broken(child, ended.result(), ending)
                status = await ending
                level = logging.WARNING if status else logging.INFO  # a signal to all
                log.log(level, "http_child_ended status=%d: restarting", status)
            finally:
                channel.detach()
                await asyncio.to_thread(child.stop)
                await asyncio.gather(ending, return_exceptions=True)
        if time.monotonic() - began > LIVED_S:
            pause = RESTART_S
        await asyncio.sleep(pause)
        pause = min(2 * pause, RESTART_MAX_S)


async def _wait_for_connection(listener: socket.socket) -> None:
    loop, connected = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, connected.set)
    try:
        await connected.wait()
    finally:
        loop.remove_reader(listener)


async def _end_broken(child: Child, why: str, ending: asyncio.Task[int]) -> None:
    """Kill a child after an error; without one, it closed its channel and gets time to exit."""
    if not why:
        await asyncio.wait((ending,), timeout=ENDING_S)
        why = "it closed its channel but did not exit"
    if not ending.done():
        log.error("http_child_killed pid=%d reason=%s", child.pid, why)
        child.kill()


def _ends() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a channel. Raise StartupError without file descriptors."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise StartupError(f"cannot create sockets for the HTTP child: {error.strerror}") from error


def is_installed(*, required: bool) -> bool:
    """Return whether the console is installed; if not, but ``required``, raise ConfigError."""
    if importlib.util.find_spec("kvstore.console") is not None:
        return True
    if required:
        raise ConfigError("http_port requires kvstore.console, which is not installed")
    log.warning("no_console: no metrics and no dashboard, kvstore.console is not installed")
    return False


async def _started(sockets: Mapping[str, socket.socket], environ: Mapping[str, str]) -> Child:
    """Start a child. If cancelled, it ends the child first. Raises as ``Child.start``."""
    stop = CancelToken()

    def start() -> Child:
        with stop.here():
            return _start(sockets, environ)

    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(KVStoreError):
            child = await starting
            await asyncio.to_thread(child.stop)
        raise


def _start(sockets: Mapping[str, socket.socket], environ: Mapping[str, str]) -> Child:
    flags = [text for name, sock in sockets.items() for text in (f"--{name}", str(sock.fileno()))]
    fds = [sock.fileno() for sock in sockets.values()]
    return Child.start("kvstore.console.master_server", *flags, environ=environ, pass_fds=fds)
