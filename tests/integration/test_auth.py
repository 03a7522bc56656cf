"""Identities on every door, with real processes: who gets in, as what, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import grpc
import pytest

from kvstore import Client, calls
from kvstore.calls import Clear, Join
from kvstore.client.rpc import lane_client
from kvstore.errors import KVStoreError, MasterUnreachableError, PermissionDeniedError
from kvstore.limits import Key, Namespace
from kvstore.security.certificates import CertificateRequest
from kvstore.security.credentials import MASTER_NAME, Credentials, channel_options
from kvstore.wire.messages import CALLS, encode_request
from tests.support.certificates import Identities, utc_now
from tests.support.cluster import Cluster
from tests.support.http import request
from tests.support.processes import KVSTORE, children_of, free_port, run_python
from tests.support.wait import until
from tests.support.workload import content

OURS, THEIRS = "ours", "theirs"
WITHIN_MS = 3_000


@pytest.fixture
def cluster(tmp_path: Path, identities: Identities) -> Iterator[Cluster]:
    settings = {"http_port": free_port(), "events": "on"}
    with Cluster(tmp_path, settings=settings, identities=identities) as cluster:
        yield cluster


def engine(identities: Identities, name: str = "engine", space: str = OURS) -> str:
    return identities.file(name, "engine", reads=[space], writes=[space])


@pytest.fixture(params=["unix", "tcp", "grpc"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """How calls of this process go to the master: settings of a client."""
    if request.param == "tcp":
        monkeypatch.setattr(lane_client, "_connect_unix", lambda *_: None)
    return {"lane": request.param != "grpc"}


# --- who may do what -----------------------------------------------------------------------------


def test_an_engine_has_its_namespaces_and_no_others(
    cluster: Cluster, identities: Identities, carrier: dict[str, bool]
) -> None:
    cluster.start()
    admin = cluster.client()
    admin.put("k", content("theirs"), namespace=THEIRS)
    client = cluster.client(auth=engine(identities), namespace=OURS, **carrier)
    client.put_chain([b"b0", b"b1"], [content("b0"), content("b1")])
    assert client.match_prefix([b"b0", b"b1", b"b2"]) == 2
    assert client.get(b"b1") == content("b1")
    assert client.pin([b"b0"], 1.0)
    for refused in (
        lambda: client.get("k", namespace=THEIRS),
        lambda: client.exists("k", namespace=THEIRS),
        lambda: client.put("k", b"v", namespace=THEIRS),
        lambda: client.remove("k", namespace=THEIRS),
        lambda: client.match_prefix([b"k"], namespace=THEIRS),
        lambda: client.clear(namespace=THEIRS),
        client.clear,
        lambda: list(client.list_objects(namespace=THEIRS)),
        lambda: client.drain(cluster.nodes[0].name),
    ):
        with pytest.raises(PermissionDeniedError, match="engine"):
            refused()
    assert [each.name for each in client.status().namespaces] == [OURS]
    assert admin.get("k", namespace=THEIRS) == content("theirs")
    assert client.remove(b"b1")
    assert any(client._stub._connections) == carrier["lane"]


# --- who does not get in -------------------------------------------------------------------------


def why_not_at(address: str, auth: str) -> None:
    with Client(address, auth=auth, timeout_ms=WITHIN_MS) as client:
        client.exists("k")


def why_not(cluster: Cluster, auth: str) -> str:
    with pytest.raises(KVStoreError) as caught:
        why_not_at(cluster.address, auth)
    return str(caught.value)


def test_strangers_are_told_what_is_missing(
    cluster: Cluster, identities: Identities, tmp_path: Path
) -> None:
    cluster.master()
    assert "KVSTORE_AUTH=FILE" in why_not(cluster, "")
    (tmp_path / "other").mkdir()
    other = Identities(tmp_path / "other")
    assert "its certificate is not of our authority" in why_not(cluster, other.file("admin"))
    for name, days in (("expired", -30), ("early", 30)):
        identities.clock = partial(_days_from_now, days)
        said = why_not(cluster, identities.file(name, "admin", days=1))
        assert "is not valid: it is valid from" in said
        assert "Compare both clocks" in said
    identities.clock = utc_now


def test_a_node_cannot_play_a_master(cluster: Cluster, identities: Identities) -> None:
    """Its certificate is of the right authority. Our own program refuses to start with it; another
    one would find no client."""
    cluster.master()
    refused = cluster.launch(
        "kvstore.cli.master", {"host": "127.0.0.1", "port": 0, "auth": identities.file("node")}
    )
    assert refused.wait() == 2
    assert "is not one that clients accept from master.kvstore" in refused.errors

    async def serve() -> None:
        server = grpc.aio.server()
        serving = Credentials(identities.file("node")).grpc_server()
        port = server.add_secure_port("127.0.0.1:0", serving)
        await server.start()
        with pytest.raises(MasterUnreachableError, match="not that of a master"):
            await asyncio.to_thread(why_not_at, f"127.0.0.1:{port}", identities.file("admin"))
        await server.stop(0)

    asyncio.run(serve())


def _days_from_now(days: int) -> datetime:
    return datetime.now(UTC) + timedelta(days=days)


def test_without_tls_nothing_is_served(cluster: Cluster) -> None:
    cluster.start()
    with grpc.insecure_channel(cluster.address) as channel:
        for call in (CALLS[Join], CALLS[Clear]):
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
            with pytest.raises(grpc.RpcError) as caught:
                ask(b"", timeout=2)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with socket.create_connection(("127.0.0.1", cluster.lane_port), timeout=5) as sock:
        sock.sendall(b"\x10\0\0\0" + b"\0" * 16)
        with contextlib.suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    assert request(cluster.settings["http_port"], "GET", "/metrics").status == 400


def test_what_is_made_for_a_join_needs_its_token(cluster: Cluster, identities: Identities) -> None:
    """Without it a member would get what a client without identity gets: the keys of segments."""
    cluster.start()
    credentials = Credentials(engine(identities)).channel()
    with grpc.secure_channel(cluster.address, credentials, channel_options()) as channel:
        for request in (
            calls.DescribeSegments([1]),
            calls.PutStart(Namespace(OURS), [Key(b"k")], [10], None, True, 1, False, 0, ""),
            calls.Lookup(Namespace(OURS), [Key(b"k")]),
        ):
            call = CALLS[type(request)]
            ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
            with pytest.raises(grpc.RpcError) as caught:
                ask(encode_request(request), timeout=5)
            assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED, call.name


def test_the_lanes_socket_of_another_user_is_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any user of a host may take the name of the socket that a master has elsewhere."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert lane_client._is_trusted(ours)
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        assert lane_client._is_trusted(ours) == (os.getuid() == 0), "root's is"


# --- changes while all runs ----------------------------------------------------------------------


@pytest.mark.slow
def test_who_is_revoked_is_out_within_seconds(cluster: Cluster, identities: Identities) -> None:
    cluster.start()
    client = cluster.client(auth=engine(identities), namespace=OURS)
    client.put("k", content("k"))
    tls = Credentials(engine(identities)).client()
    path = f"/api/v1/blocks?{urlencode({'namespace': OURS, 'key': b'k'.hex()})}"
    port = cluster.settings["http_port"]
    assert request(port, "GET", path, tls=tls).status == 200
    identities.revoke("engine")
    started = time.monotonic()

    def is_out() -> bool:
        try:
            client.put("again", b"v")
        except PermissionDeniedError as error:
            return "was revoked" in str(error)
        return False

    until(is_out)
    until(lambda: request(port, "GET", path, tls=tls).status == 401)
    assert time.monotonic() - started < 15
    assert cluster.client(namespace=OURS).get("k") == content("k"), "others go on"
    right = identities.revoked_file.read_text()
    identities.revoked_file.write_text("")  # as a copy does, and a full disk
    admin = Credentials(identities.file("admin")).client()
    refused = 'kvstore_master_file_refused{setting="auth_revoked"} 1.0\n'
    until(lambda: refused in request(port, "GET", "/metrics", tls=admin).text)
    assert is_out()
    identities.revoked_file.write_text(right)
    node = cluster.nodes[0]
    identities.revoke("node")
    until(lambda: cluster.state_of(node) in ("suspect", "dead", "gone"))


@pytest.mark.slow
def test_an_identity_ends_with_its_certificate(
    cluster: Cluster, identities: Identities, carrier: dict[str, bool]
) -> None:
    """On connections that were open before, too. A file that is renewed in time gives no error, and
    new rights."""
    started = utc_now()
    identities.clock = lambda: started - timedelta(days=1, seconds=-10)
    files = {
        name: identities.file(name, role, reads=spaces, writes=spaces, days=1)
        for name, role, spaces in (
            ("node", "node", ()), ("ended", "engine", [OURS]), ("renewed", "engine", [OURS]),
        )
    }  # fmt: skip
    identities.clock = utc_now
    cluster.start()
    ended, renewed = (
        cluster.client(auth=files[name], namespace=OURS, name=name, **carrier)
        for name in ("ended", "renewed")
    )
    assert ended.put("k", content("k"))
    assert renewed.get("k") == content("k")
    for name, wanted in (
        ("master", CertificateRequest("master", ("master",), hosts=("127.0.0.1",))),
        ("node", CertificateRequest("node", ("node",))),
        ("renewed", CertificateRequest("renewed", ("engine",), (OURS,), (OURS, "more"))),
    ):
        identities.replace(Path(identities.file(name)), wanted)

    def is_out() -> bool:
        assert renewed.get("k") == content("k")
        try:
            ended.exists("k")
        except PermissionDeniedError as error:
            return "certificate of engine ended expired" in str(error)
        return False

    until(is_out, within_s=20)
    assert renewed.put("l", content("l"), namespace="more")
    assert cluster.state_of(cluster.nodes[0]) == "alive"
    errors = cluster.nodes[0].errors
    assert "resumed=True" in errors, "its stream had the old certificate"
    assert "expired on" not in errors


# --- HTTP and events -----------------------------------------------------------------------------


@pytest.mark.slow
def test_http_acts_with_the_rights_of_the_request(cluster: Cluster, identities: Identities) -> None:
    cluster.start()
    port = cluster.settings["http_port"]

    def ask(method: str, path: str, who: str, body: object = None, **query: str) -> int:
        tls = Credentials(who).client()
        place = f"{path}?{urlencode(query)}" if query else path
        return request(port, method, place, body, tls=tls).status

    admin, mine = identities.file("admin"), engine(identities)
    observer = identities.file("observer")
    k = b"k".hex()
    blocks, remove = "/api/v1/blocks", "/api/v1/remove"
    cluster.client(auth=admin).put("k", b"v", namespace=THEIRS)
    assert ask("GET", blocks, admin, namespace=THEIRS, key=k) == 200
    assert ask("GET", blocks, mine, namespace=THEIRS, key=k) == 403
    assert ask("POST", remove, mine, {"keys": [k], "namespace": THEIRS}) == 403
    assert ask("POST", remove, mine, {"keys": [k], "namespace": OURS}) == 200
    assert ask("GET", blocks, mine, namespace=OURS, key=k) == 200
    assert ask("GET", blocks, observer, namespace=OURS, key=k) == 403
    chains = "/api/v1/chains"
    assert ask("GET", chains, admin) == 200
    assert ask("GET", chains, mine) == 403, "an answer that is kept for the admin"
    assert ask("GET", chains, mine, namespace=OURS) == 200
    for path in (chains, "/api/v1/events"):
        assert ask("GET", path, mine, namespace=THEIRS) == 403, path
    reads = ("status", "history", "fleet", "cluster-events")
    for path in (*(f"/api/v1/{name}" for name in reads), "/metrics"):
        assert ask("GET", path, observer) == 200, path
        assert ask("GET", path, mine) == 403, path
    without = ssl.create_default_context()
    without.check_hostname = False
    without.verify_mode = ssl.CERT_NONE
    assert request(port, "GET", "/healthz", tls=without).status == 200
    for path in ("/metrics", "/api/v1/status", "/api/v1/openapi.json"):
        answer = request(port, "GET", path, tls=without)
        assert answer.status == 401, path
        assert "openssl pkcs12" in answer.text
        assert "The token of" not in answer.text, "it has none"


# --- secrets -------------------------------------------------------------------------------------


def test_no_key_is_seen_in_processes_and_logs(cluster: Cluster, identities: Identities) -> None:
    cluster.start()
    cluster.client(auth=engine(identities), namespace=OURS).put("k", b"v")
    servers = [cluster.master_server, *cluster.nodes]
    seen = "".join(server.errors for server in servers)
    for server in servers:
        for pid in (server.process.pid, *children_of(server.process.pid)):
            for file in ("environ", "cmdline"):
                seen += Path(f"/proc/{pid}/{file}").read_bytes().decode(errors="replace")
    for name in ("master", "node"):
        text = Path(identities.file(name)).read_text()
        body = text.split("PRIVATE KEY-----\n")[1].split("\n")[0]
        assert len(body) > 40
        assert body not in seen
    assert "PRIVATE KEY" not in seen


def test_the_doctor_says_who_one_is(cluster: Cluster, identities: Identities) -> None:
    cluster.start()
    said = run_python(
        "-m", "kvstore.cli.main", "doctor", "--master", cluster.address,
        variables={"KVSTORE_AUTH": engine(identities)},
    ).stdout  # fmt: skip
    assert "knows this process as engine engine; reads ours; writes ours" in " ".join(said.split())
    assert MASTER_NAME not in said
    assert "does not answer" not in said, "a data port that asks for capabilities does answer"


def test_the_doctor_says_why_an_identity_is_refused(
    cluster: Cluster, identities: Identities, tmp_path: Path
) -> None:
    cluster.master()
    (tmp_path / "old").mkdir()
    strange = Identities(tmp_path / "old").file("admin")
    revoked = identities.file("gone", "admin")
    identities.revoke("gone")
    identities.clock = partial(_days_from_now, 30)
    early = identities.file("early", "admin")

    def rows(auth: str) -> list[dict[str, str]]:
        found = run_python(
            *KVSTORE, "doctor", "--json", "--master", cluster.address, "--timeout-ms", "2000",
            variables={"KVSTORE_AUTH": auth} if auth else {},
        ).stdout  # fmt: skip
        every = [json.loads(line) for line in found.splitlines()]
        return [row for row in every if row["subject"] == f"master {cluster.address}"]

    until(lambda: len(rows(revoked)) == 1)  # once the list has not changed for a moment

    for auth, why, advice in (
        (revoked, "was revoked", "new identity"),
        (strange, "not of our authority", "kvstore auth"),
        (early, "the clock of this host shows", "Compare both clocks"),
        ("", "a port for TLS", "KVSTORE_AUTH"),
    ):
        [row] = rows(auth)
        assert row["state"] == "problem"
        assert why in row["found"], row
        assert advice in row["advice"], row
        assert "firewall" not in row["advice"], row


def test_a_certificate_that_ends_soon_is_told_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    identities = Identities(tmp_path, lambda: utc_now() - timedelta(days=355))
    settings = {"http_port": free_port()}
    with Cluster(tmp_path, settings=settings, identities=identities) as cluster:
        cluster.master()
        node_port = free_port()
        node = cluster.node(http_port=node_port)
        ends = (utc_now() + timedelta(days=10)).timestamp()
        tls = Credentials(identities.file("admin")).client()
        tls.check_hostname = False
        for process, port in (("master", settings["http_port"]), ("node", node_port)):
            text = request(port, "GET", "/metrics", tls=tls).text
            name = f"kvstore_{process}_auth_expiry_timestamp_seconds"
            found = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
            assert found is not None, text
            assert abs(float(found[1]) - ends) < 3_600
        status = request(settings["http_port"], "GET", "/api/v1/status", tls=tls).json
        assert "certificate expires in 9 d" in "".join(each["text"] for each in status["problems"])
        caplog.clear()
        client = cluster.client()
        assert client.exists("k") is False
        assert client.exists("k") is False
        lines = [
            each.message for each in caplog.records if "certificate_expires_soon" in each.message
        ]
        assert len(lines) == 1
        for server in (cluster.master_server, node):
            assert "certificate_expires_soon" in server.errors
