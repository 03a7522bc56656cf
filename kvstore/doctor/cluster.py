"""The cluster as it is seen from here: ports, master, lane, and each node's memory."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from kvstore import calls
from kvstore._version import __version__
from kvstore.addresses import join_address, split_address
from kvstore.calls import ClusterStatus, Joined, NodeStatus, SegmentInfo, Segments
from kvstore.client.stub import MasterStub
from kvstore.config import MasterConfig
from kvstore.doctor.findings import Finding, ok, problem, warning
from kvstore.errors import KVStoreError
from kvstore.host import host_id
from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.transport.base import Move
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp import TcpTransport
from kvstore.wire.frames import ERROR, FrameReader, hello
from kvstore.wire.status import decode_error

PROBE_BYTES = 4_096

AT_ONCE_MAX = 16
"""Masters or nodes that are asked at the same time."""

Deadline = float
"""A ``time.monotonic()`` value."""


def ports(config: MasterConfig, timeout_s: float) -> list[Finding]:
    """Those that a master would listen on here; one that has them already is fine."""
    found = []
    for name, port in (("gRPC", config.port), ("lane", config.lane_port_wanted)):
        why = port_taken(config.host, port)
        if why is None:
            found.append(ok("ports", f"{port} ({name}) is free"))
        elif why == errno.EADDRINUSE and master_at(config.host, config.port, timeout_s):
            found.append(ok("ports", f"{port} ({name}) is taken, and a master answers here"))
        elif why == errno.EADDRINUSE:
            advice = f"ss -ltnp 'sport = :{port}' says by whom; or choose another with --port"
            found.append(warning("ports", f"{port} ({name}) is taken by no master", advice))
        else:
            what = f"{config.host}:{port} cannot be listened on: {errno.errorcode[why]}"
            found.append(warning("ports", what, "ip address: --host must be one of this host's"))
    return found


def port_taken(host: str, port: int) -> int | None:
    """Why nobody can listen there (an errno), or None."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, port), family=family):
            return None
    except OSError as error:
        return error.errno or errno.EIO


def master_at(host: str, port: int, timeout_s: float) -> bool:
    where = "127.0.0.1" if host in ("", "0.0.0.0") else "::1" if host == "::" else host
    stub = MasterStub(join_address(where, port), host=host_id(), name="doctor", lane=False)
    try:
        stub.join(time.monotonic() + min(1.0, timeout_s / 3))
        return True
    except KVStoreError:
        return False
    finally:
        stub.close()


def cluster(masters: str, timeout_s: float) -> list[Finding]:
    """Each master of a list, its lane, and through the first that answers the nodes. What takes
    long goes on at the same time, each with all of ``timeout_s``."""
    places = masters.split(",")
    stubs = [MasterStub(place, host=host_id(), name="doctor", lane=False) for place in places]
    with ThreadPoolExecutor(AT_ONCE_MAX) as pool:
        try:
            asked = [pool.submit(master, *each, timeout_s) for each in zip(places, stubs)]
            found = [finding for each in asked for finding in each.result()]
            serving = next((stub for stub in stubs if stub.joined is not None), None)
            return found if serving is None else found + nodes(serving, timeout_s, pool)
        finally:
            for stub in stubs:
                stub.close()


def master(place: str, stub: MasterStub, timeout_s: float) -> list[Finding]:
    deadline = time.monotonic() + timeout_s
    subject = f"master {place}"
    try:
        joined = stub.join(deadline)
    except KVStoreError as error:
        host, port = split_address(place)
        advice = f"kvstore-master --host {host} --port {port} there; is the port open in between?"
        return [problem(subject, error.message, advice)]
    found = []
    if joined.version != __version__:
        what = f"answers, version {joined.version}; here is {__version__}"
        found.append(warning(subject, what, "Install the same release on both."))
    else:
        found.append(ok(subject, f"answers, version {joined.version}, epoch {joined.epoch}"))
    host, _ = split_address(place)
    return [*found, lane(host, joined, deadline)]


def lane(host: str, joined: Joined, deadline: Deadline) -> Finding:
    """By its TCP port, which other hosts use."""
    subject = "lane"
    if not joined.lane_port:
        return warning(subject, "the master has none", "Calls take 300 µs more; see --lane-port.")
    address = join_address(host, joined.lane_port)
    try:
        left_s = max(0.1, deadline - time.monotonic())
        with socket.create_connection((host, joined.lane_port), timeout=left_s) as sock:
            sock.sendall(hello(joined.lane_token))
            reader = FrameReader()
            while (answer := reader.next()) is None:
                if not (count := sock.recv_into(reader.space())):
                    raise ConnectionError("it was closed")
                reader.received(count)
        if answer[1] == ERROR:
            raise decode_error(answer[3])
    except (OSError, KVStoreError) as error:
        what = f"{address} does not answer: {error}"
        return warning(subject, what, f"Open port {joined.lane_port}: calls take 300 µs more.")
    return ok(subject, f"{address} answers")


def nodes(stub: MasterStub, timeout_s: float, pool: ThreadPoolExecutor) -> list[Finding]:
    """Whether each is well, its data port is reached, and its memory mapped where that is here."""
    deadline = time.monotonic() + timeout_s
    try:
        status = cast(ClusterStatus, stub.call(calls.Status(), deadline))
        ids = [segment.segment_id for node in status.nodes for segment in node.segments]
        described = cast(Segments, stub.call(calls.DescribeSegments(ids), deadline)).segments
    except KVStoreError as error:
        return [problem("nodes", error.message, error.advice)]
    if not status.nodes:
        return [problem("nodes", "none has joined", "kvstore-node --master ... --memory 4GiB")]
    asked = {s.segment_id: pool.submit(by_tcp, s, timeout_s) for s in described}
    found = []
    for node in status.nodes:
        found.append(node_well(node))
        for segment in described:
            if segment.node == node.name:
                found += [asked[segment.segment_id].result(), *by_shm(segment)]
    return found


def node_well(node: NodeStatus) -> Finding:
    subject = f"node {node.name}"
    if node.state in ("alive", "draining"):
        return ok(subject, f"{node.state}, last heard {node.silent_ms} ms ago")
    what = f"{node.state}, last heard {node.silent_ms} ms ago"
    return warning(subject, what, "Its log says more; is its host overloaded or cut off?")


def by_tcp(segment: SegmentInfo, timeout_s: float) -> Finding:
    deadline = time.monotonic() + timeout_s
    subject = f"node {segment.node}"
    reached = f"data port {segment.address}"
    try:
        _read(lambda move: transport.read(segment, [move], deadline), transport := TcpTransport())
    except KVStoreError as error:
        advice = "Start it with --host or --advertise of an address that is reached from here."
        return problem(subject, f"{reached} does not answer: {error.message}", advice)
    return ok(subject, f"{reached} answers")


def by_shm(segment: SegmentInfo) -> list[Finding]:
    """Only where the node is on this host, as far as the kernel tells."""
    subject = f"node {segment.node}"
    here, there = host_id(), segment.host
    if here != there:
        if here.rpartition("-")[0] != there.rpartition("-")[0]:
            return []
        advice = "docker run --ipc=host, or --volume /dev/shm:/dev/shm, for both"
        what = "on this kernel, but with another /dev/shm: it is reached by tcp"
        return [warning(subject, what, advice)]
    try:
        _read(
            lambda move: transport.read(segment, [move], time.monotonic() + 1),
            transport := ShmTransport(),
        )
    except KVStoreError as error:
        advice = "Run both as one user: the memory is the owner's alone. Until then tcp is used."
        return [warning(subject, f"on this host, but not mapped: {error.message}", advice)]
    return [ok(subject, "its memory is mapped here")]


def _read(read: Callable[[Move], None], transport: ShmTransport | TcpTransport) -> None:
    try:
        read(Move(SUPERBLOCK_BYTES, memoryview(bytearray(PROBE_BYTES))))
    finally:
        transport.close()
