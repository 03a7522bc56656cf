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

from kvstore.addresses import join_address, shown_place, split_address
from kvstore.calls import MasterAccepted
from kvstore.children import ParentLink
from kvstore.config import NodeConfig
from kvstore.errors import KVStoreError, LeftOverMemoryError, NodeNameTakenError
from kvstore.host import address_towards, host_id
from kvstore.memory import numa
from kvstore.memory.segment import MemoryOptions, Segment, free_node_name
from kvstore.node.agent import NodeAgent
from kvstore.transport.mooncake.engine import EngineSettings
from kvstore.transport.mooncake.server import EngineServer
from kvstore.transport.tcp_server import DataServer

log = logging.getLogger("kvstore.node")

NAME_WAIT_S: Final = 2.0
"""How long a node waits for the process of before to end that has its name."""

EVERY_INTERFACE: Final = ("", "0.0.0.0", "::")


def run(config: NodeConfig, parent_fd: int | None = None, *, keep_orphaned: bool = False) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent is gone; the exit status.

    Args:
        config: of the node.
        parent_fd: the child's end of a ``kvstore.children`` pair; told once the node has joined.
        keep_orphaned: leave the memory to the next node of this name if the parent is killed.

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
            segment = _mount(config, is_child=parent_fd is not None)
            drained = False

            def close() -> None:
                keep = config.keep or (keep_orphaned and parent.killed)
                segment.close(unlink=drained or not keep)

            stack.callback(close)
            server = DataServer(
                [segment], config.host, config.port, connections_max=config.connections_max
            )
            server.start()
            stack.callback(server.stop)
            engine = _start_engine(config, segment)
            if engine is not None:
                stack.callback(engine.close)
            # Last in, first out: nothing interrupts the clean-up that follows.
            stack.callback(signal.signal, signal.SIGTERM, signal.SIG_IGN)
            drained = asyncio.run(_serve(config, segment, server, engine, parent))
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
    config: NodeConfig,
    segment: Segment,
    server: DataServer,
    engine: EngineServer | None,
    parent: ParentLink,
) -> bool:
    """Until it is told to stop; whether that was because it was drained."""
    address = _advertised(config, server.port)

    def joined(accepted: MasterAccepted) -> None:
        print(
            f"kvstore-node {segment.node} serves {segment.size >> 20} MiB on {address} "
            f"for the master at {shown_place(config.master)}",
            flush=True,
        )
        parent.tell(name=segment.node, epoch=accepted.epoch)

    def waiting(error: KVStoreError) -> None:
        log.warning("waiting_for_master address=%s reason=%s", shown_place(config.master), error)

    agent = NodeAgent(
        name=segment.node,
        host=host_id(),
        master=config.master,
        segment=segment,
        server=server,
        address=address,
        engine=engine,
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
    return agent.drained


def _mount(config: NodeConfig, *, is_child: bool) -> Segment:
    """The memory that was left under our name, or new memory."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True),
        TransferSpeedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    hidden = is_child or not console.is_terminal
    started = time.monotonic()
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("reserving memory", total=config.memory)
        segment = _named(
            config,
            lambda done, total: bar.update(task, completed=done, total=total),
            is_child=is_child,
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


def _named(config: NodeConfig, progress: Callable[[int, int], None], *, is_child: bool) -> Segment:
    """By the name that was given, or by one that nobody has."""
    options = MemoryOptions(
        huge_pages=config.huge_pages, numa_node=config.numa_node, lock=config.lock_memory
    )
    base = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-") or "node"
    name = config.name or free_node_name(base)
    patience = time.monotonic() + NAME_WAIT_S
    while True:
        try:
            segment = None
            if not config.discard:
                segment = _left(name, config, options, progress, is_child=is_child)
            return segment or Segment.create(
                name, config.memory, progress=progress, options=options
            )
        except NodeNameTakenError:
            again = config.name or free_node_name(base)
            if again == name:
                if time.monotonic() >= patience:
                    raise
                time.sleep(0.05)  # its process may be ending
            name = again  # somebody was faster


def _start_engine(config: NodeConfig, segment: Segment) -> EngineServer | None:
    if not config.protocol:
        return None
    settings = EngineSettings(config.protocol, config.device_name, config.metadata_server)
    host, _ = split_address(_advertised(config, 0), default_port=0)
    return EngineServer(segment, settings, host)


def _left(
    name: str,
    config: NodeConfig,
    options: MemoryOptions,
    progress: Callable[[int, int], None],
    *,
    is_child: bool,
) -> Segment | None:
    """What was left under this name, if it is of use. A child has no user who could be asked what
    to do with what is not."""
    try:
        segment = Segment.attach(name, config.memory, progress=progress, options=options)
    except LeftOverMemoryError as error:
        if not is_child:
            raise
        log.warning("left_over_memory_discarded node=%s reason=%s", name, error.message)
        return None
    if segment is not None:
        log.info("memory_attached node=%s bytes=%d", name, segment.size)
    return segment


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
