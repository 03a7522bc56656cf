"""A lane's connection within TLS: each call ends as ``Steps.exchange`` would end it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore.auth.credentials import MASTER_NAME, NODE_NAME
from kvstore.client.calling.tls import TlsWire
from kvstore.clocks import uptime
from kvstore.limits import FRAME_BYTES_MAX
from kvstore.native import kinds
from kvstore.network.stream import EndedError
from kvstore.network.tls_memory import TlsError
from kvstore.network.tls_stream import TlsStream
from kvstore.wire.frames import CALL, ERROR, REPLY, frame
from tests.support.encryption import shared_ends
from tests.support.identities import ENGINE, MASTER

REQUEST = frame(5, CALL, b"Exists", b"k" * 40)
GREETING = frame(0, CALL, b"", b"hello")


def soon(seconds: float = 10.0) -> float:
    return uptime() + seconds


class Master:
    """The other end, in a thread: does ``script`` once it is greeted."""

    def __init__(self, script: Callable[[TlsStream], object]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.sock = socket.create_connection(listener.getsockname())
            theirs = listener.accept()[0]
        self._stream = TlsStream(theirs, shared_ends().credentials(MASTER).server())
        self._script = script
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with contextlib.suppress(TlsError, EndedError, ConnectionError):
            self._stream.begin(soon())
            self.hear(GREETING)
            self._stream.send([frame(0, REPLY, b"", b"")], soon())
            self._script(self._stream)
        self._stream.close()

    def hear(self, expected: bytes) -> None:
        heard = bytearray(len(expected))
        self._stream.receive([memoryview(heard)], soon())
        assert heard == expected

    def end(self) -> None:
        self._stream.shutdown()
        self._thread.join(10)
        assert not self._thread.is_alive()


@contextlib.contextmanager
def greeted(script: Callable[[TlsStream], object]) -> Iterator[TlsWire]:
    master = Master(script)
    wire = TlsWire(master.sock, shared_ends().credentials(ENGINE).client(), MASTER_NAME)
    try:
        wire.begin(soon())
        assert wire.greet(GREETING, soon()) == (0, REPLY, b"", b"")
        yield wire
    finally:
        wire.close()
        master.end()


def heard(stream: TlsStream) -> None:
    request = bytearray(len(REQUEST))
    stream.receive([memoryview(request)], soon())
    assert request == REQUEST


def exchange(wire: TlsWire, timeout_s: float = 10.0, spin_s: float = 0.0, **more: Any) -> Any:
    most = more.get("length_max", FRAME_BYTES_MAX)
    return wire.exchange(REQUEST, 5, spin_s, soon(timeout_s), most)


@pytest.mark.parametrize("size", [0, 100, 16 << 10, 1_000_000])
def test_calls_are_answered(size: int) -> None:
    payload = b"p" * size

    def script(stream: TlsStream) -> None:
        for _ in range(3):
            heard(stream)
            whole = frame(5, REPLY, b"", payload)
            stream.send([whole[:9]], soon())
            stream.send([whole[9:]], soon())

    with greeted(script) as wire:
        for _ in range(3):
            assert exchange(wire, spin_s=0.01)[::2] == (kinds.ANSWERED, REPLY)


def test_a_large_request_arrives() -> None:
    whole = frame(5, CALL, b"Exists", b"k" * 3_000_000)

    def script(stream: TlsStream) -> None:
        request = bytearray(len(whole))
        stream.receive([memoryview(request)], soon())
        stream.send([frame(5, REPLY, b"", b"same" if request == whole else b"other")], soon())

    with greeted(script) as wire:
        answer = wire.exchange(whole, 5, 0.0, soon(), FRAME_BYTES_MAX)
        assert answer == (kinds.ANSWERED, 0, REPLY, b"same")


@pytest.mark.parametrize(
    ("said", "ends_as"),
    [
        (frame(6, REPLY, b"", b"x"), kinds.GARBLED),
        (frame(5, REPLY, b"name", b"x"), kinds.GARBLED),
        (frame(5, REPLY, b"", b"x") * 2, kinds.GARBLED),
        (frame(5, REPLY, b"", b"x" * 2_000), kinds.GARBLED),
        (b"\0" * 14, kinds.GARBLED),
        (frame(5, REPLY, b"", b"x" * 10)[:20], kinds.ENDED),
        (b"", kinds.ENDED),
    ],
)
def test_what_is_no_answer(said: bytes, ends_as: int) -> None:
    def script(stream: TlsStream) -> None:
        heard(stream)
        if said:
            stream.send([said], soon())

    with greeted(script) as wire:
        assert exchange(wire, length_max=1_000)[0] == ends_as


def test_an_error_for_another_call_can_be_read() -> None:
    def script(stream: TlsStream) -> None:
        heard(stream)
        stream.send([frame(0, ERROR, b"", b"why")], soon())

    with greeted(script) as wire:
        assert exchange(wire) == (kinds.GARBLED, 0, ERROR, b"why")


def test_an_end_before_the_call_is_told_from_one_after_it() -> None:
    over = threading.Event()

    def script(stream: TlsStream) -> None:
        stream.close()
        over.set()

    with greeted(script) as wire:
        assert over.wait(10)
        assert exchange(wire)[0] == kinds.UNASKED


def test_bytes_before_the_call_are_noticed() -> None:
    said = threading.Event()

    def script(stream: TlsStream) -> None:
        stream.send([b"unasked"], soon())
        said.set()
        heard(stream)

    with greeted(script) as wire:
        assert said.wait(10)
        assert exchange(wire)[0] == kinds.UNASKED


def test_a_master_that_is_silent() -> None:
    asked, over = threading.Event(), threading.Event()

    def script(stream: TlsStream) -> None:
        heard(stream)
        asked.set()
        over.wait(10)

    with greeted(script) as wire:
        assert exchange(wire, 0.05)[0] == kinds.TIMED_OUT
        assert asked.wait(10)
        over.set()


def test_a_call_is_interrupted() -> None:
    def script(stream: TlsStream) -> None:
        heard(stream)
        wire.shutdown(socket.SHUT_RDWR)

    with greeted(script) as wire:
        assert exchange(wire)[0] == kinds.ENDED


def test_changed_bytes_are_no_answer() -> None:
    def script(stream: TlsStream) -> None:
        heard(stream)
        stream._sock.sendall(b"\x17\x03\x03\x00\x20" + b"x" * 32)

    with greeted(script) as wire:
        assert exchange(wire)[0] == kinds.BROKEN


def test_one_that_is_no_master_gets_no_frame() -> None:
    heard_some: list[str] = []
    master = Master(lambda stream: heard_some.append("a frame"))
    wire = TlsWire(master.sock, shared_ends().credentials(ENGINE).client(), NODE_NAME)
    with pytest.raises(TlsError, match="mismatch"):
        wire.begin(soon())
    wire.close()
    master.end()
    assert heard_some == []


def test_a_handshake_has_a_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        sock = socket.create_connection(silent.getsockname())
        wire = TlsWire(sock, shared_ends().credentials(ENGINE).client(), MASTER_NAME)
        with pytest.raises(TimeoutError):
            wire.begin(soon(0.05))
        wire.close()
