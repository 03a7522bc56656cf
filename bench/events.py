"""Measures what events cost a master, and how fast a reader gets them: ``python -m bench.events``.

Two stores run at the same time, one with events and a reader of all events, one without. Each gets
the same puts and removals in turn. The cost is the processor time of the masters' own processes,
without the children that serve HTTP.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from pathlib import Path
from typing import Final

import click

from kvstore.bench.ours import own_master
from kvstore.client.sync import Client
from kvstore.demo.processes import free_port
from kvstore.process import interpreter

OBJECTS: Final = 4_096
"""Objects that one call puts or removes."""


def _processor_s(pid: int) -> float:
    """Processor time of that process alone, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class _EventStore:
    def __init__(self, stack: contextlib.ExitStack, *more: str) -> None:
        self.http = free_port()
        flags = "--memory", "512MiB", "--lease-ms", "1000", "--http-port", str(self.http)
        address, self.pid = stack.enter_context(own_master(*flags, *more))
        self.client = stack.enter_context(Client(address, namespace="bench/p0t0"))
        self.put_s = self.removed_s = 0.0

    def turn(self, number: int) -> None:
        names = [b"%032d" % (number * OBJECTS + index) for index in range(OBJECTS)]
        started = _processor_s(self.pid)
        self.client.put_many([(name, b"") for name in names])
        put = _processor_s(self.pid)
        self.client.remove_many(names)
        self.put_s += put - started
        self.removed_s += _processor_s(self.pid) - put


_READER: Final = """
import sys, time
from kvstore.web.events.following import follow
count = 0
for told in follow([sys.argv[1]]):
    if told.name == "whole":
        print("ready", flush=True)
    elif told.name in ("stored", "removed"):
        count += 1
        if count == int(sys.argv[2]):
            break
    else:
        assert count == 0, told
print("done", flush=True)
"""


@click.command()
@click.option("--rounds", default=60)
def main(rounds: int) -> None:
    """Measure what events cost."""
    with contextlib.ExitStack() as stack:
        off, on = _EventStore(stack), _EventStore(stack, "--events", "on")
        time.sleep(2)  # the children start
        for number in range(4):  # opens connections, maps segments
            off.turn(number)
            on.turn(number)
        off.put_s = on.put_s = off.removed_s = on.removed_s = 0.0
        reader = subprocess.Popen(
            interpreter.command("-c", _READER, f"127.0.0.1:{on.http}", str(rounds * 2 * OBJECTS)),
            env=interpreter.environment(),
            stdout=subprocess.PIPE,
        )
        stack.enter_context(reader)
        stack.callback(reader.kill)
        assert reader.stdout is not None
        assert reader.stdout.readline() == b"ready\n"
        took = 0.0
        for number in range(4, 4 + rounds):
            off.turn(number)
            started = time.monotonic()
            on.turn(number)
            took += time.monotonic() - started
        behind = time.monotonic()
        assert reader.stdout.readline() == b"done\n"
        reader.wait()
        behind = time.monotonic() - behind
    count = rounds * OBJECTS
    for what, cost in (
        ("put", (off.put_s, on.put_s)),
        ("removal", (off.removed_s, on.removed_s)),
    ):
        without, with_ = (each / count * 1e6 for each in cost)
        click.echo(f"{what}: {without:.2f} us of the master without events, {with_:.2f} us with")
    click.echo(
        f"{2 * count} events at {2 * count / took:,.0f} a second; all read {behind:.2f} s later"
    )


if __name__ == "__main__":
    main()
