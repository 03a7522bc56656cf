"""The master's side of HTTP: binds the port, and keeps the child running that serves it."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import time
from typing import Final

from kvstore.addresses import join_address
from kvstore.background import start_task
from kvstore.children import Child
from kvstore.errors import AddressInUseError, KVStoreError, StartupError
from kvstore.web.link import Answers, answer_forever

log = logging.getLogger("kvstore.master")

PORTS: Final = 16
"""The default port, or the next free one of so many: several masters on one host."""

TAKEN_S: Final = 2.0
"""How long a given port may be taken, by the child of a master that was killed."""

RESTART_S: Final = 1.0
RESTART_MAX_S: Final = 30.0
"""Pauses before the child is started again, doubled each time it fails at once."""

LIVED_S: Final = 60.0
"""A child that has served for so long did not fail at once."""


def bind(host: str, port: int, *, is_given: bool) -> socket.socket:
    """A listening socket on ``port``; on the next free one if the user has not asked for this one.

    Raises:
        AddressInUseError, StartupError
    """
    ports = [port] if is_given else [*range(port, port + PORTS)]
    patience = time.monotonic() + TAKEN_S
    while True:
        for each in ports:
            try:
                listener = socket.create_server((host, each), family=_family(host))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise StartupError(
                        f"HTTP cannot listen on {join_address(host, each)}: {error.strerror}",
                        advice="Give --host an address of this host, or --http-port 0.",
                    ) from None
                continue
            if each != port:
                log.warning(
                    "http_port_taken wanted=%d port=%d: choose one with --http-port", port, each
                )
            return listener
        if time.monotonic() >= patience:
            raise AddressInUseError(
                f"port {port} for HTTP is taken on {host}",
                advice="Give another one with --http-port, or 0 for none.",
                port=port,
            )
        time.sleep(0.05)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


async def keep_serving(
    listener: socket.socket, answers: Answers, *, master: str, cluster: str
) -> None:
    """Keeps a child that serves HTTP running until this is cancelled; then the child has ended."""
    pause = RESTART_S
    while True:
        began = time.monotonic()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                child = await asyncio.to_thread(_start, listener, theirs, master, cluster)
        except KVStoreError as error:
            ours.close()
            log.warning("http_not_served reason=%s", error)
        else:
            answering = start_task("http answers", answer_forever(ours, answers))
            try:
                status = await asyncio.to_thread(child.wait)
                log.warning("http_child_ended status=%d: it is started again", status)
            finally:
                answering.cancel()
                await asyncio.to_thread(child.stop)
        if time.monotonic() - began > LIVED_S:
            pause = RESTART_S
        await asyncio.sleep(pause)
        pause = min(2 * pause, RESTART_MAX_S)


def _start(listener: socket.socket, link: socket.socket, master: str, cluster: str) -> Child:
    return Child.start(
        "kvstore.cli.web",
        *("--listener", str(listener.fileno()), "--link", str(link.fileno())),
        *("--master", master, "--cluster", cluster),
        pass_fds=[listener.fileno(), link.fileno()],
    )
