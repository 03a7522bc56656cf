"""The process ``kvstore-master``: an event loop, both RPC servers, and its own node if
requested."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import math
import os
import random
import re
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Final, NamedTuple

from kvstore._version import __version__
from kvstore.calls.tenants import TenantMatcher, TenantRule
from kvstore.config import MasterConfig
from kvstore.config.servers import EVICTION_POLICIES
from kvstore.errors import ClusterMismatchError, KVStoreError, StartupError
from kvstore.http.ports import bind, load_security
from kvstore.limits import plausible_epoch_max
from kvstore.master import grpc_server, http_child, times
from kvstore.master.authorizer import Access, Authorizer
from kvstore.master.busy_poll import new_event_loop
from kvstore.master.cluster_events import ClusterEventLog
from kvstore.master.connectivity import ConnectivityProbe
from kvstore.master.election import Election
from kvstore.master.ipc_channel import Answers, MasterChannel
from kvstore.master.lane_server import LaneSettings
from kvstore.master.open_access import OpenAccess
from kvstore.master.request_recorder import RequestRecorder, TraceFile
from kvstore.master.rpc_servers import ListenAddresses, RpcServers
from kvstore.master.service import MasterService, Standby, clock_ms
from kvstore.master.state.liveness import LivenessRules
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.repair_queue import RepairRules
from kvstore.master.state.rules import MasterRules
from kvstore.master.superseded_epochs import SupersededEpochs
from kvstore.master.tenants_file import TenantsFileWatcher
from kvstore.memory import cgroup
from kvstore.runtime import descriptors, logs, sd_notify, tasks
from kvstore.runtime.addresses import EtcdPlace, join_address, split_address
from kvstore.runtime.child_process import NO_PARENT, Child, ParentLink, start_node, start_timeout_s
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd.client import Etcd
from kvstore.runtime.histograms import Histogram
from kvstore.runtime.host import address_towards, is_loopback, loopback_reason, own_address
from kvstore.runtime.listeners import EVERY_INTERFACE, check_family, local_connect_address
from kvstore.runtime.malloc_tuning import keep_freed_memory
from kvstore.runtime.tasks import EXIT_BROKEN, start_task
from kvstore.runtime.watched_files import refused_files, watching

log = logging.getLogger("kvstore.master")

GC_S: Final = 1.0
"""How often survivors of the young generations are frozen, so that the collector skips them."""

_MIDDLE: Final = 2
"""Young collections per collection of the middle generation. With 10, Python's default, the latter
takes 5 ms."""

_NEVER: Final = 1 << 30

CONNECTIONS_MIN: Final = 1_024
"""Connections that each port accepts with any memory; more take an eighth of it at most."""

CONNECTION_BYTES: Final = {False: 128 << 10, True: 512 << 10}
"""Memory of a connection of gRPC and one of the lane (measured: 22 and 65 KiB); with TLS."""

STOP_GRACE_S: Final = 1.0
"""Time that calls under way get when the process is asked to stop."""

_NO_RECEIVER: Final = "ExecuteBatchError"


class EphemeralStore(NamedTuple):
    """A store that ends with this process, however that ends: no later process finds its memory."""

    name: str
    """The beginning of its node's name."""
    started: Callable[[int, int], None]
    """Called when the whole store serves, with the ports of gRPC and of HTTP (0: there is none).
    The master prints nothing itself."""


def run(
    config: MasterConfig, parent: ParentLink = NO_PARENT, *, temporary: EphemeralStore | None = None
) -> int:
    """Serves until SIGTERM, SIGINT or a closed terminal, or until the parent is gone. Returns the
    exit status: ``EXIT_BROKEN`` if a background task died that the master needs.

    ``parent``: the process to tell where the master listens.

    Raises:
        AddressInUseError, StartupError: the master could not start; nothing is left behind.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_worth_logging)
    keep_freed_memory()
    with (
        watching(),
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        return runner.run(_serve(config, parent, temporary))


def _is_worth_logging(record: logging.LogRecord) -> bool:
    """Filters out tracebacks that gRPC logs when a client cancels a call that is just ending, or is
    gone before the reply (an ``ExecuteBatchError``, which is private to gRPC).

    Raises:
        CancelledError: the one that gRPC logs. Raising it ends gRPC's task before the task prints
            the traceback to stderr, which no log filter reaches.
    """
    kind, error, _ = record.exc_info or (None, None, None)
    if isinstance(error, asyncio.CancelledError):
        raise error
    return getattr(kind, "__name__", "") != _NO_RECEIVER


async def _serve(config: MasterConfig, parent: ParentLink, temporary: EphemeralStore | None) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    tasks.watch_loop(loop)
    tasks.watch_threads()
    for number in tasks.shutdown_signals():
        loop.add_signal_handler(number, stopped.set)
    tasks.install_signal_handlers()
    if parent.fd is not None:
        loop.add_reader(parent.fd, stopped.set)
    if config.events_at and not all(map(importlib.util.find_spec, ("zmq", "msgpack"))):
        raise StartupError(
            "events by ZeroMQ need pyzmq and msgpack", advice="pip install pyzmq msgpack"
        )
    secured = load_security(config)
    place = config.etcd_place
    etcd = None if place is None else Etcd(place)
    broken = tasks.ShutdownRequest()
    master = _MasterProcess(config, broken)
    await master.bind()
    listener: socket.socket | None = None
    election: Election | None = None
    running: list[asyncio.Task[None]] = [start_task("collector", _freeze_gc(), died=broken)]
    stopping = loop.create_task(stopped.wait())
    breaking = loop.create_task(broken.wait())
    child: Child | None = None
    try:
        given = "http_port" in config.model_fields_set
        if config.http_port and http_child.is_installed(required=given):
            listener = await asyncio.to_thread(bind, config.host, config.http_port, is_given=given)
            master.serves_http(listener.getsockname()[1])
        endpoints = master.endpoints
        if etcd is None:
            # The wall clock grows from start to start, so no epoch needs to be stored. If the
            # clock was put back, the nodes report it (``_supersede_epoch``).
            master.begin(wall_clock_ms(), math.inf)
            log.info("master_started epoch=%d version=%s", master.epoch, __version__)
        else:
            address = _advertised(config, endpoints.port, etcd.place)
            election = Election(
                etcd, address, master, cluster=config.cluster, may_lead=master.access.may_lead
            )
            master.lead_as(address, election)
            running.append(
                start_task("election", election.run(), died=broken, expected=ClusterMismatchError)
            )
        await master.rpc_servers.start()
        needed = master.access.background_tasks()
        running += [start_task("identity", each, died=broken) for each in needed]
        if config.tenants:
            running.append(start_task("tenants", master.follow_tenants(), died=broken))
        if listener is not None:
            answers: Answers = {
                "role": master.role,
                "measures": master.measures,
                "notices": master.notices.after,
            }
            at = join_address(local_connect_address(config.host), endpoints.port)
            serving = http_child.supervise_http_child(
                listener, answers, master=at, cluster=config.cluster,
                feed=master.feed, events_at=config.events_at, names=_names(config),
                # A temporary store needs no history, and its dashboard is often never opened.
                on_demand=temporary is not None and master.feed is None,
                secured=secured, auth=config.auth,
            )  # fmt: skip
            running.append(start_task("http", serving, died=broken))
        # With etcd, memory waits for a leader, which may be far away.
        after_memory = bool(config.memory) and election is None
        if after_memory:
            sd_notify.still_starting("starts its memory", start_timeout_s(config.memory))
        elif temporary is None:
            _announce_ready(config, endpoints, listener, secured.scheme)
        if config.memory and election is not None:
            known = loop.create_task(election.leader_known.wait())
            await asyncio.wait((stopping, breaking, known), return_when=asyncio.FIRST_COMPLETED)
            known.cancel()
        if config.memory and not stopped.is_set() and broken.error is None:
            is_own = parent.fd is None and temporary is None
            prefix = "" if temporary is None else f"{temporary.name}-"
            try:
                child = await asyncio.to_thread(
                    _start_node, config, endpoints, is_own=is_own, prefix=prefix
                )
            except KVStoreError:
                if not stopped.is_set():  # a service manager ends the node at the same time
                    raise
                return 0
            master.awaits_memory = False
            if after_memory and temporary is None:
                _announce_ready(config, endpoints, listener, secured.scheme)
            if is_own:
                owned = f"{config.memory >> 20} MiB as node {child.said['name']}"
                print(f"kvstore-master owns {owned}", flush=True)
            running.append(start_task("child", _watch(child), expected=StartupError))
        parent.notify_ready(port=endpoints.port)
        if temporary is not None and not stopped.is_set():
            temporary.started(endpoints.port, listener.getsockname()[1] if listener else 0)
        await asyncio.wait((stopping, breaking, *running), return_when=asyncio.FIRST_COMPLETED)
        if broken.error is not None:
            return EXIT_BROKEN
        for task in running:
            if task.done() and not stopped.is_set():
                task.result()  # raises: a task here ends only with an error
        log.info("master_stopping epoch=%d", master.epoch)
        sd_notify.stopping()
        return 0
    finally:
        if parent.fd is not None:
            loop.remove_reader(parent.fd)
        if child is not None:
            await asyncio.to_thread(child.stop, orphaned=broken.error is not None)
        waits: list[asyncio.Task[Any]] = [stopping, breaking, *running]
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        if listener is not None:
            listener.close()
        if election is not None:
            await election.resign()
        if etcd is not None:
            await etcd.close()
        await master.stop()


class _MasterProcess:
    """The RPC servers of this process, and the service behind them while it leads. Implements
    ``LeadershipListener``."""

    def __init__(self, config: MasterConfig, died: tasks.Died) -> None:
        """``died``: called when the process cannot go on serving."""
        self._died = died
        self.epoch = 0
        """The epoch of the present or the last term."""
        self.awaits_memory = bool(config.memory)
        """Whether its own node has not joined yet."""
        self._config = config
        self._rules = MasterRules(
            lease_ms=config.lease_ms,
            put_deadline_ms=times.PUT_DEADLINE_MS,
            quarantine_ms=config.dead_ms + times.LATE_WRITE_MS,
            pinned_max=config.pinned_max,
            inventory_wait_ms=times.GATHER_MS,
            heartbeat_ms=config.dead_ms // times.BEATS_UNTIL_DEAD,
            liveness=LivenessRules(suspect_ms=config.dead_ms // 3, dead_ms=config.dead_ms),
            repair=RepairRules(after_ms=times.REPAIR_AFTER_MS),
        )
        self._standby = Standby()
        each, limited_by = _connection_limit_per_port(config)
        self.access: Access = Authorizer(config) if config.auth else OpenAccess()
        self.rpc_servers = RpcServers(
            self._standby,
            access=self.access,
            lane_settings=LaneSettings(connections_max=each, limited_by=limited_by),
            grpc_connections_max=each,
        )
        self.endpoints: ListenAddresses
        self._service: MasterService | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._address = ""
        self._logged_leader = ""
        self._election: Election | None = None
        self._outruns = SupersededEpochs(random.SystemRandom())
        self.feed = MasterChannel() if config.events else None
        self.notices = ClusterEventLog(wall_clock_ms)
        self._reach = ConnectivityProbe(self.access.node_tls)
        self._tenants = TenantsFileWatcher(config.tenants) if config.tenants else None
        self._recorder: RequestRecorder | None = None
        if config.record:
            file = TraceFile(Path(config.record), config.record_bytes)
            self._recorder = RequestRecorder(file)

    async def bind(self) -> None:
        config = self._config
        self.endpoints = await self.rpc_servers.bind(
            config.host, config.port, config.lane_port_wanted
        )

    def serves_http(self, port: int) -> None:
        """Tells clients that join where HTTP is."""
        has_events = self.feed is not None
        self.endpoints = self.endpoints._replace(http_port=port, has_events=has_events)

    def lead_as(self, address: str, election: Election) -> None:
        """Makes this one of several masters: ``address`` is its own, ``election`` decides who
        leads."""
        self._address, self._election = address, election

    def begin(self, epoch: int, until: float) -> None:
        self.epoch = epoch
        state = MasterState(
            epoch=epoch,
            epoch_max=plausible_epoch_max(wall_clock_ms()),
            version=__version__,
            cluster=self._election.cluster if self._election else self._config.cluster,
            rules=self._rules,
            policy=resolve_name(EVICTION_POLICIES[self._config.eviction])(),
            started_ms=clock_ms(),
            events=self.feed is not None,
            tenants=None if self._tenants is None else self._tenants.rules,
        )
        service = self._service = MasterService(
            state, access=self.access, recorder=self._recorder, died=self._died
        )
        service.leads_until = until
        if self._address:
            service.role, service.address = "leader", self._address
        service.counters_elsewhere = self._counters
        service.on_superseded = self._supersede_epoch
        service.noticed = self.notices.add
        service.reach = self._reach
        if self.feed is not None:
            self.feed.lead(state)
            service.has_events = self.feed.changed
        self.endpoints = service.endpoints = self.rpc_servers.switch_service(
            service, self.endpoints
        )
        service.start()
        self.notices.add("leads", {"epoch": epoch})

    def extend(self, until: float) -> bool:
        service = self._service
        if service is None or service.ceased:
            return False
        service.leads_until = max(service.leads_until, until)
        return True

    def end(self, leader: str) -> None:
        self._standby.leader = leader
        service, self._service = self._service, None
        if service is not None or leader != self._logged_leader:
            self.notices.add("stands_by", {"leader": leader or "unknown"})
        self._logged_leader = leader
        if service is not None:
            service.stop_serving()
            if self.feed is not None:
                self.feed.lead(None)
            self.endpoints = self.rpc_servers.switch_service(self._standby, self.endpoints)
            task = start_task("end of term", service.stop(), died=self._died)
            self._stopping.add(task)
            task.add_done_callback(self._stopping.discard)

    def _supersede_epoch(self, epoch: int) -> None:
        """Called when a node says that it has joined a master of a later epoch: a clock was set
        back. The next term begins above that epoch."""
        asyncio.get_running_loop().call_soon(self._end_if_below, epoch)

    def _end_if_below(self, epoch: int) -> None:
        if self._service is None or not self._outruns.ends_term(self.epoch, epoch, uptime()):
            return
        log.warning("epoch_superseded epoch=%d joined_before=%d", self.epoch, epoch)
        if self._election is not None:
            self._election.step_down_below(epoch)
            return
        self.end("")
        self.begin(self._outruns.next_epoch(epoch, wall_clock_ms()), math.inf)
        log.info("master_started epoch=%d version=%s", self.epoch, __version__)

    async def stop(self) -> None:
        await asyncio.gather(*self._stopping)
        if self._service is not None:
            await self._service.stop()
        await self.rpc_servers.stop(STOP_GRACE_S)
        if self._recorder is not None:
            await asyncio.to_thread(self._recorder.close)

    async def follow_tenants(self) -> None:
        """Follows the file of tenants, if there is one."""
        if self._tenants is not None:
            await self._tenants.follow(self._set_tenants)

    def _set_tenants(self, rules: Sequence[TenantRule], matcher: TenantMatcher) -> None:
        if self._service is not None:  # else the next term begins with these
            self._service.set_tenants(rules, matcher)

    def role(self) -> dict[str, object]:
        """Whether this master leads, and if not, the leader's ``host:port``, as far as known; and
        whether it awaits its own memory."""
        leads = self._service is not None and not self._service.ceased
        leader = "" if leads else self._standby.leader
        return {"leads": leads, "leader": leader, "awaits_memory": self.awaits_memory}

    def measures(self) -> dict[str, object]:
        """The values that ``kvstore.http.exposition`` shows of this process."""
        rpc_servers, service = self.rpc_servers, self._service
        nothing = Histogram()
        step_us = late_us = age_ms = reuse_ms = nothing
        if service is not None:
            step_us, late_us = service.step_us, service.late_us
            age_ms = service.state.pool.eviction_ages_ms
            reuse_ms = service.state.asking.reuses_ms
        return {
            "version": __version__,
            "cluster": self._config.cluster,
            "leads": self.role()["leads"],
            "epoch": self.epoch,
            "calls": {
                name: (stats.count, stats.errors, (stats.us.counts, stats.us.total))
                for name, stats in rpc_servers.dispatcher.stats.items()
                if stats.count
            },
            "step_us": (step_us.counts, step_us.total),
            "late_us": (late_us.counts, late_us.total),
            "eviction_age_ms": (age_ms.counts, age_ms.total),
            "reuse_ms": (reuse_ms.counts, reuse_ms.total),
            "connections": len(rpc_servers.lane.connections),
            **self.access.measures(),
            "files_refused": refused_files(),
            "counters": {
                "connections_refused": rpc_servers.lane.stats.rejected,
                "refused": self.access.refused,
                "connections_stalled": rpc_servers.lane.stats.stalled,
                **({} if self._election is None else self._election.counters()),
                **({} if self.feed is None else self.feed.counters()),
                **logs.counters(),
            },
        }

    def _counters(self) -> dict[str, int]:
        elections = {} if self._election is None else self._election.counters()
        counted = self.rpc_servers.counters() | {"refused": self.access.refused}
        return {**counted, **elections, **logs.counters()}


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def _connection_limit_per_port(config: MasterConfig) -> tuple[int, str]:
    """Return the connections that the lane and gRPC's port may each have, and what limits them."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = min([memory, *(each.limit for each in cgroup.limits())])
    fits = max(memory // 8 // CONNECTION_BYTES[bool(config.auth)], CONNECTIONS_MIN)
    wanted, reason = min((fits, "memory"), (grpc_server.CONNECTIONS_MAX, "the maximum"))
    files = descriptors.raise_limit(2 * wanted + descriptors.RESERVE)
    fits = max(1, (files - descriptors.RESERVE) // 2)
    return min(
        (wanted, reason), (fits, "open files: raise the hard limit (ulimit -Hn, LimitNOFILE)")
    )


def _advertised(config: MasterConfig, port: int, place: EtcdPlace) -> str:
    host = config.host
    if config.advertise:
        host, given = split_address(config.advertise, default_port=0)
        port = given or port
        check_family(config.host, host)
    elif host in EVERY_INTERFACE:
        host = address_towards(str(place))
    return join_address(host, port)


def _node_advertised(config: MasterConfig) -> str:
    """Return the address of this master's own memory for clients, if it is not the bound one."""
    if config.advertise:
        return split_address(config.advertise, default_port=0)[0]
    if config.host not in EVERY_INTERFACE:
        return ""
    host = address_towards(str(config.etcd_place)) if config.etcd_place else own_address()
    if is_loopback(host):
        host = local_connect_address(config.host)  # this host may have one kind of loopback only
        log.warning(
            "memory_on_loopback: clients on other hosts cannot reach the memory of this master; "
            "give --host or --advertise an address of this host"
        )
    return host


def _start_node(
    config: MasterConfig, endpoints: ListenAddresses, *, is_own: bool, prefix: str
) -> Child:
    """Starts the node of this master. ``is_own``: whether a user runs this master, not a parent
    process, and starts it again after it ends. ``prefix``: the beginning of the node's name."""
    host = local_connect_address(config.host)
    # The name is stable: a master that is killed and started again finds its memory by it.
    base = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-")
    return start_node(
        master=str(config.etcd_place or join_address(host, endpoints.port)),
        memory=config.memory,
        host=config.host,
        port=None if is_own else 0,
        advertise=_node_advertised(config),
        name=f"{prefix}{base or 'master'}-{endpoints.port}",
        cluster=config.cluster,
        keep=config.keep,
        keep_orphaned=is_own,
        auth=config.auth,
        data_encryption=config.data_encryption,
    )


async def _watch(child: Child) -> None:
    """Waits until the node process has ended, then raises StartupError."""
    status = await asyncio.to_thread(child.wait)
    raise StartupError(
        f"the node process of this master ended with status {status}",
        advice="Its own message is above; start the master again.",
    )


def _names(config: MasterConfig) -> list[str]:
    """Names by which a browser may reach the dashboard, next to addresses and ``localhost``."""
    advertised = split_address(config.advertise, default_port=0)[0] if config.advertise else ""
    names = [config.host, advertised, socket.gethostname(), *config.http_names_given]
    return [name for name in names if name]


def _announce_ready(
    config: MasterConfig, endpoints: ListenAddresses, http: socket.socket | None, scheme: str
) -> None:
    at = join_address(config.host, endpoints.port)
    why = "" if config.host in EVERY_INTERFACE else loopback_reason(config.host)
    if why and not is_loopback(config.host):
        log.warning("listens_on_loopback host=%s: %s", config.host, why)
    only = "; this host only, use --host to serve others" if why else ""
    print(
        f"kvstore-master listening on {at} (gRPC) and port {endpoints.lane_port} (lane){only}",
        flush=True,
    )
    if http is not None:
        at = f"{scheme}://{join_address(config.host, http.getsockname()[1])}"
        print(
            f"kvstore-master serves metrics on {at}/metrics, and a dashboard on {at}/",
            flush=True,
        )
    sd_notify.ready(f"serves on port {endpoints.port}")


async def _freeze_gc() -> None:
    """Keeps records out of the garbage collector's work. Records are in no reference cycles, and
    with a million of them a full collection stops the loop for half a second (measured). So every
    second the young objects are collected and the survivors are frozen, and there is no full
    collection in between: under many puts there would be several, of 10 ms each. Cycles that die
    after they were frozen leak: those of connections and of calls that waited are broken by hand
    (tests/unit/master/test_cycles.py); the only other cycles that were found belong to gRPC's
    calls, which are short."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(gc.get_threshold()[0], _MIDDLE, _NEVER)
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            await asyncio.sleep(GC_S)
            gc.collect(1)
            gc.freeze()
