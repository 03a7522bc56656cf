"""Streams between processes, as TCP gives them, over a network that misbehaves.

As in a real network, bytes of one direction arrive in order and once, or the stream breaks. Bytes
may take long. One direction between two hosts may be cut while the other works. Bytes sent before a
process closed its end or died still arrive. Bytes for a stalled process wait until it goes on. A
cut that outlasts ``SILENCE_US`` breaks the streams whose bytes it holds up. Bytes that are *held
back* are in the buffers of some kernel: they arrive, however late, even if their sender has closed
or died since. A sender that resets its end takes back what has not left its own buffer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.scheduler import MS, SECOND, Future, Process, Scheduler

HELD_US = 100 * MS
"""How often it is looked whether what is held back may go on."""

SILENCE_US = 2 * SECOND
"""Unacknowledged bytes for so long break a stream: ``network.stream`` has 10 s, and every time
of the simulation is a fifth of its default."""


class BrokenStreamError(Exception):
    """The other end closed, died, refused, or cannot be reached."""


@dataclass
class NetworkConditions:
    """How bad the network is. Delays are drawn evenly between their bounds."""

    delay_us: tuple[int, int] = (50, 600)
    slow: float = 0.01
    """Probability that a message takes ``slow_us`` instead."""
    slow_us: tuple[int, int] = (2_000, 120_000)
    very_slow: float = 0.0
    very_slow_us: tuple[int, int] = (300_000, 1_500_000)
    twice: float = 0.0
    """Probability that a request which may be sent again arrives twice."""


class _Close:
    """The last message of a direction."""


class End:
    """One end of a stream; belongs to a process."""

    def __init__(self, network: Network, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.peer: End = self
        self.closed = False
        """We closed it."""
        self.broken = False
        """It ended without us."""
        self.on_end: Callable[[], None] | None = None
        """Called when it breaks, or the peer has closed it."""
        self._network = network
        self._inbox: deque[Any] = deque()
        self._waiting: Future[Any] | None = None
        self.outgoing: deque[tuple[int, Any]] = deque()
        """(sent at, message), not arrived yet."""
        self.last_arrival_us = 0
        self.is_lost = False
        """Nothing that is sent from now on arrives: part of what was sent before did not."""
        self.writer = (0, 0)
        """At a data server: client and connection, as they say."""
        self.is_read = False
        """At a data server: a read is being answered."""
        self.is_written = False
        """At a data server: a write is arriving."""

    def send(self, message: Any) -> None:
        """Queue a message; like a socket's buffer, it says nothing about arrival.

        Raises BrokenStreamError.
        """
        if self.broken or self.closed:
            raise BrokenStreamError
        self._network.carry(self, message)

    async def receive(self, timeout_us: int | None = None) -> Any:
        """The next message.

        Raises:
            BrokenStreamError, TimedOutError
        """
        if not self._inbox:
            if self.broken or self.closed:
                raise BrokenStreamError
            self._waiting = Future()
            if timeout_us is None:
                await self._waiting
            else:
                await self.process.within(self._waiting, timeout_us)
        if not self._inbox:
            raise BrokenStreamError
        return self._inbox.popleft()

    def close(self) -> None:
        """What was sent still arrives; what comes is thrown away."""
        if not self.closed and not self.broken:
            self._network.carry(self, _Close())
        self.closed = True
        self.process.on_death.pop(self, None)
        self._inbox.clear()
        self._wake()

    def reset(self) -> None:
        """As ``close``; part of what was sent has left for the network, the rest never does."""
        self._network.take_back(self)
        self.close()

    def arrived(self, message: Any) -> None:
        """In the process: handled when it is not stalled."""
        if self.closed or self.broken:
            return
        if isinstance(message, _Close):
            self.break_()
            return
        self._inbox.append(message)
        self._wake()

    def break_(self) -> None:
        """Nothing more will come; what is in the inbox can still be read."""
        if self.broken:
            return
        self.broken = True
        self.process.on_death.pop(self, None)
        self._wake()
        if self.on_end is not None:
            self.on_end()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.set(None)
            self._waiting = None


Accept = Callable[[str, End], None]
"""Takes the far end of a new stream to a port."""


class Network:
    """All streams, and the cuts between hosts' processes."""

    def __init__(self, scheduler: Scheduler, weather: NetworkConditions) -> None:
        self.weather = weather
        self.streams: list[End] = []
        """The near ends of those that may still be open, oldest first."""
        self._scheduler = scheduler
        self._listeners: dict[str, tuple[Process, Accept]] = {}
        self._cuts: dict[tuple[str, str], int] = {}
        self._holds: dict[tuple[str, str], int] = {}

    def listen(self, address: str, process: Process, accept: Accept) -> None:
        """From now on streams to ``address`` go to this process."""
        self._listeners[address] = (process, accept)

    def connect(self, process: Process, address: str, port: str) -> End:
        """A stream to whoever listens there; refused, it breaks. Sending need not wait."""
        near = End(self, process, f"{process.name}>{address}")
        process.on_death[near] = near.close
        self.carry(near, (address, port))  # the first message makes the far end where it arrives
        self.streams.append(near)
        if len(self.streams) > 256:
            self.streams = [end for end in self.streams if not (end.broken or end.closed)]
        return near

    def duplicate(self, process: Process, address: str, port: str, message: Any) -> None:
        """Now and then, send this on a stream of its own, too; nobody waits for the answer."""
        if self._scheduler.random.random() < self.weather.twice:
            end = self.connect(process, address, port)
            end.send(message)

    def cut(self, source: str, target: str, until_us: int) -> None:
        """Nothing arrives from one process at another until then."""
        self._cuts[source, target] = max(until_us, self._cuts.get((source, target), 0))

    def hold_back(self, source: str, target: str, until_us: int) -> None:
        """What one process sends to another stays in buffers until then."""
        self._holds[source, target] = max(until_us, self._holds.get((source, target), 0))

    def heal(self) -> None:
        self._cuts.clear()
        self._holds.clear()

    def take_back(self, end: End) -> None:
        sent = len(end.outgoing) - (end.peer is end)  # what opens it has left
        for _ in range(self._scheduler.random.randint(0, max(0, sent))):
            end.outgoing.pop()

    def break_stream(self, near: End) -> None:
        """A random part of what is under way is lost, on both sides."""
        for end in {near: None, near.peer: None}:
            end.is_lost = True
            if end.outgoing:
                for _ in range(self._scheduler.random.randint(0, len(end.outgoing))):
                    end.outgoing.pop()
            self._break_soon(end)

    def carry(self, end: End, message: Any) -> None:
        if end.is_lost:
            return
        end.outgoing.append((self._scheduler.now_us, message))
        random, weather = self._scheduler.random, self.weather
        chance = random.random()
        if chance < weather.very_slow:
            delay_us = random.randint(*weather.very_slow_us)
        elif chance < weather.very_slow + weather.slow:
            delay_us = random.randint(*weather.slow_us)
        else:
            delay_us = random.randint(*weather.delay_us)
        end.last_arrival_us = max(end.last_arrival_us, self._scheduler.now_us + delay_us)
        self._pump_at(end, end.last_arrival_us)

    def _pump_at(self, end: End, when_us: int) -> None:
        delay_us = when_us - self._scheduler.now_us
        self._scheduler.after(delay_us, f"net {end.name}", lambda: self._pump(end))

    def _pump(self, end: End) -> None:
        """One message of this direction arrives, unless it is held up."""
        if not end.outgoing:
            return
        sent_us, message = end.outgoing[0]
        far = self._far_process(end, message)
        now_us = self._scheduler.now_us
        pair = end.process.name, far.name if far else ""
        if self._holds.get(pair, 0) > now_us:
            self._pump_at(end, now_us + HELD_US)
            return
        until_us = self._cuts.get(pair, 0)
        if until_us > now_us:
            give_up_us = sent_us + SILENCE_US
            if until_us > give_up_us:
                if now_us >= give_up_us:
                    end.outgoing.clear()
                    end.is_lost = True
                    self._break_soon(end)
                    if end.peer is not end:
                        self._break_soon(end.peer)
                    return
                until_us = give_up_us
            self._pump_at(end, until_us)
            return
        end.outgoing.popleft()
        if end.peer is end:
            self._open(end, message)
        elif end.peer.process.alive:
            receiver = end.peer
            receiver.process.enter(lambda: receiver.arrived(message))
        else:
            self._break_soon(end)

    def _far_process(self, end: End, message: Any) -> Process | None:
        if end.peer is not end:
            return end.peer.process
        listener = self._listeners.get(message[0]) if isinstance(message, tuple) else None
        return None if listener is None else listener[0]

    def _open(self, near: End, message: Any) -> None:
        address, port = message
        listener = self._listeners.get(address)
        if listener is None or not listener[0].alive:
            near.outgoing.clear()
            near.is_lost = True
            self._break_soon(near)
            return
        process, accept = listener
        far = End(self, process, f"{address}>{near.process.name}")
        near.peer, far.peer = far, near
        process.on_death[far] = far.close
        process.enter(lambda: accept(port, far))

    def _break_soon(self, end: End) -> None:
        delay_us = self._scheduler.random.randint(0, 2_000)
        end.process.after(delay_us, f"broken {end.name}", end.break_)
