"""Checks of the cluster as seen from this host: ports, masters, lane, and each node's memory."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast

import grpc

from kvstore import calls
from kvstore._version import __version__
from kvstore.calls import ClusterStatus, DescribeSegmentsReply, JoinReply, SegmentInfo
from kvstore.client.rpc.lane_client import connect
from kvstore.client.rpc.retries import LaneUnreachableError, TokenRefusedError
from kvstore.client.rpc.stub import MasterStub
from kvstore.config import DEFAULT_PORT, ClientConfig, MasterConfig
from kvstore.console.diagnostics.findings import Finding, State, of_row, ok, under
from kvstore.console.diagnostics.problems import DetectedProblem, of_a_status
from kvstore.errors import ConfigError, KVStoreError, NotLeaderError
from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.memory.shm_entries import directories
from kvstore.runtime import resolver
from kvstore.runtime.addresses import (
    ETCD_SCHEME,
    EtcdPlace,
    join_address,
    parse_etcd,
    split_address,
)
from kvstore.runtime.clock import uptime
from kvstore.runtime.etcd.leader_lookup import look_at
from kvstore.runtime.etcd.wire import advice_on
from kvstore.runtime.host import host_id
from kvstore.runtime.listeners import listen, local_connect_address
from kvstore.security.credentials import Credentials, open_channel
from kvstore.security.data_port_tls import ClientTls
from kvstore.security.identity import parse
from kvstore.security.validity import time_text
from kvstore.transport.common import RangeCopy, not_encrypted
from kvstore.transport.device import DeviceTransport
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp_client import ClientConnection
from kvstore.wire.messages import CALLS, encode_request
from kvstore.wire.port_probe import start_command
from kvstore.wire.status import decode_error, detail_of

PROBE_BYTES = 4_096
PROBE_RING_BYTES = 64 << 10

AT_ONCE_MAX = 16
"""Masters or nodes that are checked concurrently."""

CLOCK_S = 300.0
"""Clock difference of two hosts without a warning. Epochs begin as Unix time."""


def reached(client: ClientConfig, master: MasterConfig) -> Iterator[Finding]:
    """Check the cluster if the client settings name one; otherwise the ports for a master here, and
    the cluster if a master runs here."""
    checks = ClusterChecks(client)
    found = []
    if "master" not in client.model_fields_set:
        found = list(under("ports", checks.ports(master)))
        yield from found
    if not found or any("a master answers" in result.found for result in found):
        yield from checks.cluster(client.master)


def identity(auth: str) -> list[Finding]:
    """Check the certificate file that ``KVSTORE_AUTH`` names."""
    try:
        credentials = Credentials(auth)
    except ConfigError as error:
        return [of_row("error", error=error)]
    valid = credentials.validity()
    if problem := credentials.validity_error():
        return [of_row("identity_invalid", problem=problem)]
    if valid.ends_soon(time.time()):
        return [of_row("identity_ends", auth=auth, until=time_text(valid.until))]
    return [ok(f"{auth} is valid until {time_text(valid.until)}")]


class _MasterAnswer(NamedTuple):
    """The reply of one master, without a redirect to the leader."""

    found: list[Finding]
    serves: bool = False
    leader: str = ""
    """The leader's address, as reported by a standby."""


class ClusterChecks:
    """The checks for one client. Slow ones run in parallel, each with the timeout of a call."""

    def __init__(self, client: ClientConfig) -> None:
        self._timeout_s = client.timeout_ms / 1000
        self._auth = client.auth
        self._credentials = Credentials(client.auth) if client.auth else None
        demands = client.data_encryption == "tls"
        self._tls = ClientTls(self._credentials, demands=demands) if self._credentials else None

    def ports(self, config: MasterConfig) -> Iterator[Finding]:
        """Check the ports that a master on this host would listen on. A port in use by a running
        master is fine."""
        for name, port in (("gRPC", config.port), ("lane", config.lane_port_wanted)):
            why = port_taken(config.host, port)
            if why is None:
                yield ok(f"{port} ({name}) is free")
            elif why != errno.EADDRINUSE:
                code = errno.errorcode[why]
                yield of_row("no_listening", host=config.host, port=port, why=code)
            elif self._is_master(join_address(local_connect_address(config.host), config.port)):
                yield ok(f"{port} ({name}) is taken, and a master answers here")
            else:
                yield of_row("port_taken", port=port, name=name)

    def _is_master(self, place: str) -> bool:
        with contextlib.closing(self._stub(place)) as stub:
            try:
                stub.join(uptime() + min(1.0, self._timeout_s / 3))
            except KVStoreError:
                return False
            return True

    def _stub(self, place: str) -> MasterStub:
        return MasterStub(place, host=host_id(), name="doctor", lane=False, auth=self._auth)

    def cluster(self, masters: str) -> list[Finding]:
        """Check the masters of a list, and through the leader the nodes; for an etcd, its members
        and the leader that they name."""
        if masters.startswith(ETCD_SCHEME):
            return self._by_etcd(parse_etcd(masters))
        places = [place.strip() for place in masters.split(",")]
        with ThreadPoolExecutor(AT_ONCE_MAX) as pool:
            seen = list(pool.map(self.master, places))
            found = [finding for result in seen for finding in result.found]
            leader = next((place for place, result in zip(places, seen) if result.serves), None)
            if leader is None:
                # The list does not name the leader, or the leader has changed meanwhile.
                leader = next((result.leader for result in seen if result.leader), None)
                if leader is None:
                    return found
                found += self.master(leader).found
            with contextlib.closing(self._stub(leader)) as stub:
                return [*found, *self._nodes(stub, pool)]

    def _by_etcd(self, place: EtcdPlace) -> list[Finding]:
        found: list[Finding] = []
        leaders: set[str] = set()
        silent = 0
        with ThreadPoolExecutor(AT_ONCE_MAX) as pool:
            by = uptime() + self._timeout_s
            asked = [
                (endpoint, pool.submit(look_at, place, endpoint, by))
                for endpoint in place.endpoints
            ]
            for member, future in asked:
                try:
                    seen = future.result()
                except KVStoreError as error:
                    silent += 1
                    found += under(f"etcd {member}", [of_row("error", error=error)])
                    continue
                leaders.add(seen.master)
                does = "leads the etcd" if seen.leads else "follows"
                what, says = f"answers, version {seen.version}, {does}", "; ".join(seen.errors)
                told = ok(what)
                if says:
                    told = of_row("etcd_errors", what=what, says=says, advice=advice_on(says))
                found += under(f"etcd {member}", [told])
        if silent == len(place.endpoints):
            return found
        if silent:
            found.append(of_row("etcd_silent", silent=silent, members=len(place.endpoints)))
        leaders.discard("")
        if not leaders:
            members = ",".join(place.endpoints)
            return [*found, of_row("no_leader", prefix=place.prefix, members=members)]
        found += [ok(f"{leader} leads the masters", subject="leader") for leader in sorted(leaders)]
        return found + self.cluster(",".join(sorted(leaders)))

    def master(self, place: str) -> _MasterAnswer:
        answer = self._reply(place, uptime() + self._timeout_s)
        return answer._replace(found=list(under(f"master {place}", answer.found)))

    def _reply(self, place: str, deadline: float) -> _MasterAnswer:
        stub = self._stub(place)
        try:
            self._call(place, deadline)
            joined = stub.join(deadline)
        except NotLeaderError as error:
            leader = str(error.fields.get("leader", ""))
            told = ok(f"answers, and stands by; {leader} leads")
            return _MasterAnswer([told if leader else of_row("standby_alone")], leader=leader)
        except KVStoreError as error:
            if error.advice and "kvstore doctor" not in error.advice:
                return _MasterAnswer([of_row("error", error=error)])
            unreached = of_row("master_unreached", error=error, command=start_command(place))
            return _MasterAnswer([unreached])
        finally:
            stub.close()
        found = [ok(f"answers, version {joined.version}, epoch {joined.epoch}")]
        if joined.version != __version__:
            found = [of_row("other_release", there=joined.version, here=__version__)]
        ahead_s = joined.epoch / 1000 - time.time()
        if ahead_s > CLOCK_S:
            found.append(of_row("clock_set_back", minutes=ahead_s / 60))
        if joined.identity:
            found.append(ok(f"knows this process as {_described(joined.identity)}"))
        return _MasterAnswer([*found, self._lane(place, joined, deadline)], serves=True)

    def _call(self, place: str, deadline: float) -> None:
        """Call exactly this master; the client would follow a redirect to the leader.

        Raises:
            NotLeaderError: the master is a standby. Otherwise it serves, or ``join`` reports the
                error.
        """
        address = join_address(*split_address(place, default_port=DEFAULT_PORT))
        call = CALLS[calls.Status]
        try:
            target, named = resolver.grpc_target(address, deadline)
        except resolver.NameResolutionError:
            return  # ``join`` reports it
        options: list[tuple[str, str | int]] = [("grpc.enable_http_proxy", 0), *named]
        with open_channel(target, self._credentials, options) as channel:
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
            try:
                ask(encode_request(calls.Status()), timeout=max(0.1, deadline - uptime()) / 2)
            except grpc.RpcError as error:
                detail = detail_of(error)
                failure = decode_error(detail) if detail else None
                if isinstance(failure, NotLeaderError):
                    raise failure from None

    def _lane(self, place: str, joined: JoinReply, deadline: float) -> Finding:
        """Check the lane by its TCP port, which clients on other hosts use."""
        if not joined.lane_port:
            return of_row("no_lane")
        host, _ = split_address(place, default_port=DEFAULT_PORT)
        address = join_address(host, joined.lane_port)
        by_tcp, by = joined._replace(lane_unix=""), max(deadline, uptime() + 0.1)
        try:
            with contextlib.closing(connect(by_tcp, host, by, 0.0, 0, self._credentials)) as lane:
                lane.handshake(by_tcp, by)
        except (LaneUnreachableError, TokenRefusedError) as error:
            return of_row("lane_silent", address=address, error=error, port=joined.lane_port)
        return ok(f"{address} answers", subject="lane")

    def _nodes(self, stub: MasterStub, pool: ThreadPoolExecutor) -> list[Finding]:
        """Check the store as its master reports it, each node's data port, and whether the memory
        of nodes on this host can be mapped."""
        deadline = uptime() + self._timeout_s
        try:
            status = cast(ClusterStatus, stub.call(calls.Status(), deadline))
            while status.next_cursor:
                page = stub.call(calls.Status(status.next_cursor), deadline)
                status = status.with_page(cast(ClusterStatus, page))
            ids = [segment.segment_id for node in status.nodes for segment in node.segments]
            described = cast(
                DescribeSegmentsReply, stub.call(calls.DescribeSegments(ids), deadline)
            ).segments
        except KVStoreError as error:
            return [of_row("error", error=error)._replace(subject="nodes")]
        asked = {s.segment_id: pool.submit(self._by_tcp, s) for s in described}
        found = [_of_store(problem) for problem in of_a_status(status)]
        for node in status.nodes:
            of_node = [ok(f"{node.state}, last heard {node.silent_ms} ms ago")]
            for segment in described:
                if segment.node == node.name:
                    of_node += [asked[segment.segment_id].result(), *by_shm(segment)]
            found += under(f"node {node.name}", of_node)
        return found

    def _by_tcp(self, segment: SegmentInfo) -> Finding:
        """Check the connection only: with authentication, a read needs an object, and without one
        the node rejects, logs and counts it."""
        if self._tls is not None and self._tls.demands and not segment.encrypts:
            return of_row("error", error=not_encrypted(segment))
        connection = ClientConnection(segment, tls=self._tls)
        try:
            connection.handshake(uptime() + self._timeout_s)
        except KVStoreError as error:
            return of_row("data_port", address=segment.address, why=error.message)
        finally:
            connection.close()
        return ok(f"data port {segment.address} answers")


def port_taken(host: str, port: int) -> int | None:
    """Return the errno with which listening on ``host:port`` fails; None: it succeeds."""
    try:
        with listen(host, port):
            return None
    except OSError as error:
        return error.errno or errno.EIO


def _described(uri: str) -> str:
    who = parse(uri)
    rights = [
        f"{verb} {', '.join(patterns)}"
        for verb, patterns in (("reads", who.reads), ("writes", who.writes))
        if patterns
    ]
    return "; ".join([who.display_name, *rights])


def _of_store(problem: DetectedProblem) -> Finding:
    if problem.level == "note":
        return ok(problem.text, subject="store")
    state: State = "problem" if problem.level == "bad" else "warning"
    return Finding("store", state, problem.text, problem.advice)


def by_shm(segment: SegmentInfo) -> Iterator[Finding]:
    """Check the segment's memory if its node is on this host, as reported by the kernel."""
    here, there = host_id(), segment.host
    if here != there:
        if here.rpartition("-")[0] == there.rpartition("-")[0]:
            yield of_row("other_shm")
    elif segment.device is not None:
        why_not = _unreadable(DeviceTransport(PROBE_RING_BYTES), segment)
        told = ok("its memory of a device can be opened")
        yield told if why_not is None else of_row("device_not_opened", why=why_not)
    else:
        yield _mapped(segment)


def _mapped(segment: SegmentInfo) -> Finding:
    transport = ShmTransport()
    is_whole = transport.can_write(segment)
    why_not = _unreadable(transport, segment)
    if why_not is None:
        return ok("its memory can be mapped" + ("" if is_whole else ", to read alone"))
    for directory in directories() if segment.shm_name else ():
        with contextlib.suppress(OSError):
            size = os.stat(f"{directory}/{segment.shm_name}").st_size
            if size < segment.size:
                return of_row("truncated", size=size, whole=segment.size)
    more = ""
    if segment.descriptor_socket is not None:
        more = " What this identity may read, and the node's --shm-clients, decide as well."
    why_not = transport.not_mapped.get(segment.node, why_not)
    return of_row("not_mapped", why=why_not, more=more)


def _unreadable(transport: ShmTransport | DeviceTransport, segment: SegmentInfo) -> str | None:
    """Return the reason why this process cannot read the segment; None: it can."""
    move = RangeCopy(SUPERBLOCK_BYTES, memoryview(bytearray(PROBE_BYTES)))
    try:
        transport.read(segment, [move], uptime() + 1.0)
        return None
    except KVStoreError as error:
        return error.message
    finally:
        transport.close()
