"""The master's side of HTTP: keeps the child running that serves it, and answers its questions."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Final

from kvstore.config import HTTP_TOKEN_VARIABLE
from kvstore.errors import KVStoreError, StartupError
from kvstore.process.background import start_task
from kvstore.process.children import Child
from kvstore.process.stopping import Stop
from kvstore.web.events.feed import Feed
from kvstore.web.server.access import NOT_SECURED, Secured
from kvstore.web.server.link import Answers, answer_forever

log = logging.getLogger("kvstore.master")

RESTART_S: Final = 1.0
RESTART_MAX_S: Final = 30.0
"""Pauses before the child is started again, doubled each time it fails at once."""

LIVED_S: Final = 60.0
"""A child that has served for so long did not fail at once."""


ENDING_S: Final = 5.0
"""How long a child that has closed its link may take to end."""


async def keep_serving(
    listener: socket.socket,
    answers: Answers,
    *,
    master: str,
    cluster: str,
    feed: Feed | None = None,
    events_at: str = "",
    names: Sequence[str] = (),
    secured: Secured = NOT_SECURED,
) -> None:
    """Keeps a child that serves HTTP running until this is cancelled; then the child has ended.

    ``feed``: whose events the child serves; ``events_at``: where it publishes them, too;
    ``names``: by which browsers may reach it; ``secured``: who else may, and how.
    """
    flags = ["--master", master, "--cluster", cluster, "--events-at", events_at]
    flags += ["--names", ",".join(names), "--reads", secured.reads]
    flags += ["--cert", secured.cert, "--key", secured.key]
    environ = {HTTP_TOKEN_VARIABLE: secured.token}  # every user of the host can read the flags
    pause = RESTART_S
    while True:
        began = time.monotonic()
        made: list[socket.socket] = []
        try:
            made = _links()
            ours, theirs, events, their_events = made
            ours.setblocking(False)
            given = {"listener": listener, "link": theirs}
            if feed is not None:
                given["events"] = their_events
            with theirs, their_events:
                child = await _started(given, flags, environ)
        except KVStoreError as error:
            for each in made:
                each.close()
            log.warning("http_not_served reason=%s", error)
        else:
            answering = start_task("http answers", answer_forever(ours, answers))
            ending = start_task("http child", asyncio.to_thread(child.wait))
            if feed is not None:
                feed.attach(events, refused=child.kill)
            else:
                events.close()
            try:
                await asyncio.wait((answering, ending), return_when=asyncio.FIRST_COMPLETED)
                if not ending.done():
                    await _end_broken(child, answering, ending)
                status = await ending
                level = logging.WARNING if status else logging.INFO  # 0: a signal to all of us
                log.log(level, "http_child_ended status=%d: it is started again", status)
            finally:
                answering.cancel()
                if feed is not None:
                    feed.detach()
                await asyncio.to_thread(child.stop)
                await asyncio.gather(ending, return_exceptions=True)
        if time.monotonic() - began > LIVED_S:
            pause = RESTART_S
        await asyncio.sleep(pause)
        pause = min(2 * pause, RESTART_MAX_S)


async def _end_broken(
    child: Child, answering: asyncio.Task[str], ending: asyncio.Task[int]
) -> None:
    """Kills a child with which something is wrong. One that has closed its link may be ending."""
    if answering.exception() is not None:
        why = "it could not be answered"
    elif not (why := answering.result()):
        await asyncio.wait((ending,), timeout=ENDING_S)
        why = "it has closed its link and does not end"
    if not ending.done():
        log.error("http_child_killed pid=%d reason=%s", child.pid, why)
        child.kill()


def _links() -> list[socket.socket]:
    """Both ends of one connection for questions, and of one for events.

    Raises:
        StartupError: this process or its host has no descriptor left.
    """
    with contextlib.ExitStack() as stack:
        try:
            made = [stack.enter_context(each) for _ in range(2) for each in socket.socketpair()]
        except OSError as error:
            raise StartupError(f"its child needs sockets: {error.strerror}") from error
        stack.pop_all()
    return made


async def _started(
    given: Mapping[str, socket.socket], flags: list[str], environ: Mapping[str, str]
) -> Child:
    """A child that serves. If this is cancelled meanwhile, the child has ended then. Raises as
    ``Child.start``."""
    stop = Stop()

    def start() -> Child:
        with stop.here():
            return _start(given, flags, environ)

    starting = asyncio.ensure_future(asyncio.to_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(KVStoreError):
            child = await starting
            await asyncio.to_thread(child.stop)
        raise


def _start(
    given: Mapping[str, socket.socket], flags: list[str], environ: Mapping[str, str]
) -> Child:
    for name, each in given.items():
        flags = [*flags, f"--{name}", str(each.fileno())]
    fds = [each.fileno() for each in given.values()]
    return Child.start("kvstore.cli.web", *flags, environ=environ, pass_fds=fds)
