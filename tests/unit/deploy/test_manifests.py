"""The files of deploy/: valid by their schemas, and their commands and settings are kvstore's.

A real image and real containers are in tests/containers. No Kubernetes runs here: schemas and the
rules below are all that is checked of its manifests.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvstore.cli import master, node
from kvstore.config import MasterConfig, NodeConfig, load
from kvstore.config.setting_types import parse_size
from kvstore.security.ca import REVOKED_NAME
from kvstore.security.certificates import inspect
from kvstore.security.credentials import Credentials
from tests.support.certificates import Identities
from tests.support.programs import need_program

pytestmark = pytest.mark.slow  # not for its cost: programs of others read these files

DEPLOY: Final = Path(__file__).parents[3] / "deploy"
KUBERNETES: Final = DEPLOY / "kubernetes"
WITH_AUTH: Final = DEPLOY / "kubernetes-auth"
KUBERNETES_VERSION: Final = "1.31"
UNITS: Final = {"kvstore-master": MasterConfig, "kvstore-node": NodeConfig}
COMMANDS: Final = {"kvstore-master": master.command, "kvstore-node": node.command}
GIB: Final = 1 << 30


OPTIONAL: Final = ("podmonitor.yaml", "prometheusrule.yaml", "grafana.yaml")
"""For operators that not every cluster has."""


def documents() -> list[dict[str, Any]]:
    names = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    return [each for name in names for each in yaml.safe_load_all((KUBERNETES / name).read_text())]


def named(document: dict[str, Any]) -> str:
    return f"{document['kind']}-{document['metadata']['name']}"


def workloads() -> list[dict[str, Any]]:
    return [each for each in documents() if each["kind"] in ("StatefulSet", "DaemonSet")]


def containers() -> list[dict[str, Any]]:
    """Those of kvstore."""
    found = [
        container
        for each in workloads()
        for container in each["spec"]["template"]["spec"]["containers"]
    ]
    return [each for each in found if each["command"][0] in COMMANDS]


def settings_of(words: list[str]) -> dict[str, Any]:
    """What a command line sets; its own parser refuses what it does not know."""
    context = COMMANDS[words[0]].make_context(words[0], list(words[1:]))
    return {name: value for name, value in context.params.items() if value is not None}


def bytes_of(quantity: str) -> int:
    """Of Kubernetes (66Gi) and of Compose (1536m, 1g), where units are binary."""
    number, unit = re.fullmatch(r"(\d+)(\w+)", quantity).groups()  # type: ignore[union-attr]
    return parse_size(f"{number}{unit[0].upper()}iB")


# --- Kubernetes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("document", documents(), ids=named)
def test_a_manifest_is_valid_by_the_schema_of_kubernetes(document: dict[str, Any]) -> None:
    import kubernetes_validate  # only make test-all installs it

    kubernetes_validate.validate(document, KUBERNETES_VERSION, strict=True)


def test_every_manifest_is_listed_or_optional() -> None:
    listed = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())["resources"]
    there = {path.name for path in KUBERNETES.glob("*.yaml")}
    assert there - set(listed) == {"kustomization.yaml", *OPTIONAL}


def test_kustomize_builds_it() -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("missing: kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(KUBERNETES)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    built = list(yaml.safe_load_all(done.stdout))
    assert sorted(map(named, built)) == sorted(map(named, documents()))
    assert {each["metadata"].get("namespace", "kvstore") for each in built} == {"kvstore"}


@pytest.mark.parametrize("container", containers(), ids=lambda each: str(each["name"]))
def test_a_container_fits_its_command(container: dict[str, Any]) -> None:
    given = settings_of(container["command"])
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    kind = UNITS[container["command"][0]]
    defaults = kind()
    assert ports["http"] == defaults.http_port
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["port"] in ports
        assert container[name]["httpGet"]["path"] in ("/healthz", "/readyz")
    # /readyz waits for the memory, whose size is the user's choice: no container is killed for it.
    for name in ("startupProbe", "livenessProbe"):
        assert container[name]["httpGet"]["path"] == "/healthz"
    limit = container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["memory"] == limit
    assert bytes_of(limit) >= parse_size(given.get("memory", 0)) + GIB
    known = {each["name"] for each in container["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(container["command"]))) <= known
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_selectors_find_the_pods_and_the_network_lets_their_ports_in() -> None:
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for each in documents():
        by_kind.setdefault(each["kind"], []).append(each)
    labels = {}
    for each in workloads():
        template = each["spec"]["template"]
        wanted = each["spec"]["selector"]["matchLabels"]
        assert wanted == template["metadata"]["labels"]
        labels[wanted["app.kubernetes.io/name"]] = template["spec"]["containers"][0]
    for each in by_kind["Service"]:
        ports = labels[each["spec"]["selector"]["app.kubernetes.io/name"]]["ports"]
        offered = {port["port"] for port in each["spec"]["ports"]}
        assert offered <= {port["containerPort"] for port in ports}
    for each in by_kind["PodDisruptionBudget"]:
        assert each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] in labels
    seen = set()
    for each in by_kind["NetworkPolicy"]:
        name = each["spec"]["podSelector"]["matchLabels"]["app.kubernetes.io/name"]
        seen.add(name)
        let_in = {port["port"] for rule in each["spec"]["ingress"] for port in rule["ports"]}
        ports = {port["containerPort"] for port in labels[name]["ports"]}
        assert ports - let_in <= {2381}  # etcd's metrics, which the kubelet asks
    assert seen == set(labels)


def test_masters_and_nodes_meet() -> None:
    given = {each["name"]: settings_of(each["command"]) for each in containers()}
    assert given["master"]["cluster"] == given["node"]["cluster"]
    masters = next(each for each in workloads() if each["metadata"]["name"] == "kvstore-master")
    name, service = masters["metadata"]["name"], masters["spec"]["serviceName"]
    hosts = [f"{name}-{number}.{service}:50001" for number in range(masters["spec"]["replicas"])]
    assert given["node"]["master"] == ",".join(hosts)


# --- Kubernetes with authentication --------------------------------------------------------------


@pytest.fixture(scope="module")
def with_auth() -> list[dict[str, Any]]:
    if shutil.which("kubectl") is None:
        pytest.skip("missing: kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(WITH_AUTH)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def certificates() -> dict[str, dict[str, Any]]:
    """The certificates of the example for cert-manager, by their secrets."""
    found = yaml.safe_load_all((WITH_AUTH / "certificates.yaml").read_text())
    specs = [each["spec"] for each in found if each["kind"] == "Certificate"]
    return {each["secretName"]: each for each in specs}


def test_with_authentication_it_is_the_same_cluster(with_auth: list[dict[str, Any]]) -> None:
    import kubernetes_validate  # only make test-all installs it

    assert sorted(map(named, with_auth)) == sorted(map(named, documents()))
    for each in with_auth:
        kubernetes_validate.validate(each, KUBERNETES_VERSION, strict=True)
    files = {path.name for path in WITH_AUTH.glob("*.yaml")}
    assert files == {
        "kustomization.yaml", "masters.yaml", "nodes.yaml", "certificates.yaml", "podmonitors.yaml",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), UNITS.items())
def test_a_pod_has_its_identity_and_is_probed_without_one(
    with_auth: list[dict[str, Any]], name: str, kind: type[MasterConfig | NodeConfig],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    built = next(each for each in with_auth if each["metadata"]["name"] == name and "spec" in each
                 and "template" in each["spec"])  # fmt: skip
    pod = built["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
        assert container[probe]["httpGet"]["path"] in ("/healthz", "/readyz")
    for each in container["env"]:
        if "value" in each:
            monkeypatch.setenv(each["name"], each["value"])
    monkeypatch.setenv("KVSTORE_STRICT_CONFIG", "1")
    config = load(kind, {}, config_path="", origin="{flag}")
    places = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    secret = volumes[places[config.auth]]["secret"]
    # Kubernetes makes the files of a secret those of fsGroup, and of root.
    assert secret["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]
    revoked = volumes[places[str(Path(config.auth_revoked).parent)]]
    assert "optional" not in revoked["configMap"], "without the list nobody would be revoked"
    assert Path(config.auth_revoked).name == REVOKED_NAME
    assert secret["secretName"] in certificates()


# --- Compose and Prometheus ----------------------------------------------------------------------


def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def given_or_default(word: str) -> str:
    """``${NAME:-default}`` without a variable."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", word)


def test_compose_starts_commands_that_there_are_with_room_for_their_memory() -> None:
    services = compose()["services"]
    assert set(services) == {"etcd", "master-1", "master-2", "node-1", "node-2", "prometheus"}
    for name, service in services.items():
        words = (
            [given_or_default(word) for word in service["command"]] if "command" in service else []
        )
        if words and words[0] in COMMANDS:
            given = settings_of(words)
            assert bytes_of(service["mem_limit"]) >= parse_size(given.get("memory", 0)) + GIB // 2
            assert given.get("name", name) == name
        assert set(service.get("depends_on", {})) <= set(services)


def test_compose_reads_it() -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("missing: docker-compose")
    command = ["docker-compose", "--file", str(DEPLOY / "compose.yaml"), "config", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_prometheus_reads_its_file_which_names_what_compose_starts() -> None:
    need_program("promtool", "prometheus")
    path = DEPLOY / "prometheus/prometheus.yml"
    done = subprocess.run(
        ["promtool", "check", "config", str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (job,) = yaml.safe_load(path.read_text())["scrape_configs"]
    hosts = {
        target.partition(":")[0] for each in job["static_configs"] for target in each["targets"]
    }
    assert hosts == set(compose()["services"]) - {"etcd", "prometheus"}


# --- Compose with authentication -----------------------------------------------------------------


def with_identities() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose-auth.yaml").read_text()))


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the service ``identities`` writes, started twice."""
    folder = tmp_path_factory.mktemp("compose")
    (folder / "identities").mkdir()
    (folder / "authority").mkdir(mode=0o750)
    *shell, script = with_identities()["services"]["identities"]["command"]
    script = script.replace("$$", "$")  # as Compose does
    for place in ("/authority", "/identities"):
        script = re.sub(rf"(?<=\s){place}\b", f"{folder}{place}", script)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    written = []
    for _ in range(2):
        done = subprocess.run(
            [*shell, script], cwd=folder / "identities", env=os.environ | {"PATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        written.append({each: each.read_bytes() for each in folder.rglob("*") if each.is_file()})
    assert written[0] == written[1]
    return folder / "identities"


def test_compose_writes_an_identity_for_each_service(issued: Path) -> None:
    base, services = compose()["services"], with_identities()["services"]
    assert set(services) == (set(base) | {"identities"}) - {"etcd"}
    assert not list(issued.glob("*.key")), "the authority's key is in a volume of its own"
    for name, service in services.items():
        mounted = {
            each["target"] if isinstance(each, dict) else each.split(":")[1]
            for each in service["volumes"]
        }
        assert "/identities" in mounted
        assert ("/authority" in mounted) == (name == "identities")
        if name == "identities":
            continue
        waits = service["depends_on"]["identities"]["condition"]
        assert waits == "service_completed_successfully"
        if name == "prometheus":
            continue
        given = service["environment"]
        found = inspect(given["KVSTORE_AUTH"].replace("/identities", str(issued)))
        assert (found["problems"], found["roles"]) == ([], ["master", "node"])
        revoked = given[f"KVSTORE_{name.partition('-')[0].upper()}_AUTH_REVOKED"]
        assert (issued / Path(revoked).name).exists()
    assert {each.name for each in issued.iterdir()} == {
        "store.auth", "engines.auth", "me.auth", "prometheus", "revoked",
    }  # fmt: skip


# --- systemd -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNITS)
def test_systemd_reads_the_unit(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("missing: systemd-analyze")
    text = (DEPLOY / f"systemd/{name}.service").read_text()
    assert f"ExecStart=/opt/kvstore/bin/{name}\n" in text
    unit = tmp_path / f"{name}.service"
    unit.write_text(text.replace(f"/opt/kvstore/bin/{name}", shutil.which("true") or ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "warning"},
    )
    assert done.returncode == 0, done.stderr
    assert name not in done.stderr, done.stderr  # an unknown setting is a warning


@pytest.mark.parametrize(("name", "kind"), UNITS.items())
def test_the_settings_of_a_unit_are_known(
    name: str, kind: type[MasterConfig | NodeConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = DEPLOY / f"systemd/{name.removeprefix('kvstore-')}.env"
    lines = [line.removeprefix("#") for line in file.read_text().splitlines()]
    found = dict(line.split("=", 1) for line in lines if line.startswith("KVSTORE_"))
    assert found
    for variable, value in found.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("KVSTORE_STRICT_CONFIG", "1")
    config = load(kind, {}, config_path="", origin="{flag}")
    assert config.model_fields_set == {
        variable.removeprefix("KVSTORE_").removeprefix(f"{kind.section.upper()}_").lower()
        for variable in found
    }
    assert config.auth


# --- the image -----------------------------------------------------------------------------------


def test_what_is_copied_into_the_image_is_not_ignored() -> None:
    kept = {
        line.removeprefix("!")
        for line in (DEPLOY.parent / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    needed = {
        "client",
        "connectors",
        "kvstore",
        "master",
        "pyproject.toml",
        "setup.py",
        "README.md",
    }
    assert needed | {"deploy/healthy.py"} <= kept


@contextlib.contextmanager
def answering(status: int, folder: Path, *, has_tls: bool) -> Iterator[int]:
    """The port of a server."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/healthz" else 404)
            self.end_headers()

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        if has_tls:
            tls = Credentials(Identities(folder).file("node")).server(is_optional=True)
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("status", "has_tls"), [(200, False), (503, False), (200, True)])
def test_the_health_check_asks_as_the_process_serves(
    tmp_path: Path, status: int, has_tls: bool
) -> None:
    # Docker's client puts its proxy into every container.
    proxied = {f"{name}_proxy": "http://127.0.0.1:9" for name in ("http", "HTTP", "all", "https")}
    with answering(status, tmp_path, has_tls=has_tls) as port:
        done = subprocess.run(
            [sys.executable, "-B", DEPLOY / "healthy.py"], check=False,
            env=os.environ | proxied | {"HEALTH_AT": f"127.0.0.1:9 127.0.0.1:{port}"},
        )  # fmt: skip
    assert (done.returncode == 0) == (status == 200)
