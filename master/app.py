"""The process ``kvstore-master``: one event loop, both carriers, and a node of its own if asked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import signal
import socket
import time
from typing import Final

from kvstore._version import __version__
from kvstore.children import Child, ParentLink, start_node
from kvstore.config import MasterConfig, join_address
from kvstore.errors import KVStoreError, StartupError
from kvstore.master.carriers import Carriers, Endpoints
from kvstore.master.lane import LaneSettings
from kvstore.master.service import MasterService, clock_ms
from kvstore.master.spin import new_event_loop
from kvstore.master.state.liveness import LivenessRules
from kvstore.master.state.master_state import MasterRules, MasterState

log = logging.getLogger("kvstore.master")

GC_S: Final = 1.0
"""How often the survivors of the young generations are moved out of the collector's sight."""

STOP_GRACE_S: Final = 1.0
"""What calls under way get when the process is asked to stop."""


def run(config: MasterConfig, parent_fd: int | None = None) -> int:
    """Serve until SIGTERM or SIGINT, or until the parent is gone; returns the exit status.

    ``parent_fd``: the child's end of a ``kvstore.children`` pair; told where we listen.

    Raises:
        AddressInUseError, StartupError: it could not start; nothing is left behind.
    """
    parent = ParentLink(parent_fd)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)
    try:
        with asyncio.Runner(loop_factory=lambda: new_event_loop(config.lane_spin_us)) as runner:
            return runner.run(_serve(config, parent))
    except KVStoreError as error:
        if not parent.waits:
            raise
        parent.tell_error(error)
        return 1
    finally:
        parent.close()


def _is_news(record: logging.LogRecord) -> bool:
    """gRPC logs a traceback when a client cancels a call that is just ending."""
    return record.exc_info is None or record.exc_info[0] is not asyncio.CancelledError


async def _serve(config: MasterConfig, parent: ParentLink) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if parent.fd is not None:
        loop.add_reader(parent.fd, stopped.set)
    # Wall-clock milliseconds: grows from one start to the next, with nothing kept in between.
    epoch = time.time_ns() // 1_000_000
    rules = MasterRules(
        lease_ms=config.lease_ms,
        put_deadline_ms=config.put_deadline_ms,
        quarantine_ms=config.quarantine_ms,
        put_wait_max_ms=config.put_wait_max_ms,
        gather_ms=config.gather_ms,
        pending_puts_max=config.pending_puts_max,
        waiting_puts_max=config.waiting_puts_max,
        beat_ms=config.beat_ms,
        liveness=LivenessRules(suspect_ms=config.suspect_ms, dead_ms=config.dead_ms),
    )
    state = MasterState(epoch=epoch, version=__version__, rules=rules, started_ms=clock_ms())
    service = MasterService(state)
    carriers = Carriers(service, lane_settings=LaneSettings(connections_max=config.connections_max))
    service.endpoints = endpoints = await carriers.bind(
        config.host, config.port, config.lane_port_wanted
    )
    service.counters_elsewhere = carriers.counters
    service.start()
    await carriers.start()
    cleaner = loop.create_task(_keep_collector_out())
    child: Child | None = None
    try:
        _greet(config, endpoints, epoch)
        if config.memory:
            child = await asyncio.to_thread(_start_node, config, endpoints)
            parent.tell(port=endpoints.port)
            watcher = loop.create_task(asyncio.to_thread(child.wait))
            stopping = loop.create_task(stopped.wait())
            await asyncio.wait((watcher, stopping), return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if not stopped.is_set():
                raise StartupError(
                    f"the node process of this master ended with status {watcher.result()}",
                    advice="Its own message is above; start the master again.",
                )
        else:
            parent.tell(port=endpoints.port)
            await stopped.wait()
        log.info("master_stopping epoch=%d", epoch)
        return 0
    finally:
        if parent.fd is not None:
            loop.remove_reader(parent.fd)
        if child is not None:
            await asyncio.to_thread(child.stop)
        cleaner.cancel()
        await asyncio.gather(cleaner, return_exceptions=True)
        await service.stop()
        await carriers.stop(STOP_GRACE_S)


def _start_node(config: MasterConfig, endpoints: Endpoints) -> Child:
    host = config.host if config.host not in ("", "0.0.0.0", "::") else "127.0.0.1"
    # Its name, for the memory to be found again when we were killed and are started again.
    base = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")
    child = start_node(
        master=join_address(host, endpoints.port),
        memory=config.memory,
        host=config.host,
        name=f"{base or 'master'}-{endpoints.port}",
        keep_orphaned=True,
    )
    print(f"kvstore-master owns {config.memory >> 20} MiB as node {child.said['name']}", flush=True)
    return child


def _greet(config: MasterConfig, endpoints: Endpoints, epoch: int) -> None:
    at = join_address(config.host, endpoints.port)
    only = (
        "; this host only, use --host to serve others"
        if config.host in ("127.0.0.1", "localhost", "::1")
        else ""
    )
    print(
        f"kvstore-master listening on {at} (gRPC) and port {endpoints.lane_port} (lane){only}",
        flush=True,
    )
    log.info("master_started epoch=%d version=%s", epoch, __version__)


async def _keep_collector_out() -> None:
    """Records are in no reference cycles, so looking at them is wasted: with a million of them a
    full collection stops the loop for half a second (measured). So every second the young are
    collected and what survives is frozen. What leaks are cycles that die after that: connections'
    cycles are broken by hand, the rest is small."""
    gc.collect()
    gc.freeze()
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(GC_S)
            gc.collect(1)
            gc.freeze()
