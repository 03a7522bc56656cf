"""Settings: where they come from, what is refused, and what the refusal says."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvstore.config import (
    KINDS,
    ClientConfig,
    Config,
    ConnectorConfig,
    MasterConfig,
    NodeConfig,
    ProxyConfig,
    load,
    loader,
    parse_size,
    settings,
)
from kvstore.errors import ConfigError, InvalidArgumentError
from kvstore.limits import ENGINES, is_fleet, of_tenant, tenant_of
from kvstore.runtime.addresses import EtcdPlace, join_address, split_address


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, whose ``.config`` is the user's; nothing is in the environment."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(home: Path, **variables: str) -> dict[str, str]:
    return {"HOME": str(home), **variables}


def refusal(kind: type[Config], *, environ: dict[str, str], **arguments: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(kind, arguments, environ=environ, origin="{flag}")
    return caught.value


# --- sizes and addresses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("4096B", 4096),
        ("4KiB", 4096),
        ("4 kib", 4096),
        ("4Ki", 4096),
        ("2GiB", 2 << 30),
        ("2GB", 2_000_000_000),
        ("1.5GiB", 3 << 29),
        ("0.1MB", 100_000),
        (" 1TiB ", 1 << 40),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "2 Gigs", "-1", "1e9", "2,5GiB", "0.1234GiB", "0x10", "٣GiB", -1]
)
def test_what_is_no_size(text: int | str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50001", "127.0.0.1", 50001),
        ("cache.example:1", "cache.example", 1),
        ("[::1]:50001", "::1", 50001),
    ],
)
def test_addresses_there_and_back(text: str, host: str, port: int) -> None:
    assert split_address(text) == (host, port)
    assert join_address(host, port) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "host",
        "host:",
        "host:x",
        "host:65536",
        "host:-1",
        "::1",
        "::1:5",
        "[::1",
        "[]:1",
        "[::1]x:1",
        "http://host:1",
        "a b:1",
        "host:1:2",
        "host:²",
    ],
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        split_address(text)


def test_the_port_of_a_master_may_be_left_out() -> None:
    assert ClientConfig(master="cache.example").master == "cache.example:50001"
    assert ClientConfig(master="[::1]").master == "[::1]:50001"
    assert ClientConfig(master="a, b:7").master == "a:50001,b:7"


# --- where values come from --------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_default_survives_its_own_text_form(kind: type[Config], home: Path) -> None:
    variables = {setting.variables[0]: setting.default for setting in settings(kind)}
    assert load(kind, environ=environment(home, **variables)) == kind()


def test_argument_before_variable_before_file_before_default(home: Path) -> None:
    (home / "kvstore.toml").write_text("[master]\nlease_ms = 3000\ndead_ms = 300\nport = 300\n")
    environ = environment(home, KVSTORE_MASTER_LEASE_MS="2000", KVSTORE_MASTER_DEAD_MS="200")
    config = load(MasterConfig, {"lease_ms": "1000", "port": None}, environ=environ)
    assert (config.lease_ms, config.dead_ms, config.port) == (1000, 200, 300)
    assert config.host == "127.0.0.1"


def test_the_file_of_the_working_folder_hides_the_one_of_the_user(home: Path) -> None:
    users = home / ".config" / "kvstore" / "kvstore.toml"
    users.parent.mkdir(parents=True)
    users.write_text('[node]\nname = "user"\n')
    assert load(NodeConfig, environ=environment(home)).name == "user"
    (home / "kvstore.toml").write_text('[node]\nname = "folder"\n')
    assert load(NodeConfig, environ=environment(home)).name == "folder"
    elsewhere = environment(home, XDG_CONFIG_HOME=str(home / "nowhere"))
    (home / "kvstore.toml").unlink()
    assert load(NodeConfig, environ=elsewhere).name == ""


def test_a_named_file_is_the_only_one(home: Path) -> None:
    (home / "kvstore.toml").write_text('[node]\nname = "folder"\n')
    other = home / "other.toml"
    other.write_text('[node]\nmemory = "2GiB"\n')
    by_variable = load(NodeConfig, environ=environment(home, KVSTORE_CONFIG=str(other)))
    by_flag = load(NodeConfig, config_path=other, environ=environment(home, KVSTORE_CONFIG="x"))
    assert by_variable == by_flag == NodeConfig(memory=2 << 30)
    assert load(NodeConfig, config_path="", environ=environment(home)) == NodeConfig()


def test_one_variable_tells_nodes_and_clients_where_the_master_is(home: Path) -> None:
    both = environment(home, KVSTORE_MASTER="a:1")
    assert load(NodeConfig, environ=both).master == "a:1"
    assert load(ClientConfig, environ=both).master == "a:1"
    assert load(ClientConfig, environ=both | {"KVSTORE_CLIENT_MASTER": "b:2"}).master == "b:2"


def test_a_kubernetes_service_of_our_name_is_no_setting(home: Path) -> None:
    environ = environment(
        home,
        KVSTORE_MASTER_SERVICE_HOST="10.0.0.7",
        KVSTORE_MASTER_SERVICE_PORT="50001",
        KVSTORE_MASTER_SERVICE_PORT_GRPC="50001",
        KVSTORE_MASTER_PORT="tcp://10.0.0.7:50001",
        KVSTORE_MASTER_PORT_50001_TCP="tcp://10.0.0.7:50001",
        KVSTORE_MASTER_PORT_50001_TCP_ADDR="10.0.0.7",
        KVSTORE_SERVICE_HOST="10.0.0.8",
    )
    assert load(MasterConfig, environ=environ) == MasterConfig()


# --- what is refused ---------------------------------------------------------------------------


STRICT = {"KVSTORE_STRICT_CONFIG": "1"}


def test_what_is_unknown_is_warned_of_once_and_left_out(
    home: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of the next release, which has read the same before an upgrade was taken back."""
    monkeypatch.setattr(loader, "_logged", set())
    (home / "kvstore.toml").write_text('[node]\nmemroy = "4GiB"\nmemory = "2GiB"\n[nodez]\nx = 1\n')
    environ = environment(home, KVSTORE_NODE_KEEPS="1")
    for _ in range(2):
        assert load(NodeConfig, environ=environ) == NodeConfig(memory=2 << 30)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 3
    assert "memroy" in said[0]
    assert "Did you mean memory?" in said[0]
    assert "[nodez]" in said[1]
    assert "Did you mean [node]?" in said[1]
    assert "KVSTORE_NODE_KEEPS" in said[2]
    assert "Did you mean KVSTORE_NODE_KEEP?" in said[2]


def test_who_maps_memory_is_asked_for_where_identities_and_descriptors_are(
    home: Path, tmp_path: Path
) -> None:
    wanted = {"KVSTORE_NODE_SHM_CLIENTS": "all-namespaces"}
    error = refusal(NodeConfig, environ=environment(home, **wanted))
    assert "requires authentication" in str(error)
    wanted["KVSTORE_AUTH"] = str(tmp_path / "x.auth")
    config = load(NodeConfig, environ=environment(home, **wanted))
    assert config.passes_descriptors
    error = refusal(NodeConfig, environ=environment(home, KVSTORE_NODE_DEVICE="cuda:0", **wanted))
    assert "opened by name" in str(error)


def test_a_misspelt_variable(home: Path) -> None:
    error = refusal(NodeConfig, environ=environment(home, KVSTORE_NODE_MEMROY="4GiB", **STRICT))
    assert error.fields["key"] == "KVSTORE_NODE_MEMROY"
    assert error.fields["nearest"] == "KVSTORE_NODE_MEMORY"
    assert "the environment" in str(error)


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"[node\n", "not valid TOML"), (b"\xff\xfe", "not valid TOML"), (None, "No such file")],
)
def test_an_unreadable_file(home: Path, content: bytes | None, says: str) -> None:
    file = home / "some.toml"
    if content is not None:
        file.write_bytes(content)
    error = refusal(NodeConfig, environ=environment(home, KVSTORE_CONFIG=str(file)))
    assert says in str(error)
    assert str(file) in str(error)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file away")
def test_a_file_that_another_user_has_put_into_a_shared_folder_is_refused(home: Path) -> None:
    (home / "kvstore.toml").write_text('[node]\nname = "folder"\n')
    os.chown(home / "kvstore.toml", 65_533, -1)
    assert load(NodeConfig, environ=environment(home)).name == "folder"
    home.chmod(0o1777)
    assert "user 65533" in str(refusal(NodeConfig, environ=environment(home)))


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        (MasterConfig, "lease_ms", 999),
        (MasterConfig, "lease_ms", "soon"),
        (MasterConfig, "lease_ms", 1000.5),
        (MasterConfig, "lease_ms", True),
        (MasterConfig, "lease_ms", [1000]),
        (MasterConfig, "port", 65536),
        (MasterConfig, "port", -1),
        (MasterConfig, "host", ""),
        (MasterConfig, "memory", "2G"),
        (MasterConfig, "memory", "1KiB"),
        (MasterConfig, "log_level", "loud"),
        (MasterConfig, "dead_ms", 100),
        (MasterConfig, "lane_port", 50001),
        (MasterConfig, "port", 65535),
        (NodeConfig, "memory", 0),
        (NodeConfig, "master", "::1:50001"),
        (NodeConfig, "master", "host:0"),
        (NodeConfig, "master", "a,"),
        (NodeConfig, "advertise", "http://x"),
        (NodeConfig, "name", "a\nb"),
        (NodeConfig, "name", 7),
        (ClientConfig, "transports", "shm,udp"),
        (ClientConfig, "transports", "shm,shm"),
        (ClientConfig, "transports", []),
        (ClientConfig, "namespace", ""),
        (ClientConfig, "replicas", 0),
        (ClientConfig, "replicas", 9),
        (ClientConfig, "verify", "nothing"),
        (ClientConfig, "lane", "perhaps"),
    ],
)
def test_a_value_out_of_its_range(kind: type[Config], key: str, value: object) -> None:
    error = refusal(kind, environ={"KVSTORE_CONFIG": ""}, **{key: value})
    assert error.code == "config"
    blamed = "lane_port" if value == 65535 else key
    assert error.fields["key"] == blamed
    assert str(error).startswith(blamed)
    if blamed == key:
        assert error.fields["origin"] == "--" + key.replace("_", "-")
    with pytest.raises(ConfigError):
        kind(**{key: value})


@pytest.mark.parametrize("kind", [ClientConfig, ConnectorConfig, ProxyConfig])
def test_one_variable_names_the_tenant_of_all_that_are_clients(
    kind: type[Config], home: Path
) -> None:
    assert load(kind, environ={}).tenant == ""  # type: ignore[attr-defined]
    environ = {"KVSTORE_TENANT": "acme"}
    assert load(kind, environ=environ).tenant == "acme"  # type: ignore[attr-defined]
    assert load(kind, {"tenant": "b"}, environ=environ).tenant == "b"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "name", ["a", "Acme-1.eu_2", "\u00e9quipe", "two words", "t" * 32, "vllm2"]
)
def test_a_tenant_is_a_part_of_a_namespaces_name(name: str) -> None:
    assert ClientConfig(tenant=name).tenant == name
    for space in ("vllm/f/g0/p0t0", "vllm-fleet", "sglang/f/p0", "lmcache/f/objects"):
        assert tenant_of(of_tenant(name, space)) == name
        assert tenant_of(space) == tenant_of(of_tenant("", space)) == ""
    assert is_fleet(of_tenant(name, "vllm-fleet"))


@pytest.mark.parametrize(
    "name", ["a/b", "/", "acme/", "acme*", "*", "t" * 33, "\u00e9" * 17, "\ud800", *sorted(ENGINES)]
)
def test_what_is_no_tenant_is_refused(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ClientConfig(tenant=name)
    assert caught.value.fields["key"] == "tenant"


@pytest.mark.parametrize("kind", [NodeConfig, ClientConfig, ConnectorConfig, ProxyConfig])
def test_a_master_may_be_named_by_an_etcd(kind: type[Config]) -> None:
    assert kind(master=" etcd://e;f:1").model_dump()["master"] == "etcd://e:2379,f:1/kvstore"
    with pytest.raises(ConfigError, match="is not an etcd address"):
        kind(master="etcd://e?ca_file=f")


def test_where_masters_meet() -> None:
    assert MasterConfig().etcd_place is None
    plain = MasterConfig(etcd="e,f:1/mine/")
    assert plain.etcd_place == EtcdPlace(("e:2379", "f:1"), "mine")
    url = MasterConfig(etcd="etcd://u:p@e/mine?ca=f&cert=c&key=k")
    assert url.etcd_place == EtcdPlace(("e:2379",), "mine", "f", "c", "k", "u", "p")
    for query in ("cert=c", "cert=c&key=k"):
        with pytest.raises(ConfigError, match="a certificate for etcd needs its key") as caught:
            MasterConfig(etcd=f"etcd://u:p4ss@e?{query}")
        assert "p4ss" not in str(caught.value)


@pytest.mark.parametrize("kind", [MasterConfig, NodeConfig, ClientConfig, ConnectorConfig])
def test_bytes_are_encrypted_only_where_all_peers_have_an_identity(
    home: Path, kind: type[Config]
) -> None:
    given = {"data_encryption": "TLS", "environ": environment(home)}
    error = refusal(kind, **given)  # type: ignore[arg-type]
    assert error.fields["key"] == "data_encryption"
    assert "requires a certificate" in error.message
    assert "--auth FILE" in error.advice
    given["auth"] = "some.auth"
    loaded = load(kind, {"auth": "some.auth", "data_encryption": "tls"}, environ=environment(home))
    assert getattr(loaded, "data_encryption") == "tls"  # noqa: B009  # not of all kinds
    of_all = {"KVSTORE_AUTH": "some.auth", "KVSTORE_DATA_ENCRYPTION": "tls"}
    assert load(kind, environ=environment(home, **of_all)) == loaded
    if kind is not MasterConfig:
        engine = {"protocol": "tcp", "engine_unauthenticated": True}
        error = refusal(kind, **given, **engine)  # type: ignore[arg-type]
        assert "transfer engine has no encryption" in error.message
