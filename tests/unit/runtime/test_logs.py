"""Output of our servers never blocks them, never fails, and shows what was left out."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest

from kvstore.runtime.json_logs import JsonFormatter
from kvstore.runtime.log_lines import PIECE_BYTES_MAX, LineFormatter
from kvstore.runtime.logs import BURST, PER_S, RateLimit

END_S = 20.0
"""For a program that ends at once, on a busy machine."""

FLOOD = """
import logging, sys, time
from kvstore.runtime import logs
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


def test_all_is_written_at_the_end_and_in_order() -> None:
    program = """
import logging
from kvstore.runtime import logs
logs.configure("info")
for number in range(300):
    print("printed", number)
    logging.getLogger("kvstore.test").info("logged %d", number, extra=logs.EACH)
"""
    lines = [" ".join(line.split()[-2:]) for line in output_of(program).splitlines()]
    assert lines == [f"{what} {number}" for number in range(300) for what in ("printed", "logged")]


def test_a_client_leaves_the_logging_of_its_program_alone() -> None:
    program = """
import logging, sys
before = sys.stderr, sys.stdout, logging.getLogger().handlers[:], logging.getLogger().level
import kvstore.client.client, kvstore.connectors.mooncake, kvstore.connectors.mooncake_shim
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
import kvstore.client.client
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


FORGED = "x\n2026-11-25T00:00:00.000 C kvstore.master master_broken\r\x1b[2J\u202e\u2028y"


def test_a_text_of_a_peer_begins_no_line() -> None:
    line = LineFormatter().format(record("corrupt_object namespace=%s", FORGED))
    assert line.isprintable()
    assert "namespace=x\\n2026" in line


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


def test_a_process_logs_json_and_so_do_its_children() -> None:
    program = """
import logging
from kvstore.runtime import logs
assert logs.form_in_use() == "text"
logs.configure("info", "json")
logging.getLogger("kvstore.test").info("started pid=%d", 7)
print(logs.form_in_use())
"""
    line, form = output_of(program).splitlines()
    assert json.loads(line)["pid"] == 7
    assert form == "json"
