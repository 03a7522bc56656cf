"""The trace that a master records, and that the planner reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import calls
from kvstore.calls import HintAction
from kvstore.errors import StartupError
from kvstore.limits import Key, Namespace
from kvstore.master.request_recorder import RequestRecorder, TraceFile
from kvstore.master.state.effects import DeferredReply
from kvstore.planner.traces import load_trace
from tests.support.cluster import Cluster


def test_what_clients_ask_for_is_a_trace_for_the_planner(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with Cluster(tmp_path, settings={"record": str(path)}) as store:
        store.start(memory="8MiB")
        client = store.client()
        keys = [f"{name}-prefix" for name in "abc"]
        client.match_prefix(keys)
        client.put_chain(keys, [bytes(1000)] * 3)
        client.match_prefix([*keys, "d-prefix"])
        client.put_chain(["e-prefix"], [bytes(1000)], parent="c-prefix", hint="demote")
        client.retain("e-prefix", "10min")
        client.match_prefix(["a-prefix"], hint="release")
    trace = load_trace(path)
    assert trace.chains == [[0, 1, 2], [0, 1, 2, 3], [0]]
    (demoted, retained), released = trace.hints[1], trace.hints[2]
    assert demoted[2:4] == (2, HintAction.DEMOTE), "the ancestor that was asked for"
    assert retained[2:] == (2, HintAction.RETAIN, 600_000)
    assert [(hint.block, hint.action) for hint in released] == [(0, HintAction.RELEASE)]
    assert trace.block_bytes > 1000


def test_a_match_that_waits_for_inventories_is_recorded(tmp_path: Path) -> None:
    recorder = RequestRecorder(TraceFile(tmp_path / "x", 1 << 20))
    steps = recorder.wrap({calls.MatchPrefix: lambda _ms, _request: DeferredReply(7)})
    assert steps[calls.MatchPrefix](
        0, calls.MatchPrefix([Namespace("n")], [Key(b"k")], False)
    ) == DeferredReply(7)
    recorder.close()
    assert load_trace(tmp_path / "x").chains == [[0]]


def test_the_file_is_bounded_and_the_older_half_is_read_first(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    recorder = RequestRecorder(TraceFile(path, 1 << 20))
    steps = recorder.wrap({calls.MatchPrefix: lambda _ms, _r: None, calls.PutStart: print})
    for number in range(3_000):
        key = Key(number.to_bytes(32, "big")[::-1])
        steps[calls.MatchPrefix](
            2_000 * number, calls.MatchPrefix([Namespace("n")], [key] * 40, False)
        )
    recorder.close()
    assert recorder.dropped == 0
    files = [path, path.with_name("requests.jsonl.1")]
    assert all(file.stat().st_size <= 1 << 19 for file in files)
    times = load_trace(path).times_ms
    assert times == sorted(times)
    assert times[-1] == 2_000 * 2_999


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="--record"):
        RequestRecorder(TraceFile(tmp_path / "none" / "x", 1 << 20))


def test_a_queue_that_is_not_written_drops_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.master.request_recorder.FLUSH_S", 60.0)
    recorder = RequestRecorder(TraceFile(tmp_path / "x", 1 << 20))
    steps = recorder.wrap({calls.MatchPrefix: lambda _ms, _r: None, calls.PutStart: print})
    request = calls.MatchPrefix([Namespace("n")], [Key(b"k")], False)
    for _ in range(5_000):
        steps[calls.MatchPrefix](0, request)
    assert recorder.dropped == 5_000 - 4_096
    recorder.close()
