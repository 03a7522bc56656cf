"""The master's side of HTTP: keeps the child that serves it running, and answers its questions."""

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
"""The first and the longest pause before the child is started again. The pause doubles each time
the child fails at once."""

LIVED_S: Final = 60.0
"""A child that has served for so long did not fail at once."""

ENDING_S: Final = 5.0
"""How long a child that has closed its channel may take to end."""


async def supervise_http_child(
    listener: socket.socket,
    answers: Answers,
    *,
    feed: MasterChannel | None = None,
    **served: object,
) -> None:
    """Keeps a child that serves HTTP running until this is cancelled; then the child has ended.

    ``feed`` gives the child its events; ``served``: the other fields of
    ``HttpChildOptions`` that it does not find out by itself.
    """
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
                level = logging.WARNING if status else logging.INFO  # 0: a signal to all of us
                log.log(level, "http_child_ended status=%d: it is started again", status)
            finally:
                channel.detach()
                await asyncio.to_thread(child.stop)
                await asyncio.gather(ending, return_exceptions=True)
        if time.monotonic() - began > LIVED_S:
            pause = RESTART_S
        await asyncio.sleep(pause)
        pause = min(2 * pause, RESTART_MAX_S)


async def _end_broken(child: Child, why: str, ending: asyncio.Task[int]) -> None:
    """Kills a child that does not serve any more. ``why``: what is wrong; empty: the child has
    closed its end of the channel, so it may be ending and gets time for that."""
    if not why:
        await asyncio.wait((ending,), timeout=ENDING_S)
        why = "it has closed its channel and does not end"
    if not ending.done():
        log.error("http_child_killed pid=%d reason=%s", child.pid, why)
        child.kill()


def _ends() -> tuple[socket.socket, socket.socket]:
    """Both ends of a channel. Raises StartupError: there are no descriptors left."""
    try:
        return socket.socketpair()
    except OSError as error:
        raise StartupError(f"its child needs sockets: {error.strerror}") from error


def is_installed(*, required: bool) -> bool:
    """Whether the console is part of this installation. If ``required``, raises ConfigError."""
    if importlib.util.find_spec("kvstore.console") is not None:
        return True
    if required:
        raise ConfigError("http_port is given, and kvstore.console is not installed")
    log.warning("no_console: no metrics and no dashboard, kvstore.console is not installed")
    return False


async def _started(given: Mapping[str, socket.socket], environ: Mapping[str, str]) -> Child:
    """Starts a child that serves. If this is cancelled, it ends the child before it raises
    CancelledError. Otherwise it raises as ``Child.start``."""
    stop = CancelToken()

    def start() -> Child:
        with stop.here():
            return _start(given, environ)

    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(KVStoreError):
            child = await starting
            await asyncio.to_thread(child.stop)
        raise


def _start(given: Mapping[str, socket.socket], environ: Mapping[str, str]) -> Child:
    flags = [text for name, each in given.items() for text in (f"--{name}", str(each.fileno()))]
    fds = [each.fileno() for each in given.values()]
    return Child.start("kvstore.console.master_server", *flags, environ=environ, pass_fds=fds)
