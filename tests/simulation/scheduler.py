"""Virtual time: a seeded queue of events, processes that stop and die, tasks that wait.

Nothing here sleeps. ``Scheduler.step`` takes the next event, moves the clock to it and runs it;
the same seed gives the same events in the same order, which ``digest`` proves.

A *process* owns tasks (coroutines that await ``Future``). It can be stalled, as by SIGSTOP: its
events wait, in order, until it goes on. Or it can be killed: its tasks end where they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Generator
from heapq import heappop, heappush
from random import Random
from typing import Any, Generic, TypeVar

from xxhash import xxh3_64

from kvstore.errors import KVStoreError

ResultT = TypeVar("ResultT")
Action = Callable[[], None]

MS = 1_000
SECOND = 1_000_000
"""Virtual time is counted in integer microseconds."""

STORY_LINES = 50_000


class Event:
    """Something that will happen; ``cancel`` takes it back."""

    __slots__ = ("action", "label")

    def __init__(self, label: str, action: Action | None) -> None:
        self.label = label
        self.action = action

    def cancel(self) -> None:
        self.action = None


class Scheduler:
    """The clock, the queue, the one source of randomness, and the story of what happened."""

    def __init__(self, seed: int) -> None:
        self.now_us = 0
        self.steps = 0
        self.random = Random(seed)
        self.story: deque[tuple[int, int, str]] = deque(maxlen=STORY_LINES)
        """(step, time, what), the last of them."""
        self._queue: list[tuple[int, int, Event]] = []
        self._sequence = 0
        self._digest = xxh3_64()

    def after(self, delay_us: int, label: str, action: Action) -> Event:
        event = Event(label, action)
        self._sequence += 1
        heappush(self._queue, (self.now_us + max(0, delay_us), self._sequence, event))
        return event

    def step(self) -> bool:
        """Run the next event; False: nothing will ever happen again."""
        while self._queue:
            when_us, _, event = heappop(self._queue)
            if event.action is None:
                continue
            self.now_us = when_us
            self.steps += 1
            self._digest.update(f"{when_us} {event.label}\n".encode())
            event.action()
            return True
        return False

    def note(self, text: str) -> None:
        """One line of the story. It is part of the digest, so determinism covers it."""
        self._digest.update(text.encode())
        self.story.append((self.steps, self.now_us, text))

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


class TimedOutError(Exception):
    """What was waited for did not come in time."""


class Future(Generic[ResultT]):
    """A result that one task, or several, wait for."""

    __slots__ = ("_error", "_result", "_then", "done")

    def __init__(self) -> None:
        self.done = False
        self._result: ResultT | None = None
        self._error: BaseException | None = None
        self._then: list[Action] = []

    def set(self, result: ResultT) -> None:
        if not self.done:
            self._result = result
            self._finish()

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self._error = error
            self._finish()

    def then(self, action: Action) -> None:
        if self.done:
            action()
        else:
            self._then.append(action)

    def result(self) -> ResultT:
        """Of one that is done; raises its error."""
        assert self.done
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]  # set, perhaps to None

    def __await__(self) -> Generator[Future[Any], None, ResultT]:
        if not self.done:
            yield self
        return self.result()

    def _finish(self) -> None:
        self.done = True
        actions, self._then = self._then, []
        for action in actions:
            action()


class Task(Generic[ResultT]):
    """A coroutine of one process. An error that is no ``KVStoreError`` ends the simulation."""

    def __init__(
        self, process: Process, name: str, coroutine: Coroutine[Any, Any, ResultT]
    ) -> None:
        self.result: Future[ResultT] = Future()
        self._process = process
        self._label = f"{process.name}/{name}"
        self._coroutine = coroutine
        self._step()

    @property
    def ended(self) -> bool:
        return self.result.done

    def cancel(self) -> None:
        """End it where it waits; nobody is told."""
        if not self.result.done:
            self.result.done = True
            self._coroutine.close()
        self._process.tasks.pop(self, None)

    def _step(self) -> None:
        if self.result.done:
            return
        try:
            awaited: Future[Any] = self._coroutine.send(None)
        except StopIteration as stop:
            self._process.tasks.pop(self, None)
            self.result.set(stop.value)
        except KVStoreError as error:
            self._process.tasks.pop(self, None)
            self.result.fail(error)
        else:
            awaited.then(self._go_on)

    def _go_on(self) -> None:
        self._process.after(0, self._label, self._step)


class Process:
    """Somebody that acts: a client, a node, a master. Its tasks see only virtual time."""

    def __init__(self, scheduler: Scheduler, name: str, host: str) -> None:
        self.scheduler = scheduler
        self.name = name
        self.host = host
        self.alive = True
        self.stalled = False
        self.tasks: dict[Task[Any], None] = {}
        self.on_death: dict[object, Action] = {}
        """What the operating system does when this process is gone."""
        self.dies_at: Callable[[str], bool] = lambda step: False
        """Asked at each step that has a name whether the process dies there."""
        self._backlog: list[Action] = []

    async def reached(self, step: str) -> None:
        """A task of ours has come to the step of that name."""
        if self.dies_at(step):
            self.scheduler.after(0, f"{self.name} dies", self.kill)
            await Future()  # for ever

    def after(self, delay_us: int, label: str, action: Action) -> Event:
        """An event of this process: it waits while the process is stalled."""
        return self.scheduler.after(delay_us, label, lambda: self.enter(action))

    def enter(self, action: Action) -> None:
        if not self.alive:
            return
        if self.stalled:
            self._backlog.append(action)
        else:
            action()

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, ResultT]) -> Task[ResultT]:
        if not self.alive:
            coroutine.close()
        task = Task(self, name, coroutine)
        if not task.ended:
            self.tasks[task] = None
        return task

    async def sleep(self, delay_us: int) -> None:
        slept: Future[None] = Future()
        self.after(delay_us, f"{self.name}/wake", lambda: slept.set(None))
        await slept

    async def within(self, future: Future[ResultT], timeout_us: int) -> ResultT:
        """Raises TimedOutError."""
        timer = self.after(timeout_us, f"{self.name}/timeout", lambda: future.fail(TimedOutError()))
        try:
            return await future
        finally:
            timer.cancel()

    def stall(self) -> None:
        self.stalled = True

    def resume(self) -> None:
        """What came meanwhile happens now, in its order."""
        self.stalled = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.enter(action)

    def kill(self) -> None:
        if not self.alive:
            return
        self.alive = False
        self._backlog = []
        for task in list(self.tasks):
            task.cancel()
        for action in list(self.on_death.values()):
            action()
