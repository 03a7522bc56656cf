"""Output of our servers never blocks them, never fails, and shows what was left out."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

import pytest

from kvstore.process.json_logs import JsonFormatter
from kvstore.process.log_lines import PIECE_BYTES_MAX, TEXT_MAX, LineFormatter
from kvstore.process.logs import BURST, EACH, PER_S, RateLimit

END_S = 20.0
"""For a program that ends at once, on a busy machine."""

FLOOD = """
import logging, sys, time
from kvstore.process import logs
logs.configure("info")
log = logging.getLogger("kvstore.test")
for number in range(5_000):
    log.info("line number=%d %s", number, "x" * 100, extra=logs.EACH)
    print("printed", number, flush=True)
"""
"""More than a pipe and the queue hold."""


def start(program: str, *, stdout: Any, stderr: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr
    )


def output_of(program: str, *, code: int = 0) -> str:
    """What it writes to both, into one file."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=END_S,
        check=False,
        # This process has set it already, as it has imported kvstore.
        env={name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"},
    )
    assert done.returncode == code, done.stdout
    return done.stdout.decode()


def test_a_pipe_that_is_not_read_blocks_nothing() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "wb") as full:
        process = start(FLOOD, stdout=full, stderr=full)
        assert process.wait(END_S) == 0


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_is_no_error(stream: str) -> None:
    with open("/dev/full", "wb") as full, open(os.devnull, "wb") as other:
        outputs = {"stdout": other, "stderr": other} | {stream: full}
        process = start(FLOOD, **outputs)
        assert process.wait(END_S) == 0


def test_a_reader_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "wb") as broken:
        process = start(FLOOD, stdout=broken, stderr=broken)
        assert process.wait(END_S) == 0


def test_closed_streams_are_no_error() -> None:
    command = ["sh", "-c", 'exec "$0" -c "$1" >&- 2>&-', sys.executable, FLOOD]
    assert subprocess.run(command, timeout=END_S, check=False).returncode == 0


def test_what_was_dropped_is_counted_and_told() -> None:
    """The pipe is read only when the flood is over."""
    program = FLOOD + "sys.stdin.read()\nlog.info('later')\n"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    time.sleep(1.5)  # for the flood; a shorter one is dropped as well
    process.stdin.close()
    lines = process.stderr.read().decode().splitlines()
    process.stderr.close()
    assert process.wait(END_S) == 0
    written = sum("kvstore.test line number=" in line for line in lines)
    told = [line for line in lines if "log_lines_dropped" in line]
    counts = [int(line.partition("count=")[2].partition(":")[0]) for line in told]
    assert counts
    assert written + sum(counts) in (5_000, 5_001)  # the last line may be among them
    assert all(" W kvstore.process.logs log_lines_dropped" in line for line in told)


def test_all_is_written_at_the_end_and_in_order() -> None:
    program = """
import logging
from kvstore.process import logs
logs.configure("info")
for number in range(300):
    print("printed", number)
    logging.getLogger("kvstore.test").info("logged %d", number, extra=logs.EACH)
"""
    lines = [" ".join(line.split()[-2:]) for line in output_of(program).splitlines()]
    assert lines == [f"{what} {number}" for number in range(300) for what in ("printed", "logged")]


def test_what_ends_the_process_is_written() -> None:
    program = "from kvstore.process import logs; logs.configure('info'); raise ValueError('why')"
    assert output_of(program, code=1).endswith("ValueError: why\n")


def test_a_thread_that_dies_is_written() -> None:
    program = """
import threading
from kvstore.process import background, logs
logs.configure("info")
background.watch_threads()
def fail(): raise ValueError("why")
thread = threading.Thread(target=fail, name="tried"); thread.start(); thread.join()
"""
    text = output_of(program)
    assert " E kvstore.background background_died name=tried " in text
    assert text.endswith("  ValueError: why\n")


def test_a_client_leaves_the_logging_of_its_program_alone() -> None:
    program = """
import logging, sys
before = sys.stderr, sys.stdout, logging.getLogger().handlers[:], logging.getLogger().level
import kvstore.client.sync, kvstore.connectors.mooncake, kvstore.mooncake
from kvstore import Client
assert before == (sys.stderr, sys.stdout, logging.getLogger().handlers, logging.getLogger().level)
ours = [logger for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("kvstore") and isinstance(logger, logging.Logger)]
assert ours and not any(each.handlers or each.level or not each.propagate for each in ours)
"""
    assert output_of(program) == ""


def test_grpc_says_nothing_of_an_idle_connection() -> None:
    """Its C core would, to descriptor 2 of whatever program has a client."""
    program = """
import kvstore.client.sync
import time
from concurrent.futures import ThreadPoolExecutor
import grpc
server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.max_connection_idle_ms", 200)])
port = server.add_insecure_port("127.0.0.1:0")
server.start()
with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
    try:
        channel.unary_unary("/a/b")(b"", timeout=5)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    time.sleep(1.5)
server.stop(0).wait()
"""
    assert output_of(program) == ""


def record(text: str, *args: object, level: int = logging.INFO, **more: object) -> Any:
    made = logging.LogRecord("kvstore.test", level, "", 0, text, args, None)
    vars(made).update(more)
    return made


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_lines_of_one_kind_are_limited_and_others_are_not() -> None:
    clock = Clock()
    limit = RateLimit(clock)
    flood = [limit.filter(record("stranger peer=%s", number)) for number in range(3 * BURST)]
    assert flood == [True] * BURST + [False] * 2 * BURST
    assert limit.left_out == 2 * BURST
    assert limit.filter(record("other"))
    assert not limit.filter(record("stranger peer=%s", 1))
    clock.now += 10 / PER_S
    later = [record("stranger peer=%s", number) for number in range(11)]
    assert [limit.filter(each) for each in later] == [True] * 10 + [False]
    assert LineFormatter().format(later[0]).endswith(f"peer=0 left_out={2 * BURST + 1}")
    assert LineFormatter().format(later[1]).endswith("peer=1")


def test_what_a_user_has_asked_for_is_not_limited() -> None:
    limit = RateLimit(Clock())
    for number in range(2 * BURST):
        assert limit.filter(record("request id=%d", number, **EACH))
        assert limit.filter(record("detail", level=logging.DEBUG))
    assert limit.left_out == 0


def test_the_trace_makes_no_kind_of_its_own() -> None:
    from kvstore.master.traces import add_trace, tracing

    limit = RateLimit(Clock())
    made = [record("call_failed call=%s", "put") for _ in range(2 * BURST)]
    for number, each in enumerate(made):
        with tracing(f"{number:032x}"):
            assert add_trace(each)
        assert limit.filter(each) is (number < BURST)
    assert LineFormatter().format(made[9]).endswith(f"call_failed call=put trace={9:032x}")


FORGED = "x\n2026-11-25T00:00:00.000 C kvstore.master master_broken\r\x1b[2J\u202e\u2028y"


def test_a_text_of_a_peer_begins_no_line() -> None:
    line = LineFormatter().format(record("corrupt_object namespace=%s", FORGED))
    assert line.isprintable()
    assert "namespace=x\\n2026" in line


def test_a_text_of_a_peer_in_a_traceback_begins_no_line() -> None:
    try:
        raise ValueError(FORGED)
    except ValueError as error:
        made = record("internal error", exc_info=(type(error), error, error.__traceback__))
    first, *rest = LineFormatter().format(made).split("\n")
    assert first.endswith("internal error")
    assert all(line.startswith("  ") and line.isprintable() for line in rest)


def test_times_have_a_zone() -> None:
    made = record("node_joined")
    made.created = 1_795_747_371.1239
    when = LineFormatter().format(made).partition(" ")[0]
    assert re.fullmatch(r"2026-11-2\dT\d\d:\d\d:\d1\.123[+-]\d\d:\d\d", when)
    assert datetime.fromisoformat(when).timestamp() == pytest.approx(made.created, abs=0.001)


@pytest.mark.parametrize(
    ("form", "arguments", "fields"),
    [
        ("node_dead node=%s why=%s", ("a", "no beat for 6 s x=1"),
         {"event": "node_dead", "node": "a", "why": "no beat for 6 s x=1"}),
        ("told objects=%d seconds=%.2f resumed=%s", (3, 1.2345, True),
         {"event": "told", "objects": 3, "seconds": 1.23, "resumed": True}),
        ("event=data_refused what=%s peer=%s", ("token", ("h", 1)),
         {"event": "data_refused", "what": "token", "peer": "('h', 1)"}),
        ("http_served address=%s://%s", ("http", "h:1"),
         {"event": "http_served", "address": "http://h:1"}),
        ("%s id=%s reason=%s: status %d", ("render_failed", "r", "late", 503),
         {"event": "render_failed", "id": "r", "reason": "late"}),
        ("memory_on_loopback: give --host", (), {"event": "memory_on_loopback"}),
        ("unknown setting, ignored: %s", ("x",), {}),
        ("peer_said reason=%r at=100%% of=%s", ("it's", float("nan")),
         {"event": "peer_said", "reason": "it's", "of": "nan", "at": "100%"}),
    ],
)  # fmt: skip
def test_a_line_as_json(form: str, arguments: tuple[object, ...], fields: dict[str, Any]) -> None:
    made = record(form, *arguments, level=logging.WARNING)
    told = json.loads(JsonFormatter().format(made))
    assert datetime.fromisoformat(told.pop("time")).tzinfo is not None
    assert told.pop("level") == "warning"
    assert told.pop("logger") == "kvstore.test"
    assert told.pop("message") == made.getMessage()
    assert told == fields


def test_a_key_of_a_line_replaces_none_of_json() -> None:
    told = json.loads(JsonFormatter().format(record("late time=%s level=%s", "t", "l")))
    assert (told["event"], told["level"]) == ("late", "info")
    assert told["time"] != "t"


def test_a_line_of_json_is_one_line_whatever_is_in_it() -> None:
    long = "\U0001f600" * 100_000
    try:
        raise ValueError(FORGED + long)
    except ValueError as error:
        made = record("failed a=%s b=%s", FORGED, long, exc_info=sys.exc_info())
        del error
    line = JsonFormatter().format(made)
    assert line.isprintable()
    assert len(line) < PIECE_BYTES_MAX
    told = json.loads(line)
    assert told["a"] == FORGED
    assert told["exception"].startswith("Traceback")


def test_json_has_the_trace_and_what_was_left_out() -> None:
    told = json.loads(JsonFormatter().format(record("call_failed", trace="00ff", left_out=3)))
    assert (told["trace"], told["left_out"]) == ("00ff", 3)


def test_a_process_logs_json_and_so_do_its_children() -> None:
    program = """
import logging
from kvstore.process import logs
assert logs.form_in_use() == "text"
logs.configure("info", "json")
logging.getLogger("kvstore.test").info("started pid=%d", 7)
print(logs.form_in_use())
"""
    line, form = output_of(program).splitlines()
    assert json.loads(line)["pid"] == 7
    assert form == "json"


def test_a_long_text_is_cut() -> None:
    assert len(LineFormatter().format(record("%s", "x" * 1_000_000))) < TEXT_MAX + 100
