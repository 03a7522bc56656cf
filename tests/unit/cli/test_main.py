"""The command ``kvstore`` against a client that is a dictionary."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import pytest

import kvstore
from kvstore import calls
from kvstore.bench import harness
from kvstore.bench.rows import Table
from kvstore.calls import PutOutcome
from kvstore.cli import bench as cli_bench
from kvstore.cli.main import LATE, cli
from kvstore.client.flows.control_calls import ObjectStat
from kvstore.config import ClientConfig
from kvstore.errors import MasterUnreachableError, NoSpaceError
from kvstore.limits import Key, Namespace
from kvstore.memory import shm_entries
from kvstore.memory.header import Header, SegmentOwner
from kvstore.memory.shm_entries import LeftoverSegment
from tests.support.processes import run_python
from tests.unit.cli.conftest import KV, Result

NAMESPACE = "default"
CONTENT = b'{"kind": "torch", "dtype": "bfloat16", "shape": [2, 8]}'
HEADER = Header(Namespace("default"), Key(b"k"), None, 5, 1, 9, 0, CONTENT)


class FakeClient:
    """What the commands use of a ``Client``; one store for all of them."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, bytes], Any] = {}
        self.puts: list[dict[str, Any]] = []
        self.configs: list[ClientConfig] = []
        self.error: BaseException | None = None
        self.node_version = "0.1.0"

    def __call__(self, *, config: ClientConfig) -> Self:
        self.configs.append(config)
        return self

    def __enter__(self) -> Self:
        if self.error is not None:
            raise self.error
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def put(self, key: bytes, value: Any, *, namespace: str, **options: Any) -> PutOutcome:
        self.puts.append(options)
        if (namespace, key) in self.objects and not options["overwrite"]:
            return PutOutcome.FOUND
        self.objects[namespace, key] = bytes(value) if isinstance(value, bytearray) else value
        return PutOutcome.STORED

    def get(self, key: bytes, *, namespace: str, kind: str) -> Any:
        value = self.objects.get((namespace, key))
        if kind == "bytes" and isinstance(value, np.ndarray):
            return value.tobytes()
        return value

    def remove_many(self, keys: Sequence[bytes], *, namespace: str) -> list[bool]:
        return [self.objects.pop((namespace, key), None) is not None for key in keys]

    def clear(self, namespace: str | None, *, progress: Callable[[int, int], None]) -> int:
        doomed = [name for name in self.objects if namespace in (None, name[0])]
        for name in doomed:
            del self.objects[name]
        progress(len(doomed), 0)
        return len(doomed)

    def list_objects(self, *, namespace: str, prefix: bytes) -> Iterator[calls.ObjectRow]:
        for space, key in sorted(self.objects):
            if namespace in ("", space) and key.startswith(prefix):
                yield self._row(space, key)

    def stat(self, key: bytes, *, namespace: str) -> ObjectStat | None:
        if (namespace, key) not in self.objects:
            return None
        row, version = self._row(namespace, key), calls.Version(1, 9)
        places = calls.Placements([5], [1], [9], [1], [1], [4096])
        detail = calls.ObjectDetail(row, b"\x01", 2, version, 1500, places)
        return ObjectStat(detail, HEADER)

    def status(self) -> calls.ClusterStatus:
        segment = calls.SegmentStatus(1, 1 << 30, 1 << 28, 1 << 29, "kvstore-x")
        node = calls.NodeStatus(
            "host-a", "boot", "alive", "127.0.0.1:7", 120, [segment], self.node_version
        )
        namespaces = [calls.NamespaceStatus("default", 3, 4096)]
        return calls.ClusterStatus(
            7,
            "0.1.0",
            65_000,
            [node],
            namespaces,
            [calls.Counter("evictions", 2), calls.Counter("under_replicated_objects", 1)],
        )

    def _row(self, namespace: str, key: bytes) -> calls.ObjectRow:
        size = len(self.objects[namespace, key])
        return calls.ObjectRow(namespace, Key(key), size, 1, 0, 0, "complete")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    fake = FakeClient()
    monkeypatch.setattr(kvstore, "Client", fake)
    return fake


def test_help_shows_an_example_and_the_variables(kv: KV) -> None:
    text = kv("--help").out
    assert "kvstore put greeting hello.txt" in text
    assert "KVSTORE_CLIENT_TIMEOUT_MS" in text
    assert "Exit codes" in text


def imported_by(*arguments: str) -> set[str]:
    """The packages that one run of the command imports."""
    code = (
        "import sys; from kvstore.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )
    done = run_python("-c", code, *arguments, check=True)
    return set(done.stderr.splitlines()[-1].split())


def test_ctrl_c_while_modules_load_ends_without_a_traceback() -> None:
    code = (
        "import sys\nimport kvstore.cli\n"
        "class Finder:\n    def find_spec(self, *_):\n        raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\nkvstore.cli.start()"
    )
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (130, "")


def test_durations_have_units(kv: KV, store: FakeClient, tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    for text, seconds in (("90", 90), ("1.5h", 5400), ("250ms", 0.25)):
        assert kv("put", "k", str(tmp_path / "f"), "--ttl", text).code == 0
        assert store.puts[-1]["ttl"] == seconds
    refused = kv("put", "k", str(tmp_path / "f"), "--ttl", "1x")
    assert refused.code == 2
    assert "5min" in refused.err


def test_a_call_imports_nothing_that_it_does_not_need() -> None:
    """What costs tens of milliseconds each; a miss of the master is as far as it gets."""
    slow = {"asyncio", "grpc", "numpy", "rich", "torch", "vllm"}
    assert not imported_by("--help") & slow
    assert not imported_by("status", "--help") & slow
    assert not imported_by("status", "--timeout-ms", "soon") & slow
    found = imported_by("--master", "127.0.0.1:1", "--timeout-ms", "50", "--json", "status")
    assert not found & {"rich", "torch", "vllm"}


@pytest.mark.parametrize("name", sorted([*cli.commands, *LATE]))
def test_the_help_of_each_command_shows_an_example(kv: KV, name: str) -> None:
    result = kv(name, "--help")
    assert result.code == 0
    assert "Example" in result.out
    assert f"kvstore {name}" in result.out


def test_put_and_get_a_file(kv: KV, store: FakeClient, tmp_path: Path) -> None:
    content = bytes(range(256)) * 1000
    (tmp_path / "in").write_bytes(content)
    result = kv("put", "greeting", str(tmp_path / "in"))
    assert (result.code, result.out) == (0, "greeting: stored, 250 KiB\n")
    assert store.objects == {(NAMESPACE, b"greeting"): content}

    assert kv("get", "greeting", "-o", str(tmp_path / "out")).code == 0
    assert (tmp_path / "out").read_bytes() == content
    assert kv("get", "greeting").out.encode(errors="surrogateescape") == content
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def test_put_from_standard_input(
    kv: KV, store: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert kv("put", "k", "-", "--json").json == {"key": "k", "outcome": "stored", "size": 5}
    assert store.objects[NAMESPACE, b"k"] == b"piped"


def test_put_says_what_it_was(kv: KV, store: FakeClient, tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"x")
    kv("put", "k", str(tmp_path / "in"))
    assert kv("put", "k", str(tmp_path / "in")).out == (
        "k: was there already; its bytes stay, yours were not stored\n"
    )
    assert "stored" in kv("put", "k", str(tmp_path / "in"), "--overwrite").out


def test_the_bytes_of_an_array_are_written(kv: KV, store: FakeClient, tmp_path: Path) -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    store.objects[NAMESPACE, b"a"] = array
    kv("get", "a", "-o", str(tmp_path / "raw"))
    assert (tmp_path / "raw").read_bytes() == array.tobytes()


def test_a_failed_get_leaves_the_old_file(kv: KV, store: FakeClient, tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(b"old")
    result = kv("get", "missing", "-o", str(tmp_path / "out"))
    assert result.code == 3
    assert (tmp_path / "out").read_bytes() == b"old"


@pytest.mark.parametrize("command", ["get", "stat", "rm"])
def test_a_miss_has_its_own_exit_code(kv: KV, command: str) -> None:
    result = kv(command, "missing")
    assert result.code == 3
    assert result.err == "kvstore: missing is not in default\n"
    as_json = kv(command, "missing", "--json")
    assert as_json.code == 3
    assert json.loads(as_json.err)["error"] == {
        "code": "not_there",
        "message": "missing is not in default",
        "advice": "",
        "fields": {"key": "missing", "namespace": "default"},
    }


def test_ls(kv: KV, store: FakeClient) -> None:
    store.objects = {("a", b"k1"): b"x", ("a", b"\x00"): b"yy", ("b", b"k2"): b"zzz"}
    assert kv("ls").out.splitlines() == [
        "a\thex:00\t2\t1\t0\t0\tcomplete",
        "a\tk1\t1\t1\t0\t0\tcomplete",
        "b\tk2\t3\t1\t0\t0\tcomplete",
    ]
    assert kv("ls", "--namespace", "b").out.count("\n") == 1
    lines = kv("ls", "--prefix", "k", "--json").out.splitlines()
    assert [json.loads(line)["key"] for line in lines] == ["k1", "k2"]
    limited = kv("ls", "--limit", "2")
    assert limited.out.count("\n") == 2
    assert "There are more" in limited.err


def test_stat(kv: KV, store: FakeClient) -> None:
    store.objects[NAMESPACE, b"k"] = b"12345"
    found = kv("stat", "k", "--json").json
    assert found["size"] == 5
    assert found["content"]["dtype"] == "bfloat16"
    assert found["parent"] == "hex:01"
    assert found["locations"] == [{"node": "host-a", "segment": 1, "offset": 4096}]
    text = kv("stat", "k").out
    assert "size       5 B" in text
    assert "host-a segment 1 at 0x1000" in text
    assert "1.5 s" in text


def test_rm(kv: KV, store: FakeClient) -> None:
    store.objects = {(NAMESPACE, b"a"): b"1", (NAMESPACE, b"b"): b"2"}
    assert kv("rm", "a", "a", "b") == Result(0, "removed 2\n", "")
    result = kv("rm", "a", "--json")
    assert (result.code, result.json) == (3, {"removed": 0, "missing": ["a"]})


def test_clear_takes_one_namespace_or_all(kv: KV, store: FakeClient) -> None:
    store.objects = {("default", b"a"): b"1", ("x", b"b"): b"2", ("y", b"c"): b"3"}
    assert kv("clear", "-y").out == "removed 1 of namespace default\n"
    cleared = kv("clear", "--namespace", "x", "--json", "--yes")
    assert cleared.json == {"removed": 1, "namespace": "x"}
    assert kv("clear", "--all", "--yes").out == "removed 1 of every namespace\n"
    assert kv("clear", "--all", "--namespace", "x").code == 2


def test_status(kv: KV) -> None:
    text = kv("status", "--counters").out
    for part in (
        "epoch 7",
        "host-a",
        "alive",
        "256 MiB of 1.00 GiB used (25 %)",
        "evictions",
        "warning: 1 object with fewer replicas than requested.",
    ):
        assert part in text
    found = kv("status", "--json").json
    assert found["nodes"][0]["segments"][0]["size"] == 1 << 30
    assert found["counters"] == {"evictions": 2, "under_replicated_objects": 1}
    [problem] = found["problems"]
    assert problem["runbook"] == "KvstoreUnderReplicated"


def test_the_status_names_a_node_that_died_and_puts_that_were_refused(
    kv: KV, store: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = [calls.DepartedNode("host-b", "h", "silent", 9_000, 7, 0, False)]
    counters = [calls.Counter(f"refused_{of}", 3) for of in ("leased", "pins")]
    seen = store.status()._replace(departed=gone, counters=counters)
    monkeypatch.setattr(store, "status", lambda: seen)
    text = kv("status").out
    for part in (
        "bad: Node host-b (h) died (silent) 9.0 s ago: 7 objects that no other node had.",
        "  Start the node again on its host, with the same --name and memory.",
        "warning: 3 puts found no room since the master started, 1 min 5 s ago: every object",
        "warning: 3 pins refused since the master started, 1 min 5 s ago",
    ):
        assert part in text


def test_the_status_shows_tenants(
    kv: KV, store: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "tenant" not in kv("status").out
    plain = store.status()
    tenants = [
        calls.TenantStatus("", 1 << 20, 0, 0, 0, 0, 3, 0, 0, 0),
        calls.TenantStatus("acme", 1 << 30, 2 << 30, 3 << 30, 0, 0, 71, 72, 73, 74, ["acme/*"]),
    ]
    monkeypatch.setattr(store, "status", lambda: plain._replace(tenants=tenants))
    text = kv("status").out
    for part in ("acme", "3.00 GiB", "71", "72", "73", "74", "(none)"):
        assert part in text
    assert "Tenants are guaranteed 2 GiB of a pool of 1 GiB" in " ".join(text.split())
    row = kv("status", "--json").json["tenants"][1]
    assert (row["name"], row["bytes"], row["limit_bytes"]) == ("acme", 1 << 30, 3 << 30)
    assert (row["evicted_by_own"], row["evicted_by_others"], row["refused"]) == (72, 73, 74)


@pytest.mark.parametrize("more", [[], ["--all"], ["--json"], ["--namespace", NAMESPACE]])
def test_nothing_is_cleared_where_nobody_can_be_asked(
    kv: KV, store: FakeClient, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    store.objects[NAMESPACE, b"k"] = b"x"
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    result = kv("clear", *more)
    assert (result.code, result.out) == (2, "")
    assert "--yes" in result.err
    assert store.objects


@pytest.mark.parametrize(("said", "code"), [("n\n", 130), ("y\n", 0)])
def test_who_clears_is_asked(
    kv: KV, store: FakeClient, monkeypatch: pytest.MonkeyPatch, said: str, code: int
) -> None:
    store.objects[NAMESPACE, b"k"] = b"x"
    terminal = io.StringIO(said)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    result = kv("clear", "--all")
    assert (result.code, not store.objects) == (code, code == 0)
    assert "Remove all objects of every namespace?" in result.err
    assert kv("clear", "--all", "--json").code == 2, "a program is not asked"


# --- benchmarks ---


def test_a_benchmark_ends_with_a_sentence(kv: KV, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = harness.Sample(1, 2_000.0, 1.0, 1.0, {})

    def measure(_table: Table, rows: Any, _plan: object, _: object, on_sample: Any) -> None:
        for row in rows:
            on_sample(row, "kvstore", sample)

    monkeypatch.setattr(harness, "measure", measure)
    said = kv("bench", "--transport", "shm", "--rows", "get/shm/1MiB/1,memcpy/shm/1MiB/1").out
    assert said.splitlines()[-1] == "The fastest get copies 2.1 GB/s by shm."


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stores that were measured; nothing is measured here."""
    found: list[str] = []

    def measure(table: Table, rows: object, plan: harness.ComparisonPlan, *_: object) -> NoReturn:
        system = table.systems["kvstore"]
        with system.start(plan.pool_bytes) as servers:
            auth = system.options["auth"]
            found.append(f"{servers.address()} {plan.pool_bytes}" + (f" as {auth}" if auth else ""))
        raise NoSpaceError("that is enough")

    monkeypatch.setattr(harness, "measure", measure)
    monkeypatch.setattr(cli_bench, "POOL_BYTES_MIN", 1 << 20)
    return found


def test_a_running_store_is_not_used_where_nobody_can_be_asked(
    kv: KV, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    for arguments in (["bench", "--master", "a:1"], ["--master", "a:1", "bench", "--json"]):
        result = kv(*arguments)
        assert result.code == 2
        assert "--yes" in result.err
    assert not measured


@pytest.mark.parametrize(("said", "code"), [("n\n", 130), ("y\n", 1)])
def test_the_user_of_a_running_store_is_asked(
    kv: KV, measured: list[str], monkeypatch: pytest.MonkeyPatch, said: str, code: int
) -> None:
    terminal = io.StringIO(said)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", terminal)
    result = kv("bench", "--master", "a:1", "--memory", "64MiB")
    assert result.code == code
    for part in ("holds 3 objects", "768 MiB of 1.00 GiB are free", "fills 64.0 MiB", "Go on?"):
        assert part in result.err
    assert measured == ([f"a:1 {64 << 20}"] if code == 1 else [])


def test_no_more_is_used_than_is_free(
    kv: KV, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kv("bench", "--master", "a:1", "--memory", "64GiB", "--yes").code == 1
    assert measured == [f"a:1 {int((768 << 20) * 0.9)}"]
    monkeypatch.setattr(cli_bench, "POOL_BYTES_MIN", 1 << 30)
    result = kv("bench", "--master", "a:1", "--yes")
    assert result.code == 1
    assert "the benchmark evicts nothing" in result.err


# --- settings and errors -----------------------------------------------------------------------


def test_options_of_the_group_may_stand_behind_the_command(kv: KV, store: FakeClient) -> None:
    behind = ("--cluster", "blue", "--no-lane", "--verify", "header", "--transports", "tcp")
    for command in (["status"], ["ls"], ["stat", "k"], ["why"]):
        kv(*command, *behind)
        kv(*behind, *command)
        after, before = store.configs
        store.configs.clear()
        assert after == before, command
        assert after.cluster == "blue"


@pytest.mark.parametrize(
    ("command", "flag"),
    [("status", "--namespace"), ("get", "--replicas"), ("ls", "--replicas"), ("rm", "--memory")],
)
def test_an_option_without_effect_is_refused(kv: KV, command: str, flag: str) -> None:
    result = kv(command, flag, "1")
    assert result.code == 2
    assert f"No such option '{flag}'" in result.err


def test_a_command_never_contributes_memory(
    kv: KV, store: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_CLIENT_MEMORY", "2GiB")
    kv("status")
    assert store.configs == [ClientConfig()]


def test_an_error_is_one_line(kv: KV, store: FakeClient) -> None:
    store.error = MasterUnreachableError(
        "no master at 127.0.0.1:1", advice="Start kvstore-master.", address="127.0.0.1:1"
    )
    assert kv("status") == Result(
        1, "", "kvstore: no master at 127.0.0.1:1. Start kvstore-master.\n"
    )
    result = kv("status", "--json")
    assert json.loads(result.err) == {
        "error": {
            "code": "master_unreachable",
            "message": "no master at 127.0.0.1:1",
            "advice": "Start kvstore-master.",
            "fields": {"address": "127.0.0.1:1"},
        }
    }


def test_interrupted(kv: KV, store: FakeClient) -> None:
    store.error = KeyboardInterrupt()
    result = kv("status")
    assert result.code == 130
    assert "Traceback" not in result.err
    assert json.loads(kv("status", "--json").err)["error"]["code"] == "interrupted"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["statsu"], "statsu"),
        (["ls", "--limt", "3"], "--limit"),
        (["--master", "::1:5", "status"], "in brackets"),
        (["status", "--timeout-ms", "soon"], "timeout_ms = 'soon': must be a valid integer"),
        (["put", "k", "f", "--replicas", "99"], "less than or equal to 8"),
        (["stat", "--hex", "zz"], "not hexadecimal"),
        (["stat", ""], "1 to 256 bytes"),
        (["stat", "x" * 257], "1 to 256 bytes"),
        (["rm"], "KEY"),
    ],
)
def test_asked_wrongly(kv: KV, arguments: list[str], says: str) -> None:
    result = kv(*arguments)
    assert result.code == 2
    assert says in result.err
    assert "Traceback" not in result.err
    as_json = kv(*arguments, "--json")
    assert as_json.code == 2
    assert json.loads(as_json.err)["error"]["message"]


def test_clean_takes_the_cluster_before_it(kv: KV, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [
        LeftoverSegment(f"/dev/shm/kvstore.{each}", each, SegmentOwner(each), 1, 1) for each in "ab"
    ]
    monkeypatch.setattr(shm_entries, "left_overs", lambda: left)
    shown = [json.loads(line) for line in kv("--cluster", "b", "clean", "--json").out.splitlines()]
    assert [each["node"] for each in shown] == ["b"]
    hostile = "\x1b[2J\n"
    left[0] = LeftoverSegment(f"/dev/shm/kvstore.{hostile}", "", SegmentOwner(hostile), 1, 1)
    said = kv("clean")
    assert "x1b[2J" in said.err
    assert "\x1b" not in said.err
