"""Checks of the cluster as seen from this host: ports, masters, lane, and each node's memory."""

from __future__ import annotations

import contextlib
import errno
import os
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast

import grpc

from kvstore import calls
from kvstore._version import __version__
from kvstore.auth.credentials import MASTER_NAME, Credentials, open_channel
from kvstore.auth.data_port import ClientEnd
from kvstore.auth.identity import parse
from kvstore.calls import ClusterStatus, Joined, SegmentInfo, Segments, TrafficReport
from kvstore.client.calling.stub import MasterStub
from kvstore.clocks import uptime
from kvstore.config import DEFAULT_PORT, MasterConfig
from kvstore.diagnosis.findings import Finding, ok, problem, under, warning
from kvstore.diagnosis.problems import FoundProblem, of_a_status
from kvstore.errors import KVStoreError, NotLeaderError
from kvstore.etcd.finding import look_at
from kvstore.etcd.wire import advice_on
from kvstore.memory.entries import directories
from kvstore.memory.header import SUPERBLOCK_BYTES
from kvstore.network import names
from kvstore.network.addresses import (
    ETCD_SCHEME,
    EtcdPlace,
    join_address,
    parse_etcd,
    split_address,
)
from kvstore.network.host import host_id
from kvstore.network.listening import listen, reached_at
from kvstore.ports import start_command
from kvstore.transport.base import Move
from kvstore.transport.device import DeviceTransport
from kvstore.transport.pieces import not_encrypted
from kvstore.transport.shm import ShmTransport
from kvstore.transport.tcp_client import ClientConnection
from kvstore.wire.frames import ERROR, FrameReader, hello
from kvstore.wire.messages import CALLS, encode_request
from kvstore.wire.status import decode_error, detail_of

PROBE_BYTES = 4_096
PROBE_RING_BYTES = 64 << 10

AT_ONCE_MAX = 16
"""Masters or nodes that are checked at the same time."""

QUESTIONS_MIN = 16
"""Fewer questions in a namespace prove nothing: the first prompts always find nothing."""

HANDSHAKE_S = 1.0
"""How long a master may take to refuse a certificate."""

CLOCK_S = 300.0
"""Clocks of two hosts may differ by this much without a warning. Epochs begin as Unix time."""

Deadline = float
"""A ``uptime()`` value."""


def reached(
    master: MasterConfig,
    masters: str,
    timeout_s: float,
    *,
    is_named: bool,
    auth: str = "",
    demands: bool = False,
) -> Iterator[Finding]:
    """Checks the cluster if ``is_named``; otherwise the ports for a master here, and the cluster if
    a master is here.
    ``auth``: the file that proves who asks; empty: no authentication. ``demands``: as
    ``ClientEnd``."""
    found = [] if is_named else list(under("ports", ports(master, timeout_s, auth)))
    yield from found
    if is_named or any("a master answers" in each.found for each in found):
        yield from cluster(masters, timeout_s, auth, demands=demands)


def ports(config: MasterConfig, timeout_s: float, auth: str = "") -> Iterator[Finding]:
    """Checks the ports that a master on this host would listen on. A port that a running master
    already has is fine."""
    for name, port in (("gRPC", config.port), ("lane", config.lane_port_wanted)):
        why = port_taken(config.host, port)
        if why is None:
            yield ok(f"{port} ({name}) is free")
        elif why == errno.EADDRINUSE and master_at(config.host, config.port, timeout_s, auth):
            yield ok(f"{port} ({name}) is taken, and a master answers here")
        elif why == errno.EADDRINUSE:
            advice = f"ss -ltnp 'sport = :{port}' shows the process; or choose another --port"
            yield warning(f"{port} ({name}) is taken by a process that is not a master", advice)
        else:
            yield warning(
                f"cannot listen on {config.host}:{port}: {errno.errorcode[why]}",
                "ip address: --host must be an address of this host",
            )


def port_taken(host: str, port: int) -> int | None:
    """Why a server cannot listen on ``host:port`` (an errno); None: it can."""
    try:
        with listen(host, port):
            return None
    except OSError as error:
        return error.errno or errno.EIO


def master_at(host: str, port: int, timeout_s: float, auth: str = "") -> bool:
    stub = _stub(join_address(reached_at(host), port), auth)
    try:
        stub.join(uptime() + min(1.0, timeout_s / 3))
        return True
    except KVStoreError:
        return False
    finally:
        stub.close()


def _stub(place: str, auth: str) -> MasterStub:
    return MasterStub(place, host=host_id(), name="doctor", lane=False, auth=auth)


def cluster(
    masters: str, timeout_s: float, auth: str = "", *, demands: bool = False
) -> list[Finding]:
    """Checks the masters of a list, and through the leader the nodes; for an etcd, its members and
    the leader that they name. Slow checks run in parallel, each with the whole ``timeout_s``."""
    if masters.startswith(ETCD_SCHEME):
        return by_etcd(parse_etcd(masters), timeout_s, auth, demands=demands)
    places = [place.strip() for place in masters.split(",")]
    with ThreadPoolExecutor(AT_ONCE_MAX) as pool:
        seen = list(pool.map(lambda place: master(place, timeout_s, auth), places))
        found = [finding for each in seen for finding in each.found]
        leader = next((place for place, each in zip(places, seen) if each.serves), None)
        if leader is None:
            # The list does not name the leader, or the leader has changed meanwhile.
            leader = next((each.leader for each in seen if each.leader), None)
            if leader is None:
                return found
            found += master(leader, timeout_s, auth).found
        stub = _stub(leader, auth)
        try:
            found += nodes(stub, timeout_s, pool, auth, demands=demands)
            return found + hits(stub, leader, timeout_s)
        finally:
            stub.close()


def by_etcd(
    place: EtcdPlace, timeout_s: float, auth: str = "", *, demands: bool = False
) -> list[Finding]:
    """Checks the members of an etcd, and the master that they name as leader."""
    found: list[Finding] = []
    leaders: set[str] = set()
    silent = 0
    with ThreadPoolExecutor(AT_ONCE_MAX) as pool:
        by = uptime() + timeout_s
        asked = [(each, pool.submit(look_at, place, each, by)) for each in place.endpoints]
        for member, future in asked:
            subject = f"etcd {member}"
            try:
                seen = future.result()
            except KVStoreError as error:
                silent += 1
                found.append(problem(error.message, error.advice, subject))
                continue
            leaders.add(seen.master)
            does = "leads the etcd" if seen.leads else "follows"
            what = f"answers, version {seen.version}, {does}"
            if seen.errors:
                says = "; ".join(seen.errors)
                found.append(problem(f"{what}; it says: {says}", advice_on(says), subject))
            else:
                found.append(ok(what, subject=subject))
    if silent == len(place.endpoints):
        return found
    if silent:
        why = f"{silent} of {len(place.endpoints)} members do not answer; the others are asked"
        found.append(warning(why, "The loss of one more member may stop the masters.", "etcd"))
    leaders.discard("")
    if not leaders:
        what = f"no master leads under the prefix {place.prefix!r}"
        advice = f"kvstore-master --etcd {','.join(place.endpoints)} on two hosts or more"
        return [*found, problem(what, advice, "leader")]
    found += [ok(f"{leader} leads the masters", subject="leader") for leader in sorted(leaders)]
    return found + cluster(",".join(sorted(leaders)), timeout_s, auth, demands=demands)


class _MasterAnswer(NamedTuple):
    """What one master itself answers: a standby's leader is not asked."""

    found: list[Finding]
    serves: bool = False
    leader: str = ""
    """The leader's address, as a standby names it."""


def master(place: str, timeout_s: float, auth: str = "") -> _MasterAnswer:
    deadline = uptime() + timeout_s
    subject = f"master {place}"
    stub = _stub(place, auth)
    try:
        _ask_only(place, deadline, auth)
        joined = stub.join(deadline)
    except NotLeaderError as error:
        leader = str(error.fields.get("leader", ""))
        if leader:
            what = f"answers, and stands by; {leader} leads"
            return _MasterAnswer([ok(what, subject=subject)], leader=leader)
        what = "answers, and stands by; it knows no leader"
        advice = "kvstore doctor --master etcd://... says whether the etcd is well"
        return _MasterAnswer([problem(what, advice, subject)])
    except KVStoreError as error:
        advice = error.advice
        if not advice or "kvstore doctor" in advice:
            refused = identity_refused(place, deadline, auth) if auth else None
            if refused is not None:
                return _MasterAnswer([refused._replace(subject=subject)])
            advice = (
                f"A firewall may drop packets to that port, or that host is down: let it pass, and "
                f"run {start_command(place)} there."
            )
        return _MasterAnswer([problem(error.message, advice, subject)])
    finally:
        stub.close()
    found = []
    if joined.version != __version__:
        what = f"answers, version {joined.version}; this host has {__version__}"
        found.append(warning(what, "Install the same release on both hosts.", subject))
    else:
        what = f"answers, version {joined.version}, epoch {joined.epoch}"
        found.append(ok(what, subject=subject))
    ahead_s = joined.epoch / 1000 - time.time()
    if ahead_s > CLOCK_S:
        advice = (
            "A clock has been set back: the master's before it started, or this host's. No data "
            "is lost. Synchronize the clocks: timedatectl set-ntp true"
        )
        what = f"its epoch is {ahead_s / 60:.0f} min ahead of this host's clock"
        found.append(warning(what, advice, subject))
    if joined.identity:
        found.append(ok(f"knows this process as {_described(joined.identity)}", subject=subject))
    host, _ = split_address(place, default_port=DEFAULT_PORT)
    return _MasterAnswer([*found, lane(host, joined, deadline, auth)], serves=True)


def identity_refused(place: str, deadline: Deadline, auth: str) -> Finding | None:
    """Why the handshake of TLS with a master fails, of which gRPC says little; None: it does not,
    or nothing is there to shake hands with."""
    host, port = split_address(place, default_port=DEFAULT_PORT)
    by = max(deadline, uptime() + HANDSHAKE_S)
    context = Credentials(auth).client()
    try:
        with names.connect(host, port, by) as raw:
            raw.settimeout(HANDSHAKE_S)
            with context.wrap_socket(raw, server_hostname=MASTER_NAME) as sock:
                sock.recv(1)  # a server of TLS 1.3 refuses our certificate after the handshake
    except ssl.SSLCertVerificationError as error:
        return problem(
            f"its certificate is not one that {auth} trusts ({error.verify_message}): this file is "
            "of another authority, or the master is",
            "Use a file that the authority of this cluster has issued (kvstore auth issue); "
            f"kvstore auth show {auth} says who it is and whom it trusts.",
        )
    except ssl.SSLError as error:
        return problem(
            f"it refuses the identity of {auth} ({error.reason or error})",
            "Its authority, or its end, is not accepted there: issue it anew (kvstore auth issue); "
            f"kvstore auth show {auth} says who it is and until when.",
        )
    except OSError:
        pass
    return None


def _described(uri: str) -> str:
    who = parse(uri)
    rights = [
        f"{verb} {', '.join(patterns)}"
        for verb, patterns in (("reads", who.reads), ("writes", who.writes))
        if patterns
    ]
    return "; ".join([who.shown, *rights])


def _ask_only(place: str, deadline: float, auth: str) -> None:
    """Asks exactly this master; the client would go on to the leader.

    Raises:
        NotLeaderError: the master stands by. Otherwise the master serves, or ``join`` will say
            what is wrong.
    """
    address = join_address(*split_address(place, default_port=DEFAULT_PORT))
    call = CALLS[calls.Status]
    credentials = Credentials(auth) if auth else None
    with open_channel(address, credentials, [("grpc.enable_http_proxy", 0)]) as channel:
        ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
        try:
            ask(encode_request(calls.Status()), timeout=max(0.1, deadline - uptime()) / 2)
        except grpc.RpcError as error:
            detail = detail_of(error)
            failure = decode_error(detail) if detail else None
            if isinstance(failure, NotLeaderError):
                raise failure from None


def lane(host: str, joined: Joined, deadline: Deadline, auth: str = "") -> Finding:
    """Checks the lane by its TCP port, which clients on other hosts use."""
    subject = "lane"
    if not joined.lane_port:
        what = "the master has no lane"
        return warning(what, "Calls take 300 µs more; see --lane-port.", subject)
    address = join_address(host, joined.lane_port)
    try:
        by = max(deadline, uptime() + 0.1)
        with (
            names.connect(host, joined.lane_port, by) as raw,
            Credentials(auth).client().wrap_socket(raw, server_hostname=MASTER_NAME)
            if auth
            else contextlib.nullcontext(raw) as sock,
        ):
            sock.sendall(hello(joined.lane_token))
            reader = FrameReader()
            while (answer := reader.next()) is None:
                if not (count := sock.recv_into(reader.space())):
                    raise ConnectionError("the master closed the connection")
                reader.received(count)
        if answer[1] == ERROR:
            raise decode_error(answer[3])
    except (OSError, KVStoreError) as error:
        what = f"{address} does not answer: {error}"
        advice = f"Open port {joined.lane_port}: without the lane calls take 300 µs more."
        return warning(what, advice, subject)
    return ok(f"{address} answers", subject=subject)


def nodes(
    stub: MasterStub,
    timeout_s: float,
    pool: ThreadPoolExecutor,
    auth: str = "",
    *,
    demands: bool = False,
) -> list[Finding]:
    """What is wrong with the store as its master sees it. Checks for each node that its data port
    answers, and, for a node on this host, that its memory can be mapped."""
    deadline = uptime() + timeout_s
    try:
        status = cast(ClusterStatus, stub.call(calls.Status(), deadline))
        while status.next_cursor:
            page = stub.call(calls.Status(status.next_cursor), deadline)
            status = status.with_page(cast(ClusterStatus, page))
        ids = [segment.segment_id for node in status.nodes for segment in node.segments]
        described = cast(Segments, stub.call(calls.DescribeSegments(ids), deadline)).segments
    except KVStoreError as error:
        return [problem(error.message, error.advice, "nodes")]
    tls = ClientEnd(Credentials(auth), demands=demands) if auth else None
    asked = {s.segment_id: pool.submit(by_tcp, s, timeout_s, tls) for s in described}
    found = [of_store(each) for each in of_a_status(status)]
    for node in status.nodes:
        of_node = [ok(f"{node.state}, last heard {node.silent_ms} ms ago")]
        for segment in described:
            if segment.node == node.name:
                of_node += [asked[segment.segment_id].result(), *by_shm(segment)]
        found += under(f"node {node.name}", of_node)
    return found


def hits(stub: MasterStub, master: str, timeout_s: float) -> list[Finding]:
    """Checks that clients that ask find something, by one page of what the master remembers."""
    try:
        report = cast(TrafficReport, stub.call(calls.Traffic(), uptime() + timeout_s))
    except KVStoreError:
        return []  # only an identity that may read everywhere gets a reply
    asked = [space for space in report.namespaces if space.questions >= QUESTIONS_MIN]
    vain = [space for space in asked if not any(row.found for row in space.askers)]
    if not vain:
        return [ok("clients that ask find something", subject="hits")] if asked else []
    what = f"in {len(vain)} of {len(asked)} namespaces clients ask and find nothing"
    return [warning(what, f"kvstore why --master {master}", "hits")]


def of_store(each: FoundProblem) -> Finding:
    if each.level == "note":
        return ok(each.text, subject="store")
    made = problem if each.level == "bad" else warning
    return made(each.text, each.advice, "store")


def by_tcp(segment: SegmentInfo, timeout_s: float, tls: ClientEnd | None = None) -> Finding:
    if tls is not None and tls.demands and not segment.encrypts:
        refused = not_encrypted(segment)
        return problem(refused.message, refused.advice)
    why_not = _unanswered(segment, timeout_s, tls)
    if why_not is not None:
        advice = "Start it with --host or --advertise and an address that this host can reach."
        return problem(f"data port {segment.address} does not answer: {why_not}", advice)
    return ok(f"data port {segment.address} answers")


def by_shm(segment: SegmentInfo) -> Iterator[Finding]:
    """Checks the segment's memory if its node is on this host, as far as the kernel tells."""
    here, there = host_id(), segment.host
    if here != there:
        if here.rpartition("-")[0] == there.rpartition("-")[0]:
            yield warning(
                "on this kernel, but in a container with another /dev/shm: clients use tcp",
                "docker run --ipc=host, or --volume /dev/shm:/dev/shm, for both",
            )
    elif segment.device is not None:
        why_not = _unreadable(DeviceTransport(PROBE_RING_BYTES), segment, 1.0)
        if why_not is not None:
            what = f"on this host, but its memory of a device cannot be opened: {why_not}"
            advice = "Let both see the GPU and the same /dev/shm. Until then clients use tcp."
            yield warning(what, advice)
        else:
            yield ok("its memory of a device can be opened")
    else:
        yield _mapped(segment)


def _mapped(segment: SegmentInfo) -> Finding:
    transport = ShmTransport()
    is_whole = transport.may_write(segment)
    why_not = _unreadable(transport, segment, 1.0)
    if why_not is None:
        return ok("its memory can be mapped" + ("" if is_whole else ", to read alone"))
    advice = (
        "Run both as one user, or start the node with --shm-group and a group that both are in. "
        "Until then clients use tcp."
    )
    if segment.handover is not None:
        advice += " What this identity may read, and the node's --shm-clients, decide as well."
    why_not = transport.not_mapped.get(segment.node, why_not)
    what = f"on this host, but its memory cannot be mapped: {why_not}"
    return _truncated(segment) or warning(what, advice)


def _truncated(segment: SegmentInfo) -> Finding | None:
    for directory in directories() if segment.shm_name else ():
        with contextlib.suppress(OSError):
            size = os.stat(f"{directory}/{segment.shm_name}").st_size
            if size < segment.size:
                what = f"its memory file was truncated to {size} of {segment.size} bytes"
                advice = "Programs that map it die of SIGBUS. Start the node with --discard."
                return problem(what, advice)
    return None


def _unanswered(segment: SegmentInfo, timeout_s: float, tls: ClientEnd | None) -> str | None:
    """Why the data port does not take us; None: it does. Reads nothing: where there are identities
    that needs an object, and is refused, logged and counted without one."""
    connection = ClientConnection(segment, tls=tls)
    try:
        connection.greet(uptime() + timeout_s)
        return None
    except KVStoreError as error:
        return error.message
    finally:
        connection.close()


def _unreadable(
    transport: ShmTransport | DeviceTransport, segment: SegmentInfo, timeout_s: float
) -> str | None:
    """Why this process cannot read the segment; None: it can."""
    move = Move(SUPERBLOCK_BYTES, memoryview(bytearray(PROBE_BYTES)))
    try:
        transport.read(segment, [move], uptime() + timeout_s)
        return None
    except KVStoreError as error:
        return error.message
    finally:
        transport.close()
