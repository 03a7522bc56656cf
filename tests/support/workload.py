"""Clients at work while something breaks: what they were given, and how long it took."""

from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from kvstore import PutOutcome
from kvstore.errors import KVStoreError


def content(key: str, size: int = 100_000) -> bytes:
    """What this key holds, whoever puts it: so whoever gets it can tell wrong bytes."""
    block = hashlib.sha256(key.encode()).digest()
    return (block * (size // len(block) + 1))[:size]


class Worker:
    """Calls ``verb(number)`` again and again in a thread, and counts what comes of it.

    ``verb`` returns what to count ("right", "miss", ...) or raises; a typed error that may be
    tried again counts as its code, everything else ends the test.
    """

    def __init__(self, verb: Callable[[int], str], *, longest_s: float) -> None:
        self._verb = verb
        self._longest_s = longest_s
        self._stop = threading.Event()
        self._counted = threading.Condition()
        self.counts: dict[str, int] = {}
        self.failures: list[str] = []
        self._thread = threading.Thread(target=self._run, name="worker", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            started = time.monotonic()
            try:
                what = self._verb(number)
            except KVStoreError as error:
                what = error.code
                if not error.retriable:
                    self.failures.append(f"{number}: {error!r}")
            except BaseException as error:
                self.failures.append(f"{number}: {error!r}")
                what = "failed"
            took = time.monotonic() - started
            if took > self._longest_s:
                self.failures.append(f"{number}: {what} took {took:.1f} s")
            with self._counted:
                self.counts[what] = self.counts.get(what, 0) + 1
                self._counted.notify_all()
            if self.failures:
                return

    def wait_for(self, what: str, *, more: int = 1, within_s: float = 15.0) -> None:
        """Until that has come ``more`` times more from now on."""
        with self._counted:
            wanted = self.counts.get(what, 0) + more
            came = self._counted.wait_for(
                lambda: bool(self.failures) or self.counts.get(what, 0) >= wanted, within_s
            )
        assert not self.failures, self.failures
        assert came, f"no {what} within {within_s} s: {self.counts}"

    def finish(self) -> dict[str, int]:
        """Stop it; what it counted. Fails if anything did."""
        self._stop.set()
        self._thread.join(30)
        assert not self._thread.is_alive(), "a call does not return"
        assert not self.failures, self.failures
        return self.counts


@contextlib.contextmanager
def at_work(verb: Callable[[int], str], *, longest_s: float = 11.0) -> Iterator[Worker]:
    """A worker that is stopped, and whose failures are the test's."""
    worker = Worker(verb, longest_s=longest_s)
    try:
        yield worker
    finally:
        worker.finish()


def getter(client: Any, keys: list[str], **options: Any) -> Callable[[int], str]:
    """Gets one after the other: right, or a miss; wrong bytes are a failure."""

    def get(number: int) -> str:
        key = keys[number % len(keys)]
        value = client.get(key, **options)
        if value is None:
            return "miss"
        assert bytes(value) == content(key, len(value)), f"wrong bytes of {key}"
        return "right"

    return get


def putter(client: Any, prefix: str, **options: Any) -> Callable[[int], str]:
    """Puts one new key after the other; counts the outcome's name in lower case."""

    def put(number: int) -> str:
        key = f"{prefix}-{number}"
        return str(client.put(key, content(key), **options).name.lower())

    return put


def kill_while_used(
    reads: Any,
    writes: Any,
    keys: list[str],
    node: Any,
    start_again: Callable[[str], Any],
    *,
    longest_s: float,
) -> dict[str, int]:
    """Kills a node whose objects end with it, three times, while two clients use it: no call
    returns wrong bytes or hangs, and a new node of its name serves. What the reader counted."""
    everything = [(key, content(key)) for key in keys]
    assert set(writes.put_many(everything)) == {PutOutcome.STORED}
    with (
        at_work(getter(reads, keys), longest_s=longest_s) as reader,
        at_work(putter(writes, "new", wait_ms=200), longest_s=longest_s) as writer,
    ):
        for _ in range(3):
            reader.wait_for("right", more=30)
            writer.wait_for("stored", more=10)
            node.kill()
            reader.wait_for("miss", more=5)
            node = start_again(node.name)
            writer.wait_for("stored", more=5)
            assert set(reads.put_many(everything)) <= {PutOutcome.STORED, PutOutcome.FOUND}
    return reader.counts
