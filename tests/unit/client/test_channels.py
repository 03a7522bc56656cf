"""Channels of a stub: one per master, replaced once it was idle."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from kvstore.client.calling.channels import Channels

ADDRESS = "127.0.0.1:1"

PROGRAM = """
import sys, threading
import grpc  # as a program that uses gRPC for itself
from concurrent.futures import ThreadPoolExecutor
from kvstore.client.calling.channels import Channels
from kvstore.clocks import uptime

server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.max_connection_idle_ms", 3_500)])
address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
server.start()
channels = Channels(idle_s=1.0)
seen = []
for _ in range(2):
    idle = threading.Event()
    with channels.lend(address, uptime() + 5) as lent:
        try:
            lent.channel.unary_unary("/a/b")(b"", timeout=5)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    seen.append(lent.channel)
    lent.channel.subscribe(
        lambda state: idle.set() if state is grpc.ChannelConnectivity.IDLE else None
    )
    assert idle.wait(10)
assert seen[0] is not seen[1]
channels.close()
server.stop(0).wait()
"""


@pytest.fixture
def now() -> list[float]:
    return [100.0]


@pytest.fixture
def channels(now: list[float]) -> Iterator[Channels]:
    made = Channels(idle_s=25.0, clock=lambda: now[0])
    yield made
    made.close()


def test_an_idle_channel_is_replaced_and_one_in_use_is_not(
    channels: Channels, now: list[float]
) -> None:
    with channels.lend(ADDRESS, 200.0) as first:
        now[0] += 30.0
        with channels.lend(ADDRESS, 200.0) as second:
            pass
    now[0] += 20.0
    with channels.lend(ADDRESS, 200.0) as third:
        pass
    assert first is second is third
    now[0] += 26.0
    with channels.lend(ADDRESS, 200.0) as fourth:
        assert fourth is not third
    ask: grpc.UnaryUnaryMultiCallable[bytes, bytes] = third.channel.unary_unary("/a/b")
    with pytest.raises(ValueError, match="closed"):
        ask(b"")


def test_grpc_says_nothing_of_idle_connections_in_a_program_that_imported_it_before() -> None:
    """A master would close them, which gRPC reports. kvstore cannot silence gRPC there."""
    outside = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True, text=True, timeout=60, check=False, env=outside,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
