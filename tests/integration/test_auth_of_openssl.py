"""Identities of a CA that is not ours: by openssl, as docs/security.md shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kvstore.errors import PermissionDeniedError
from kvstore.security.certificates import inspect
from tests.support.cluster import Cluster
from tests.support.programs import need_program

PAGE: Final = Path(__file__).parents[2] / "docs/security.md"
SERVERS: Final = {"master": "master.kvstore", "node": "node.kvstore"}


class Authority:
    """One of openssl: a root, and a CA under it that signs, as step-ca and cfssl have."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        (directory / "ca.ext").write_text(
            "basicConstraints = critical, CA:TRUE\nkeyUsage = critical, keyCertSign, cRLSign\n"
        )
        self._openssl("req", "-x509", "-days", "2", "-subj", "/CN=root", "-keyout", "root.key",
                      "-out", "root.crt", *self._new_key)  # fmt: skip
        self._signed("/CN=between", "between.key", "between.crt", by="root", extensions="ca.ext")

    _new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")

    def folder(self, name: str, uri: str, *, key: str = "PKCS8") -> str:
        """The folder of an identity. ``key``: its form; ``SEC1`` is what old tools write."""
        folder = self._directory / name
        folder.mkdir()
        dns = f", DNS:{SERVERS[name]}" if name in SERVERS else ""
        (self._directory / f"{name}.ext").write_text(
            f"subjectAltName = critical, URI:{uri}{dns}\nbasicConstraints = critical, CA:FALSE\n"
            "keyUsage = critical, digitalSignature\nextendedKeyUsage = serverAuth, clientAuth\n"
        )
        leaf = f"{name}/leaf.crt"
        self._signed("/", f"{name}/tls.key", leaf, by="between", extensions=f"{name}.ext")
        if key == "SEC1":
            self._openssl("ec", "-in", f"{name}/tls.key", "-out", f"{name}/tls.key")
        chain = [self._directory / leaf, self._directory / "between.crt"]
        (folder / "tls.crt").write_bytes(b"".join(each.read_bytes() for each in chain))
        (folder / "ca.crt").write_bytes((self._directory / "root.crt").read_bytes())
        return str(folder)

    def _signed(self, subject: str, key: str, at: str, *, by: str, extensions: str) -> None:
        self._openssl("req", *self._new_key, "-subj", subject, "-keyout", key, "-out", "new.csr")
        signer = ("-CA", f"{by}.crt", "-CAkey", f"{by}.key", "-CAcreateserial")
        self._openssl("x509", "-req", "-in", "new.csr", *signer, "-days", "2",
                      "-extfile", extensions, "-out", at)  # fmt: skip

    def _openssl(self, *arguments: str) -> None:
        done = subprocess.run(
            ["openssl", *arguments], cwd=self._directory, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    need_program("openssl", "openssl")
    return Authority(tmp_path)


@pytest.mark.slow
def test_a_cluster_with_identities_of_openssl(tmp_path: Path, authority: Authority) -> None:
    master = authority.folder("master", "kvstore:master/masters")
    node = authority.folder("node", "kvstore:node/nodes", key="SEC1")
    engine = authority.folder("engine", "kvstore:engine/decode?read=vllm/*&write=vllm/*")
    stranger = authority.folder("stranger", "spiffe://prod/ns/web/sa/shop")
    with Cluster(tmp_path, settings={"auth": master}) as cluster:
        server = cluster.launch("kvstore.cli.master", cluster.settings)
        ready = server.line(r"listening on \S*?:(\d+) \(gRPC\)")
        cluster.settings["port"] = int(ready[1])
        cluster.node(auth=node, data_encryption="tls")
        for transports in (["shm"], ["tcp"]):
            client = cluster.client(auth=engine, namespace="vllm/a", transports=transports)
            client.put("k", b"v" * 1_000)
            assert client.get("k") == b"v" * 1_000
            with pytest.raises(PermissionDeniedError, match="engine decode"):
                client.put("k", b"v", namespace="default")
        with pytest.raises(PermissionDeniedError, match="names 0 identities"):
            cluster.client(auth=stranger, namespace="vllm/a").get("k")


def test_the_commands_of_the_page_make_an_identity(tmp_path: Path) -> None:
    need_program("openssl", "openssl")
    lines = PAGE.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("    openssl req -x509"))
    commands = "\n".join(lines[begin : lines.index("", begin)])
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", "-e", "-c", commands], cwd=tmp_path, env=os.environ | {"PATH": path},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = inspect(str(tmp_path / "master"))
    assert (found["problems"], found["roles"]) == ([], ["master"])
