"""The process ``kvstore-master``: one event loop, both carriers, and a node of its own if asked."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import re
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

from kvstore._version import __version__
from kvstore.addresses import EtcdPlace, join_address, split_address
from kvstore.children import Child, ParentLink, start_node
from kvstore.config import MasterConfig
from kvstore.errors import KVStoreError, StartupError
from kvstore.etcd.client import Etcd
from kvstore.host import address_towards
from kvstore.master.carriers import Carriers, Endpoints
from kvstore.master.election import Election
from kvstore.master.lane import LaneSettings
from kvstore.master.service import MasterService, Standby, clock_ms
from kvstore.master.spin import new_event_loop
from kvstore.master.state.liveness import LivenessRules
from kvstore.master.state.master_state import MasterRules, MasterState

log = logging.getLogger("kvstore.master")

GC_S: Final = 1.0
"""How often the survivors of the young generations are moved out of the collector's sight."""

_MIDDLE: Final = 2
"""Collections of the young between two of the middle generation, which takes 5 ms after 10 of
them."""

_NEVER: Final = 1 << 30

STOP_GRACE_S: Final = 1.0
"""What calls under way get when the process is asked to stop."""

EVERY_INTERFACE: Final = ("", "0.0.0.0", "::")


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
    place = config.etcd_place
    etcd = None if place is None else Etcd(place)
    master = _Master(config)
    await master.bind()
    endpoints = master.endpoints
    election: Election | None = None
    tasks = [loop.create_task(_keep_collector_out())]
    stopping = loop.create_task(stopped.wait())
    child: Child | None = None
    try:
        if etcd is None:
            # Wall-clock milliseconds: grows from one start to the next, with nothing kept between.
            master.begin(time.time_ns() // 1_000_000, math.inf)
            log.info("master_started epoch=%d version=%s", master.epoch, __version__)
        else:
            address = _advertised(config, endpoints.port, etcd.place)
            election = Election(etcd, address, config.etcd_lease_ms, master)
            master.lead_as(address, election.counters)
            tasks.append(loop.create_task(election.run()))
        await master.carriers.start()
        _greet(config, endpoints)
        if config.memory and election is not None:
            known = loop.create_task(election.leader_known.wait())
            await asyncio.wait((stopping, known), return_when=asyncio.FIRST_COMPLETED)
            known.cancel()
        if config.memory and not stopped.is_set():
            child = await asyncio.to_thread(_start_node, config, endpoints)
            tasks.append(loop.create_task(_watch(child)))
        parent.tell(port=endpoints.port)
        await asyncio.wait((stopping, *tasks), return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task.done() and not stopped.is_set():
                task.result()  # raises: none of them ends by itself
        log.info("master_stopping epoch=%d", master.epoch)
        return 0
    finally:
        if parent.fd is not None:
            loop.remove_reader(parent.fd)
        if child is not None:
            await asyncio.to_thread(child.stop)
        stopping.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(stopping, *tasks, return_exceptions=True)
        if election is not None:
            await election.resign()
        if etcd is not None:
            await etcd.close()
        await master.stop()


class _Master:
    """The carriers of this process, and behind them a service while it leads: ``Terms``."""

    def __init__(self, config: MasterConfig) -> None:
        self.epoch = 0
        """Of the present or the last term."""
        self._config = config
        self._rules = MasterRules(
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
        self._standby = Standby()
        settings = LaneSettings(connections_max=config.connections_max)
        self.carriers = Carriers(self._standby, lane_settings=settings)
        self.endpoints: Endpoints
        self._service: MasterService | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._address = ""
        self._election_counters: Callable[[], dict[str, int]] = dict

    async def bind(self) -> None:
        config = self._config
        self.endpoints = await self.carriers.bind(config.host, config.port, config.lane_port_wanted)

    def lead_as(self, address: str, counters: Callable[[], dict[str, int]]) -> None:
        """One of several: where we are when we lead, and what the election counts."""
        self._address, self._election_counters = address, counters

    def begin(self, epoch: int, until: float) -> None:
        self.epoch = epoch
        state = MasterState(
            epoch=epoch, version=__version__, rules=self._rules, started_ms=clock_ms()
        )
        service = self._service = MasterService(state)
        service.leads_until = until
        if self._address:
            service.role, service.address = "leader", self._address
        service.counters_elsewhere = self._counters
        self.endpoints = service.endpoints = self.carriers.serve(service, self.endpoints)
        service.start()

    def extend(self, until: float) -> bool:
        service = self._service
        if service is None or service.ceased:
            return False
        service.leads_until = max(service.leads_until, until)
        return True

    def end(self, leader: str) -> None:
        self._standby.leader = leader
        service, self._service = self._service, None
        if service is not None:
            service.cease()
            self.endpoints = self.carriers.serve(self._standby, self.endpoints)
            task = asyncio.get_running_loop().create_task(service.stop())
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    async def stop(self) -> None:
        await asyncio.gather(*self._stopping)
        if self._service is not None:
            await self._service.stop()
        await self.carriers.stop(STOP_GRACE_S)

    def _counters(self) -> dict[str, int]:
        return {**self.carriers.counters(), **self._election_counters()}


def _advertised(config: MasterConfig, port: int, place: EtcdPlace) -> str:
    host = config.host
    if config.advertise:
        host, given = split_address(config.advertise, default_port=0)
        port = given or port
    elif host in EVERY_INTERFACE:
        host = address_towards(str(place))
    return join_address(host, port)


def _start_node(config: MasterConfig, endpoints: Endpoints) -> Child:
    host = config.host if config.host not in EVERY_INTERFACE else "127.0.0.1"
    # Its name, for the memory to be found again when we were killed and are started again.
    base = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")
    child = start_node(
        master=str(config.etcd_place or join_address(host, endpoints.port)),
        memory=config.memory,
        host=config.host,
        name=f"{base or 'master'}-{endpoints.port}",
        keep_orphaned=True,
    )
    print(f"kvstore-master owns {config.memory >> 20} MiB as node {child.said['name']}", flush=True)
    return child


async def _watch(child: Child) -> None:
    """Raises StartupError: when it has ended."""
    status = await asyncio.to_thread(child.wait)
    raise StartupError(
        f"the node process of this master ended with status {status}",
        advice="Its own message is above; start the master again.",
    )


def _greet(config: MasterConfig, endpoints: Endpoints) -> None:
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


async def _keep_collector_out() -> None:
    """Records are in no reference cycles, so looking at them is wasted: with a million of them a
    full collection stops the loop for half a second (measured). So every second the young are
    collected and what survives is frozen, and there is no full collection in between: under many
    puts there would be several, of 10 ms each. What leaks are cycles that die after that: those of
    connections and of calls that waited are broken by hand (tests/unit/master/test_cycles.py); the
    only others that were found are of gRPC's calls, which are short."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _MIDDLE, _NEVER)
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(GC_S)
            gc.collect(1)
            gc.freeze()
