"""A workload's client: every call is timed, checked and written to the journal.

Workloads are coroutines, so that one text serves ``Client`` (whose calls block the workload's own
loop) and ``AsyncClient``. A call that raises anything but a typed error, or that takes longer than
its deadline allows, is a violation, whatever was broken meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvstore import AsyncClient, Client
from kvstore.errors import (
    BufferMismatchError,
    InternalError,
    KVStoreError,
    ProtocolError,
    ReservationLostError,
    ValueTooLargeError,
)
from tests.soak import values
from tests.soak.journal import Journal

LATE_S: Final = 4.0
"""What a call may take longer than its time-out on a host whose processors are all busy."""

HANGS_S: Final = 20.0
"""After so much more it is said to hang, and the process is ended."""

KEPT_S: Final = 12.0
"""How long a mapping or connection of a segment that is gone may be kept by a client at work."""

EXPECTED: Final = (ReservationLostError, ValueTooLargeError, BufferMismatchError)
"""Errors that are not worth trying again, and follow from what the workload does."""


class Settings(NamedTuple):
    """Of a worker, as ``__main__`` gives them."""

    role: str
    master: str
    worker: int
    seed: int
    directory: Path
    timeout_ms: int


class Result(NamedTuple):
    """Of one call."""

    ok: bool
    value: Any
    began: float
    ended: float
    error: BaseException | None = None


class Clock:
    """Notices when this process stood still, and whatever does not return."""

    def __init__(self, journal: Journal, *, views: bool) -> None:
        self.journal = journal
        self._gaps: list[tuple[float, float]] = []
        self._calls: dict[int, tuple[str, float, float]] = {}
        self._lock = threading.Lock()
        self._next = 0
        self._over = threading.Event()
        self._parent = os.getppid()
        self._kept: dict[str, float] = {}
        self._told: set[str] = set()
        self._views = views
        self.worked = 0
        """Calls that went well."""
        self._thread = threading.Thread(target=self._run, name="soak-clock", daemon=True)
        self._thread.start()

    def begin(self, verb: str, limit_s: float) -> int:
        with self._lock:
            self._next += 1
            self._calls[self._next] = (verb, time.monotonic(), limit_s)
            return self._next

    def end(self, call: int) -> None:
        verb, began, limit_s = self._calls.pop(call)
        ended = time.monotonic()
        if ended - began <= limit_s + LATE_S:
            return
        time.sleep(0.3)  # the other thread may not have seen yet that all stood still
        took = ended - began - self.stood_still(began, ended)
        if took > limit_s + LATE_S:
            self.journal.broke("late", f"{verb} took {took:.1f} s, {limit_s:.1f} s were allowed")

    def stood_still(self, since: float, until: float) -> float:
        with self._lock:
            return sum(max(0.0, min(b, until) - max(a, since)) for a, b in self._gaps)

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        last, looked = time.monotonic(), 0.0
        while not self._over.wait(0.05):
            now = time.monotonic()
            if now - last > 0.4:
                with self._lock:
                    self._gaps.append((last, now))
                self._kept.clear()
            last = now
            for verb, began, limit_s in list(self._calls.values()):
                took = now - began - self.stood_still(began, now)
                if took > limit_s + LATE_S + HANGS_S:
                    self._hangs(verb, took)
            if now - looked >= 1.0:
                looked = now
                self._look_at_what_is_kept(now)
                self.journal.flush()
                if os.getppid() != self._parent:
                    os._exit(9)  # whoever started us was killed

    def _hangs(self, verb: str, took: float) -> None:
        stacks = "\n".join(
            f"--- {number}\n" + "".join(traceback.format_stack(frame))
            for number, frame in sys._current_frames().items()
        )
        self.journal.broke("hangs", f"{verb} has not returned for {took:.1f} s\n{stacks}")
        self.journal.flush()
        os._exit(8)

    def _look_at_what_is_kept(self, now: float) -> None:
        """A process at work gives back what is of segments that are gone."""
        if self._views:
            return
        held = gone_mappings() | closing_sockets()
        self._kept = {what: self._kept.get(what, now) for what in held}
        for what, since in self._kept.items():
            if now - since > KEPT_S and self.worked and what not in self._told:
                self._told.add(what)
                gc.collect()
                how = "still" if what in gone_mappings() | closing_sockets() else "not"
                self.journal.broke(
                    "kept", f"{what} for {now - since:.0f} s, {how} there after a collection"
                )


def gone_mappings() -> set[str]:
    """Segments that are mapped here, and have no name any more."""
    found = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if "/kvstore." in line and line.rstrip().endswith("(deleted)"):
                fields = line.split(maxsplit=5)
                found.add(f"the mapping of {fields[5].strip()} (inode {fields[4]})")
    return found


def closing_sockets() -> set[str]:
    """Connections of this process that the peer has closed."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    with open("/proc/self/net/tcp", encoding="ascii") as lines:
        for line in lines:
            fields = line.split()
            if fields[3] == "08" and fields[9] in inodes:
                port = int(fields[2].rpartition(":")[2], 16)
                found.add(f"a connection to port {port} (inode {fields[9]}) that its peer closed")
    return found


class RecordingClient:
    """A client and what is done with it. For one task, or one thread."""

    def __init__(
        self, client: Client | AsyncClient, settings: Settings, journal: Journal, clock: Clock,
        rng: random.Random,
    ) -> None:  # fmt: skip
        self.client: Any = client
        self.settings = settings
        self.journal = journal
        self.clock = clock
        self.rng = rng
        self.limit_s = client.config.timeout_ms / 1000
        self.prefix = "async " if isinstance(client, AsyncClient) else ""

    async def call(
        self, verb: str, *args: Any, limit_s: float | None = None, cancel_s: float | None = None,
        expected: tuple[type[KVStoreError], ...] = (), **named: Any,
    ) -> Result:  # fmt: skip
        """One call of the client's verb.

        Args:
            limit_s: instead of the client's time-out.
            cancel_s: cancelled after so long, if it is async.
            expected: errors that follow from what the workload does.
        """
        began = time.monotonic()
        watched = self.clock.begin(self.prefix + verb, limit_s or self.limit_s)
        error: BaseException | None = None
        value: Any = None
        outcome = "ok"
        try:
            value = await self._done(verb, cancel_s, *args, **named)
            self.clock.worked += 1
        except KVStoreError as caught:
            error, outcome = caught, caught.code
            if isinstance(caught, (InternalError, ProtocolError)) or (
                not caught.retriable and not isinstance(caught, (*EXPECTED, *expected))
            ):
                self._broke("wrong_error", verb, caught)
        except asyncio.CancelledError as caught:
            error, outcome = caught, "cancelled"
        except Exception as caught:
            error, outcome = caught, "untyped"
            self._broke("untyped_error", verb, caught)
        finally:
            self.clock.end(watched)
        if error is not None:
            error = error.with_traceback(None)  # frames hold buffers
        self.journal.count(self.prefix + verb, outcome)
        return Result(error is None, value, began, time.monotonic(), error)

    async def _done(self, verb: str, cancel_s: float | None, *args: Any, **named: Any) -> Any:
        done = getattr(self.client, verb)(*args, **named)
        if inspect.isawaitable(done):
            if cancel_s is None:
                return await done
            task = asyncio.ensure_future(done)
            await asyncio.sleep(cancel_s)
            task.cancel()
            return await task
        if inspect.isasyncgen(done):
            return [row async for row in done]
        if inspect.isgenerator(done):
            return list(done)
        return done

    def _broke(self, rule: str, verb: str, error: Exception) -> None:
        where = "".join(traceback.format_exception(error)[-4:])
        self.journal.broke(rule, f"{self.prefix}{verb}: {error!r}\n{where}")

    # --- verbs whose answers are judged -------------------------------------------------------

    async def put(
        self, namespace: str, sizes: dict[bytes, int], *, verb: str = "put",
        overwrite: bool = False, cancel_s: float | None = None, **named: Any,
    ) -> dict[bytes, int]:  # fmt: skip
        """Values of these sizes; the versions of those that were stored."""
        rows = [(key, self.journal.version()) for key in sizes]
        data = [self._value(namespace, key, version, sizes[key]) for key, version in rows]
        self.journal.puts(namespace, rows, overwrite)
        named |= {"namespace": namespace, "cancel_s": cancel_s}
        if verb != "put_chain":
            named["overwrite"] = overwrite
        keys = list(sizes)
        if verb == "put":
            done = await self.call(verb, keys[0], data[0], **named)
            outcomes = [done.value]
        elif verb == "put_many":
            done = await self.call(verb, list(zip(keys, data, strict=True)), **named)
            outcomes = done.value
        else:
            done = await self.call(verb, keys, data, **named)
            outcomes = done.value
        versions = [version for _, version in rows]
        if not done.ok:
            self.journal.done(versions, ["error"] * len(rows))
            return {}
        names = [str(outcome.name).lower() for outcome in outcomes]
        self.journal.done(versions, names)
        for name in names:
            self.journal.count(self.prefix + verb, name)
        return {
            key: version
            for (key, version), name in zip(rows, names, strict=True)
            if name == "stored"
        }

    def _value(self, namespace: str, key: bytes, version: int, size: int) -> Any:
        made = values.make(namespace, key, version, self.settings.seed, size)
        return made.tobytes() if version % 3 == 0 else made

    def judge(
        self, namespace: str, key: bytes, data: Any, done: Result, verb: str, *, flips: bool = False
    ) -> int:
        """A value that was returned; its version. ``flips``: one inverted byte is allowed, where
        payloads are not verified."""
        seen = values.look(namespace, key, data)
        if seen.problem and not (flips and seen.flipped):
            self.journal.broke(
                seen.problem, f"{self.prefix}{verb} of {namespace}/{key.hex()}: {seen.detail} "
                f"(version {seen.version:x}, {done.began:.3f} to {done.ended:.3f})",
            )  # fmt: skip
            return 0
        self.journal.got(namespace, key, seen.version, done.began, done.ended, verb)
        return seen.version

    async def get(self, namespace: str, keys: Sequence[bytes], *, many: bool = False) -> int:
        """By ``get`` or ``get_many``; how many were there."""
        if many:
            done = await self.call("get_many", keys, namespace=namespace)
            found = done.value or []
        else:
            done = await self.call("get", keys[0], namespace=namespace)
            found = [done.value]
        verb = "get_many" if many else "get"
        if not done.ok:
            return 0
        hits = 0
        for key, value in zip(keys, found, strict=True):
            self.journal.count(self.prefix + verb, "miss" if value is None else "hit")
            if value is not None:
                hits += 1
                self.judge(namespace, key, value, done, verb)
        return hits

    async def get_into(
        self, namespace: str, keys: Sequence[bytes], room: int, *, cancel_s: float | None = None
    ) -> None:
        """Into buffers that are larger than some values, watched after the call has ended."""
        numbers = [self.rng.randrange(200) for _ in keys]
        buffers = [values_room(room) for _ in keys]
        for buffer, number in zip(buffers, numbers, strict=True):
            values.canary(buffer, number)
        done = await self.call("get_into", keys, buffers, namespace=namespace, cancel_s=cancel_s)
        if done.ok:
            rows = zip(keys, buffers, numbers, done.value, strict=True)
            for key, buffer, number, size in rows:
                self.journal.count(self.prefix + "get_into", "miss" if size is None else "hit")
                if size is not None:
                    self._judge_into(namespace, key, buffer, size, number, done)
        for buffer in buffers:
            values.canary(buffer, 201)
        await self.rest(0.03 if done.ok else 0.15)
        for buffer in buffers:
            if changed := values.touched(buffer, 201):
                how = type(done.error).__name__ if done.error else "a good end"
                self.journal.broke(
                    "buffer_touched", f"{self.prefix}get_into of {len(keys)} keys, after {how}, "
                    f"call {done.began:.3f} to {done.ended:.3f}: {changed}",
                )  # fmt: skip

    def _judge_into(self, namespace: str, key: bytes, buffer: Any, size: int, number: int,
                    done: Result) -> None:  # fmt: skip
        if self.judge(namespace, key, buffer[:size], done, "get_into") and values.touched(
            buffer[size:], number
        ):
            # Allowed: a longer version was read first, and thrown away.
            self.journal.count(self.prefix + "get_into", "a longer one before")

    async def remove(
        self, namespace: str, keys: Sequence[bytes], *, cancel_s: float | None = None
    ) -> bool:
        """By ``remove`` or ``remove_many``; whether it was acknowledged."""
        if len(keys) == 1:
            done = await self.call("remove", keys[0], namespace=namespace, cancel_s=cancel_s)
        else:
            done = await self.call("remove_many", keys, namespace=namespace, cancel_s=cancel_s)
        if done.ok:
            self.journal.gone(namespace, list(keys), done.began, done.ended, "removed")
        return done.ok

    async def clear(self, namespace: str) -> bool:
        done = await self.call("clear", namespace, limit_s=10 * self.limit_s)
        if done.ok:
            self.journal.gone(namespace, [None], done.began, done.ended, "cleared")
        return done.ok

    async def exists(self, namespace: str, keys: Sequence[bytes]) -> None:
        if len(keys) == 1:
            done = await self.call("exists", keys[0], namespace=namespace)
            found = [done.value]
        else:
            done = await self.call("exists_many", keys, namespace=namespace)
            found = done.value
        if done.ok:
            there = [key for key, is_there in zip(keys, found, strict=True) if is_there]
            self.journal.there(namespace, there, done.began, done.ended, "exists")

    async def stat(self, namespace: str, key: bytes) -> None:
        done = await self.call("stat", key, namespace=namespace)
        if done.ok and done.value is not None:
            self.journal.there(namespace, [key], done.began, done.ended, "stat")

    async def match(self, namespace: str, keys: Sequence[bytes]) -> int:
        done = await self.call("match_prefix", keys, namespace=namespace)
        if not done.ok:
            return 0
        there = list(keys[: done.value])
        self.journal.there(namespace, there, done.began, done.ended, "match_prefix")
        return int(done.value)

    async def list_objects(self, namespace: str, prefix: bytes) -> None:
        limit_s = 5 * self.limit_s
        await self.call("list_objects", limit_s=limit_s, namespace=namespace, prefix=prefix)

    async def rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def values_room(size: int) -> Any:
    import numpy as np

    return np.empty(size, np.uint8)
