"""The process ``kvstore-node``: a segment of shared memory, its data server, its agent."""

from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvstore.calls import MasterAccepted
from kvstore.children import ParentLink
from kvstore.config import NodeConfig, join_address, split_address
from kvstore.errors import KVStoreError, NodeNameTakenError
from kvstore.host import address_towards, host_id
from kvstore.memory import numa
from kvstore.memory.segment import MemoryOptions, Segment, free_node_name
from kvstore.node.agent import NodeAgent
from kvstore.transport.tcp_server import DataServer

log = logging.getLogger("kvstore.node")

EVERY_INTERFACE: Final = ("", "0.0.0.0", "::")


def run(config: NodeConfig, parent_fd: int | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent is gone; the exit status.

    ``parent_fd``: the child's end of a ``kvstore.children`` pair; told once the node has joined.

    Raises:
        KVStoreError: it could not start; nothing is left behind.
    """
    parent = ParentLink(parent_fd)
    # From here on a signal means a clean end, also while gigabytes are being reserved.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with ExitStack() as stack:
            if config.numa_node >= 0:
                numa.check_node(config.numa_node)
                numa.run_on(config.numa_node)  # before there are threads: they inherit it
            segment = _create_segment(config, quiet=parent_fd is not None)
            stack.callback(segment.close)
            server = DataServer(
                [segment], config.host, config.port, connections_max=config.connections_max
            )
            server.start()
            stack.callback(server.stop)
            # Last in, first out: nothing interrupts the clean-up that follows.
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)
            asyncio.run(_serve(config, segment, server, parent))
        return 0
    except KeyboardInterrupt:
        return 0
    except KVStoreError as error:
        if not parent.waits:
            raise
        parent.tell_error(error)
        return 1
    finally:
        parent.close()


async def _serve(
    config: NodeConfig, segment: Segment, server: DataServer, parent: ParentLink
) -> None:
    address = _advertised(config, server.port)

    def joined(accepted: MasterAccepted) -> None:
        print(
            f"kvstore-node {segment.node} serves {segment.size >> 20} MiB on {address} "
            f"for the master at {config.master}",
            flush=True,
        )
        parent.tell(name=segment.node, epoch=accepted.epoch)

    def waiting(error: KVStoreError) -> None:
        log.warning("waiting_for_master address=%s reason=%s", config.master, error)

    agent = NodeAgent(
        name=segment.node,
        host=host_id(),
        master=config.master,
        segment=segment,
        server=server,
        address=address,
        joined=joined,
        waiting=waiting,
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, agent.stop)
    if parent.fd is not None:
        loop.add_reader(parent.fd, agent.stop)
    try:
        await agent.run()
    finally:
        if parent.fd is not None:
            loop.remove_reader(parent.fd)
    log.info("node_stopped node=%s", segment.node)


def _create_segment(config: NodeConfig, *, quiet: bool) -> Segment:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
        TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    hidden = quiet or not console.is_terminal
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("reserving memory", total=config.memory)
        segment = _create_named(
            config, lambda done, total: bar.update(task, completed=done, total=total)
        )
    log.info(
        "segment_ready node=%s bytes=%d seconds=%.2f huge_bytes=%d numa_node=%d locked=%s",
        segment.node,
        segment.size,
        time.monotonic() - started,
        segment.huge_bytes(),
        config.numa_node,
        segment.locked,
    )
    return segment


def _create_named(config: NodeConfig, progress: Callable[[int, int], None]) -> Segment:
    """By the name that was given, or by one that nobody has."""
    options = MemoryOptions(
        huge_pages=config.huge_pages, numa_node=config.numa_node, lock=config.lock_memory
    )
    base = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-") or "node"
    tried = ""
    while True:
        name = config.name or free_node_name(base)
        try:
            return Segment.create(name, config.memory, progress=progress, options=options)
        except NodeNameTakenError:
            if name == tried or config.name:
                raise
            tried = name  # somebody was faster


def _advertised(config: NodeConfig, port: int) -> str:
    if config.advertise:
        host, given = split_address(config.advertise, default_port=0)
        return join_address(host, given or port)
    host = config.host
    if host in EVERY_INTERFACE:
        host = address_towards(config.master)
    return join_address(host, port)


def _interrupt(number: int, frame: object) -> None:
    del number, frame
    raise KeyboardInterrupt
