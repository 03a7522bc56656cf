"""Real handshakes of TLS: who accepts whom, by Python's ssl and by gRPC."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from kvstore.security import certificates
from kvstore.security.certificates import CertificateRequest
from kvstore.security.credentials import MASTER_NAME, NODE_NAME, Credentials, channel_options
from tests.support import identities
from tests.support.identities import ENGINE, MASTER, NODE, NOW, credentials, shake

WITHIN_S = 10.0


@pytest.fixture(scope="module")
def signer() -> certificates.SigningAuthority:
    return identities.authority()


@contextlib.contextmanager
def serving(server: Credentials) -> Iterator[str]:
    """A gRPC server, which answers with the peer's URI and the version of TLS."""

    def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
        seen: bytes = context.auth_context()["peer_uri"][0]  # type: ignore[assignment]
        return seen

    handler = grpc.method_handlers_generic_handler(
        "a", {"B": grpc.unary_unary_rpc_method_handler(answer)}
    )
    with ThreadPoolExecutor(2) as pool:
        at = grpc.server(pool, handlers=[handler])
        port = at.add_secure_port("127.0.0.1:0", server.grpc_server())
        at.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            at.stop(None).wait()


def call(address: str, client: Credentials, name: str = MASTER_NAME) -> str:
    """The URI that the server has seen; raises ssl.SSLError if one refuses the other."""
    return ask(address, client.channel(), name)


def ask(address: str, trusts: grpc.ChannelCredentials, name: str = MASTER_NAME) -> str:
    with grpc.secure_channel(address, trusts, channel_options(name)) as channel:
        function: Any = channel.unary_unary("/a/B")
        try:
            answer: bytes = function(b"", timeout=WITHIN_S)
        except grpc.RpcError as error:
            failed: Any = error
            if failed.code() is grpc.StatusCode.UNAVAILABLE:
                raise ssl.SSLError(failed.details()) from None
            raise
    return answer.decode()


def both(client: Credentials, server: Credentials, name: str = MASTER_NAME) -> None:
    """Connects by ssl and by gRPC; raises ssl.SSLError if both refuse."""
    refused = []
    try:
        shake(client.client(), server.server(), name)
    except ssl.SSLError as error:
        refused.append(error)
    with serving(server) as address:
        try:
            call(address, client, name)
        except ssl.SSLError as error:
            refused.append(error)
    assert len(refused) != 1, f"one refuses, the other does not: {refused}"
    if refused:
        raise refused[0]


def test_peers_of_one_authority_accept_each_other(
    tmp_path: Path, signer: certificates.SigningAuthority
) -> None:
    master, node, engine = (credentials(tmp_path, signer, w) for w in (MASTER, NODE, ENGINE))
    for client in (master, node, engine):
        both(client, master)
    both(engine, node, NODE_NAME)
    ends = shake(engine.client(), master.server())
    assert {end.version() for end in ends} == {"TLSv1.3"}


@pytest.mark.parametrize(
    ("name", "server", "client_days_ago", "server_days_ago"),
    [
        (MASTER_NAME, NODE, 0, 0),
        (MASTER_NAME, ENGINE, 0, 0),
        (NODE_NAME, ENGINE, 0, 0),
        (NODE_NAME, MASTER, 0, 0),
        *((MASTER_NAME, MASTER, days_ago, 0) for days_ago in (366, -1)),
        *((MASTER_NAME, MASTER, 0, days_ago) for days_ago in (366, -1)),
    ],
)
def test_another_role_and_another_time_are_refused(
    tmp_path: Path, signer: certificates.SigningAuthority, name: str, server: CertificateRequest,
    client_days_ago: int, server_days_ago: int,
) -> None:  # fmt: skip
    with pytest.raises(ssl.SSLError):
        both(
            credentials(tmp_path, signer, ENGINE, days_ago=client_days_ago),
            credentials(tmp_path, signer, server, days_ago=server_days_ago),
            name,
        )


def test_another_authority_is_refused_by_both_ends(
    tmp_path: Path, signer: certificates.SigningAuthority
) -> None:
    """Until either file trusts both, as docs/security.md says of a new CA."""
    other, trusted = identities.authority(), certificates.pem(signer.certificate)
    client, server = credentials(tmp_path, signer, ENGINE), credentials(tmp_path, other, MASTER)
    with pytest.raises(ssl.SSLError):
        both(client, server)
    leaf = certificates.issue(signer, ENGINE, NOW).pems
    # An engine signs the certificate of a master; a stranger trusts the server.
    forged = certificates.issue(certificates.signer_of(leaf.key, leaf.chain), MASTER, NOW).pems
    forged = forged._replace(chain=forged.chain + leaf.chain, authorities=trusted)
    stranger = certificates.issue(other, ENGINE, NOW).pems._replace(authorities=trusted)
    with pytest.raises(ssl.SSLError):
        both(client, Credentials(str(identities.folder(tmp_path / "forged", forged))))
    with pytest.raises(ssl.SSLError):
        both(
            Credentials(str(identities.folder(tmp_path / "stranger", stranger))),
            credentials(tmp_path, signer, MASTER),
        )
    for path, ca in ((client.path, other), (server.path, signer)):
        with open(path, "ab") as file:
            file.write(certificates.pem(ca.certificate))
    both(Credentials(client.path), Credentials(server.path))


def test_tls_1_2_is_refused(tmp_path: Path, signer: certificates.SigningAuthority) -> None:
    master, engine = (credentials(tmp_path, signer, each) for each in (MASTER, ENGINE))
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    old.load_verify_locations(cadata=engine.pems().authorities.decode())
    old.load_cert_chain(engine.path)
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        shake(old, master.server())
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.maximum_version = ssl.TLSVersion.TLSv1_2
    server.load_cert_chain(master.path)
    with pytest.raises(ssl.SSLError, match=r"(?i)protocol"):
        shake(engine.client(), server)


def test_a_client_without_a_certificate_is_refused(
    tmp_path: Path, signer: certificates.SigningAuthority
) -> None:
    master = credentials(tmp_path, signer, MASTER)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(cadata=master.pems().authorities.decode())
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        shake(bare, master.server())
    with serving(master) as address, pytest.raises(ssl.SSLError):
        ask(address, grpc.ssl_channel_credentials(master.pems().authorities))


def test_no_session_is_resumed(tmp_path: Path, signer: certificates.SigningAuthority) -> None:
    """Who resumes shows no certificate: it may have expired since."""
    master, engine = (credentials(tmp_path, signer, each) for each in (MASTER, ENGINE))
    client, _ = shake(engine.client(), master.server())
    assert client.session is None or not client.session.has_ticket
