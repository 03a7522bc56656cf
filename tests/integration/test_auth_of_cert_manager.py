"""Identities as cert-manager would write them for ``deploy/kubernetes-auth``, mounted as Kubernetes
mounts a secret. The certificates are made here, by the specifications of that file."""

from __future__ import annotations

import socket
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from kvstore.errors import PermissionDeniedError
from kvstore.security.certificates import inspect
from kvstore.security.credentials import MASTER_NAME, NODE_NAME, Credentials
from tests.support.cluster import Cluster
from tests.support.processes import free_port

FILE: Final = Path(__file__).parents[2] / "deploy/kubernetes-auth/certificates.yaml"
USAGES: Final = {
    "server auth": ExtendedKeyUsageOID.SERVER_AUTH,
    "client auth": ExtendedKeyUsageOID.CLIENT_AUTH,
}


class Issuer:
    """Signs as cert-manager's issuer of the kind ``ca`` does."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kvstore")])
        made = _builder(self._name, self._name, self._key.public_key()).add_extension(
            x509.BasicConstraints(ca=True, path_length=None), critical=True
        )
        self._certificate = made.sign(self._key, hashes.SHA256())

    def mount(self, at: Path, spec: dict[str, Any]) -> str:
        """The secret of a certificate as files: links into a folder that Kubernetes replaces."""
        key = ec.generate_private_key(ec.SECP256R1())
        names: list[x509.GeneralName] = [
            x509.UniformResourceIdentifier(uri) for uri in spec["uris"]
        ]
        names += [x509.DNSName(name) for name in spec.get("dnsNames", [])]
        usages = [USAGES[each] for each in spec["usages"] if each in USAGES]
        made = (
            _builder(x509.Name([]), self._name, key.public_key())
            .add_extension(x509.SubjectAlternativeName(names), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        pem = serialization.Encoding.PEM
        content = {
            "tls.key": key.private_bytes(
                pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
            ),
            "tls.crt": made.public_bytes(pem),
            "ca.crt": self._certificate.public_bytes(pem),
        }
        there = at / "..2026"
        there.mkdir(parents=True)
        (at / "..data").symlink_to("..2026")
        for name, data in content.items():
            (there / name).write_bytes(data)
            (there / name).chmod(0o440)
            (at / name).symlink_to(f"..data/{name}")
        return str(at)


def _builder(name: x509.Name, issuer: x509.Name, key: Any) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=1))
        .not_valid_after(now + timedelta(days=90))
    )


def scraped(port: int, name: str, auth: str) -> bytes:
    """The beginning of the answer to a Prometheus that ``podmonitors.yaml`` configures."""
    tls = Credentials(auth).client()
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as sock,
        tls.wrap_socket(sock, server_hostname=name) as connection,
    ):
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 10.0.0.7:%d\r\n\r\n" % port)
        return connection.recv(1_024)


@pytest.mark.slow
def test_the_example_for_cert_manager_works(tmp_path: Path) -> None:
    documents = yaml.safe_load_all(FILE.read_text())
    specs = [each["spec"] for each in documents if each["kind"] == "Certificate"]
    issuer = Issuer()
    at = {
        spec["secretName"]: issuer.mount(tmp_path / spec["secretName"], spec)
        for spec in specs
        if "uris" in spec
    }
    for path in at.values():
        assert not inspect(path)["problems"]
    master, node, observer, engine = (
        at[f"kvstore-{role}"] for role in ("master", "node", "observer", "engine")
    )
    with Cluster(tmp_path, settings={"auth": master, "http_port": free_port()}) as cluster:
        server = cluster.launch("kvstore.cli.master", cluster.settings)
        ready = server.line(r"listening on \S*?:(\d+) \(gRPC\)")
        cluster.settings["port"] = int(ready[1])
        of_node = free_port()
        cluster.node(auth=node, http_port=of_node)
        client = cluster.client(auth=engine, namespace="vllm/0123/g0/p0t0")
        client.put("k", b"v" * 1_000)
        assert client.get("k") == b"v" * 1_000
        with pytest.raises(PermissionDeniedError):
            client.put("k", b"v", namespace="default")
        for port, name in ((cluster.settings["http_port"], MASTER_NAME), (of_node, NODE_NAME)):
            assert scraped(port, name, observer).startswith(b"HTTP/1.1 200 ")
