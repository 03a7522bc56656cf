"""The process ``kvstore-node``: a segment, its data server, and its agent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from kvstore.calls import DiskLimits, MasterAccepted
from kvstore.config import DATA_PORTS, NodeConfig
from kvstore.errors import (
    AddressInUseError,
    ClusterMismatchError,
    KVStoreError,
    LeftOverMemoryError,
    NodeNameTakenError,
    StartupError,
)
from kvstore.http.ports import bind, load_security
from kvstore.memory import numa
from kvstore.memory.allocation import MemoryOptions
from kvstore.memory.disk_file import DiskFile
from kvstore.memory.header import SUPERBLOCK_BYTES, SegmentOwner
from kvstore.memory.medium import Medium
from kvstore.memory.segment import OwnedSegment
from kvstore.memory.shm_entries import free_node_name, group_id, socket_name, unlink_own
from kvstore.node.agent import NodeAgent
from kvstore.node.inventory import enable_header_macs
from kvstore.node.master_discovery import LOCATE_S
from kvstore.node.startup_progress import StartupProgress
from kvstore.runtime import descriptors, sd_notify, tasks
from kvstore.runtime.addresses import (
    ETCD_SCHEME,
    join_address,
    parse_etcd,
    shown_place,
    split_address,
)
from kvstore.runtime.child_process import NO_PARENT, ParentLink
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd.leader_lookup import find_leader
from kvstore.runtime.formatting import size_text
from kvstore.runtime.host import (
    SHM_DIRECTORY,
    address_towards,
    host_id,
    is_loopback,
    loopback_reason,
    places_of,
)
from kvstore.runtime.listeners import EVERY_INTERFACE, check_family
from kvstore.runtime.tasks import EXIT_BROKEN, start_task
from kvstore.runtime.watched_files import watching
from kvstore.security.credentials import Credentials
from kvstore.security.data_port_tls import NodeTls
from kvstore.security.descriptor_server import DescriptorServer
from kvstore.security.revocation_list import RevocationList
from kvstore.transport import tcp_server
from kvstore.transport.mooncake.engine import EngineSettings
from kvstore.transport.mooncake.server import EngineServer
from kvstore.transport.tcp_server import DataServer

if TYPE_CHECKING:
    from kvstore.node.http_server import NodeHttpServer

log = logging.getLogger("kvstore.node")

NAME_WAIT_S: Final = 2.0
"""How long a node waits for the previous process of its name to end."""


class ReplicaCopier(Protocol):
    """Copies objects of this node to other nodes when the master wants more replicas."""

    def wake(self) -> None:
        """Called when there are objects to copy. Does not block."""
        ...

    def stop(self) -> None: ...


def run(
    config: NodeConfig, parent: ParentLink = NO_PARENT, *, keep_orphaned: bool = False,
    repairs: Callable[[NodeConfig, str], ReplicaCopier] | None = None,
) -> int:  # fmt: skip
    """Serves until SIGTERM, SIGINT, a closed terminal, or the end of the parent. Returns the exit
    status: ``EXIT_BROKEN`` if a necessary part failed.

    Args:
        parent: notified when the node has joined.
        keep_orphaned: keep the memory for the next node of this name if the parent is killed.
        repairs: makes the ``ReplicaCopier`` for a node of this name; None: no copies are made.

    Raises:
        KVStoreError: the node could not start; no entry remains.
    """
    is_child = parent.fd is not None
    # From here on a signal ends the node cleanly, also while it reserves memory.
    for number in tasks.shutdown_signals():
        signal.signal(number, signal.default_int_handler)
    tasks.install_signal_handlers()
    try:
        with ExitStack() as stack:
            secured = load_security(config)
            credentials = Credentials(config.auth) if config.auth else None
            tls = _tls(config, credentials)
            if config.numa_node >= 0:
                numa.check_node(config.numa_node)
                numa.run_on(config.numa_node)  # before threads start: they inherit it
            stack.enter_context(watching())
            kind = _LaunchContext(is_child, keep_orphaned)
            config = config.model_copy(update={"host": _listens_on(config)})
            parent.notify_progress(f"reserves {config.memory >> 20} MiB of memory")
            descriptors.raise_limit(tcp_server.CONNECTIONS_MAX + descriptors.RESERVE)
            http: NodeHttpServer | None = None
            if config.http_port and not is_child:
                is_given = "http_port" in config.model_fields_set
                listener = bind(config.host, config.http_port, is_given=is_given)
                stack.callback(listener.close)
                at = join_address(config.host, listener.getsockname()[1])
                log.info("http_served address=%s://%s", secured.scheme, at)
                from kvstore.node.http_server import NodeHttpServer  # slow to import

                http = NodeHttpServer(listener, secured)
            starting = StartupProgress(config.memory)
            with http.serve_startup(starting) if http else contextlib.nullcontext():
                segment = _mount(config, kind, starting)
            drained = broken = False
            served: list[MasterAccepted] = []

            def close() -> None:
                # A failed start keeps leftover memory.
                wanted = config.keeps if not is_child or keep_orphaned else bool(config.keep)
                keep = wanted if served else segment.attached
                keep = keep or broken or (keep_orphaned and parent.parent_died)
                segment.close(unlink=drained or not keep)

            stack.callback(close)
            disks: list[DiskFile] = []
            for directory in filter(None, config.disk.split(",")):
                disks.append(disk := _open_disk(config, directory, segment))
                stack.callback(_close_disk, disk, served)
            if config.auth:
                enable_header_macs(segment)
            else:
                unlink_own(segment.private_path)  # new objects have no header MACs
            server = _start_server(config, segment, tls)
            stack.callback(server.stop)
            if not segment.traits.is_cleared and server.takes_capabilities:
                segment.zero([(SUPERBLOCK_BYTES, segment.size - SUPERBLOCK_BYTES)])
            descriptor_server = _start_descriptor_server(config, segment)
            if descriptor_server is not None:
                stack.callback(descriptor_server.close)
            engine = _start_engine(config, segment)
            if engine is not None:
                stack.callback(engine.close)
            copying = None if repairs is None else repairs(config, segment.node)
            if copying is not None:
                stack.callback(copying.stop)
            # Callbacks run last in, first out: no signal interrupts the clean-up that follows.
            for number in tasks.shutdown_signals():
                stack.callback(signal.signal, number, signal.SIG_IGN)
            try:
                drained = asyncio.run(
                    _serve(
                        config,
                        segment,
                        server,
                        engine,
                        descriptor_server,
                        parent,
                        served,
                        copying,
                        http,
                        credentials,
                        disks,
                    )
                )
            except KVStoreError:
                raise
            except Exception:
                log.exception("node_broken node=%s", segment.node)
                broken = True  # the memory stays: the node's next process reports its objects
                return EXIT_BROKEN
        return 0
    except KeyboardInterrupt:
        return 0


async def _serve(
    config: NodeConfig, segment: Medium, server: DataServer, engine: EngineServer | None,
    descriptor_server: DescriptorServer | None, parent: ParentLink, served: list[MasterAccepted],
    copying: ReplicaCopier | None, http: NodeHttpServer | None, credentials: Credentials | None,
    disks: Sequence[DiskFile],
) -> bool:  # fmt: skip
    """Serves until the node is stopped; returns whether it was drained. ``served`` gets the reply
    to the last join."""
    address = _advertised(config, server.port)
    medium = f" of {segment.traits.name}" if segment.traits.name else ""

    def joined(accepted: MasterAccepted) -> None:
        served[:] = [accepted]
        print(
            f"kvstore-node {segment.node} serves {segment.size >> 20} MiB{medium} on {address} "
            f"for the master at {shown_place(config.master)}",
            flush=True,
        )
        parent.notify_ready(name=segment.node, epoch=accepted.epoch)

    def waiting(error: KVStoreError) -> None:
        log.warning("waiting_for_master address=%s reason=%s", shown_place(config.master), error)
        parent.notify_progress(f"waits for its master: {error.message}")

    agent = NodeAgent(
        name=segment.node, host=host_id(), master=config.master, segment=segment, server=server,
        address=address, engine=engine, descriptor_server=descriptor_server,
        owner=segment.owner._replace(cluster=config.cluster or segment.owner.cluster),
        joined=joined, waiting=waiting, repair=(lambda: None) if copying is None else copying.wake,
        credentials=credentials, disks=disks,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    tasks.watch_loop(loop)
    tasks.watch_threads()
    for number in tasks.shutdown_signals():
        loop.add_signal_handler(number, agent.stop)
    if parent.fd is not None:
        loop.add_reader(parent.fd, agent.stop)
    reminding = start_task("identity", credentials.keep_reminding()) if credentials else None
    try:
        async with contextlib.AsyncExitStack() as stack:
            if http is not None:
                serves = http.serve(agent, segment, server, descriptor_server, credentials)
                await stack.enter_async_context(serves)
            if descriptor_server is not None:
                await stack.enter_async_context(descriptor_server.serving())
            sd_notify.ready(f"serves {size_text(segment.size)} as node {segment.node}")
            await agent.run()
    finally:
        if reminding is not None:
            reminding.cancel()
        if parent.fd is not None:
            loop.remove_reader(parent.fd)
        sd_notify.stopping()
    log.info("node_stopped node=%s", segment.node)
    return agent.drained


class _LaunchContext(NamedTuple):
    """The kind of start, which decides the use of leftover memory."""

    is_child: bool
    """A parent process started it, and no user can decide."""
    from_master: bool


def _mount(
    config: NodeConfig, kind: _LaunchContext, progress: Callable[[int, int], None]
) -> Medium:
    """Attaches the leftover memory of this node's name, or creates new memory."""
    started = time.monotonic()
    segment = _named(config, progress, kind)
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


def _named(
    config: NodeConfig, progress: Callable[[int, int], None], kind: _LaunchContext
) -> Medium:
    """Returns the segment of the configured name, or of a free one."""
    owner = _owner(config, kind)
    medium = _medium(config, progress, owner)
    base = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).lstrip("._-") or "node"
    unusable: set[str] = set()
    name = config.name or free_node_name(base, owner)
    patience = time.monotonic() + NAME_WAIT_S
    while True:
        try:
            return _attach(name, config, medium, owner, kind) or _create(name, config, medium)
        except NodeNameTakenError:
            again = config.name or free_node_name(base, owner, unusable)
            if again == name:
                if time.monotonic() >= patience:
                    raise
                time.sleep(0.05)  # the other process may be ending
            name = again  # another process was faster
        except _UnusableSegmentError:
            unusable.add(name)
            name = free_node_name(base, owner, unusable)


def _open_disk(config: NodeConfig, directory: str, segment: Medium) -> DiskFile:
    """Attach the node's file in this directory, or create it. Errors as of memory."""
    if not os.path.isdir(directory):
        raise StartupError(
            f"--disk {directory} is not a directory", advice=f"mkdir {directory}", path=directory
        )
    path = os.path.join(directory, f"kvstore.{segment.node}")
    started = time.monotonic()
    owner = segment.owner
    left = None if config.discard else DiskFile.attach(
        path, segment.node, config.disk_size, owner=owner, adopt=config.adopt,
        private=bool(config.auth),
    )  # fmt: skip
    disk = left or DiskFile.create(path, segment.node, config.disk_size, owner=owner)
    if config.auth:
        disk.keep_private()
    else:
        unlink_own(disk.private_path)
    disk.limits = DiskLimits(
        config.disk_write_rate, int(config.disk_size * config.disk_writes_per_day)
    )
    log.info(
        "disk_ready node=%s path=%s bytes=%d attached=%s seconds=%.2f", segment.node, path,
        disk.size, disk.attached, time.monotonic() - started,
    )  # fmt: skip
    return disk


def _close_disk(disk: DiskFile, served: Sequence[MasterAccepted]) -> None:
    """Keep the file, unless it is new and no master has accepted the node."""
    with contextlib.suppress(OSError):  # the disk fails; checksums decide at the next start
        disk.close(unlink=not (served or disk.attached))


class _Medium(NamedTuple):
    """Makes the segment of a node, given its name."""

    create: Callable[[str], Medium]
    attach: Callable[[str], Medium | None]


def _medium(
    config: NodeConfig, progress: Callable[[int, int], None], owner: SegmentOwner
) -> _Medium:
    """Selects the medium by the settings."""
    if config.device:
        from kvstore.node.device_segment import DeviceSegment  # slow to import

        on = partial(
            DeviceSegment.on, config.device, size=config.memory, group=config.shm_group,
            owner=owner, discard=config.discard,
        )  # fmt: skip
        return _Medium(on, lambda name: None)
    options = MemoryOptions(
        huge_pages=config.huge_pages,
        numa_node=config.numa_node,
        group="" if config.passes_descriptors else config.shm_group,
    )
    create = partial(
        OwnedSegment.create, size=config.memory, progress=progress, options=options, owner=owner
    )
    attach = partial(
        OwnedSegment.attach, size=config.memory, progress=progress, options=options, owner=owner,
        adopt=config.adopt, discard=config.discard, private=bool(config.auth),
    )  # fmt: skip
    return _Medium(create, attach)


def _create(name: str, config: NodeConfig, medium: _Medium) -> Medium:
    try:
        return medium.create(name)
    except LeftOverMemoryError:
        if config.name:
            raise
        raise _UnusableSegmentError from None


class _UnusableSegmentError(Exception):
    """Leftover memory of an automatic name cannot be used: choose another name."""


def _owner(config: NodeConfig, kind: _LaunchContext) -> SegmentOwner:
    places = places_of(config.master)
    if kind.from_master and not config.master.startswith(ETCD_SCHEME):
        # The master is on this host, at any of its addresses.
        _, port = split_address(config.master)
        places = tuple(dict.fromkeys((*places, *places_of(f"127.0.0.1:{port}"))))
    return SegmentOwner(config.cluster, places, volatile=kind.is_child and not kind.from_master)


def _start_engine(config: NodeConfig, segment: Medium) -> EngineServer | None:
    if not config.protocol:
        return None
    settings = EngineSettings(config.protocol, config.device_name, config.metadata_server)
    host, _ = split_address(_advertised(config, 0), default_port=0)
    return EngineServer(segment, settings, host)


def _start_descriptor_server(config: NodeConfig, segment: Medium) -> DescriptorServer | None:
    """Raises StartupError: file descriptors cannot be passed."""
    if not config.passes_descriptors:
        return None
    try:
        return DescriptorServer(
            segment,
            group=group_id(config.shm_group),
            needs_all=config.shm_clients == "all-namespaces",
        )
    except OSError as error:
        raise StartupError(
            "cannot share memory descriptors with clients: "
            f"{SHM_DIRECTORY}/{socket_name(segment.shm_name)}: {error.strerror or error}",
            advice="If it is another user's, choose another --name, or have it removed. The node's "
            "own user has to be a member of --shm-group.",
        ) from error


def _attach(
    name: str, config: NodeConfig, medium: _Medium, owner: SegmentOwner, kind: _LaunchContext
) -> Medium | None:
    """The leftover memory of this name, if it can be used.

    Raises:
        _UnusableSegmentError: it cannot; the name was automatic.
        ClusterMismatchError, LeftOverMemoryError: it cannot, and the user has to decide.
    """
    try:
        segment = medium.attach(name)
    except ClusterMismatchError:
        if config.name:
            raise
        raise _UnusableSegmentError from None  # a node was killed after the name was chosen
    except LeftOverMemoryError as error:
        if config.discard:
            return None  # new memory takes its place
        if not kind.is_child:
            raise
        if not kind.from_master and not error.fields.get("volatile"):
            if config.name:
                raise
            raise _UnusableSegmentError from None
        log.warning("left_over_memory_discarded node=%s reason=%s", name, error.message)
        return None
    if segment is not None:
        log.info("memory_attached node=%s bytes=%d", name, segment.size)
        segment.keep_owner(owner._replace(cluster=owner.cluster or segment.owner.cluster))
    return segment


def _tls(config: NodeConfig, credentials: Credentials | None) -> NodeTls | None:
    """The encryption of the data port; None: none. Raises ConfigError: clients would not accept
    this identity from a node, or a file is invalid."""
    if config.data_encryption == "off" or credentials is None:
        return None
    return NodeTls(credentials, RevocationList(config.auth_revoked))


def _start_server(config: NodeConfig, segment: Medium, tls: NodeTls | None) -> DataServer:
    """Starts the data server on the configured port, or else on a default or free one. Raises
    AddressInUseError or StartupError."""
    ports = [config.port]
    if "port" not in config.model_fields_set:
        ports = [*range(config.port, config.port + DATA_PORTS), 0]
    for port in ports:
        server = DataServer(
            [segment], config.host, port, connections_max=tcp_server.CONNECTIONS_MAX,
            capabilities=bool(config.auth), tls=tls,
        )  # fmt: skip
        try:
            server.start()
        except AddressInUseError:
            if port == ports[-1]:
                raise
            continue
        if port != ports[0]:
            log.warning(
                "data_port_taken wanted=%d port=%d: open this port, or choose one with --port",
                ports[0],
                server.port,
            )
        return server
    raise AssertionError("there is a last port")


def _listens_on(config: NodeConfig) -> str:
    """The address of the data server. Raises StartupError: it is a loopback address, but the master
    is on another host."""
    towards = _own_address(config.master)
    if not config.host:
        return towards
    advertised, _ = split_address(_advertised(config, 0), default_port=0)
    check_family(config.host, advertised)
    only_here = loopback_reason(advertised if config.advertise else config.host)
    if not only_here or is_loopback(towards):
        return config.host
    if config.advertise:
        log.warning("advertises_loopback address=%s: others cannot reach it", config.advertise)
        return config.host
    raise StartupError(
        f"clients on other hosts cannot reach this node: {only_here}, and the master at "
        f"{shown_place(config.master)} is on another one, or serves others",
        advice=f"Leave out --host, or give --host {towards}. To serve this host only, say so: "
        f"--advertise {config.host}",
        host=config.host,
    )


def _own_address(masters: str) -> str:
    """The address of this host towards the master, or towards the first on another host."""
    if masters.startswith(ETCD_SCHEME):
        place = parse_etcd(masters)
        leader = ""
        with contextlib.suppress(KVStoreError):
            leader = find_leader(place, uptime() + LOCATE_S)
        masters = leader or ",".join(place.endpoints)
    found = [address_towards(master) for master in masters.split(",")]
    return next((address for address in found if not is_loopback(address)), found[0])


def _advertised(config: NodeConfig, port: int) -> str:
    if config.advertise:
        host, given = split_address(config.advertise, default_port=0)
        return join_address(host, given or port)
    host = config.host
    if host in EVERY_INTERFACE:
        host = _own_address(config.master)
    return join_address(host, port)
