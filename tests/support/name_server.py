"""A name server for tests: every name in ``.test`` is this host; it has no other.

In a network namespace whose ``/etc/resolv.conf`` says ``nameserver 127.0.0.53``. As a program it
serves until it is killed; stopped, it is a name server that takes questions and answers none.

    python tests/support/name_server.py
"""

from __future__ import annotations

import socket
import threading
from typing import Final

ADDRESS: Final = "127.0.0.53"
HERE: Final = "127.0.0.1"

_FOUND, _NO_SUCH_NAME = b"\x81\x80", b"\x81\x83"


class NameServer:
    def __init__(self) -> None:
        self.muted = threading.Event()
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((ADDRESS, 53))

    def serve(self) -> None:
        """Never returns."""
        while True:
            question, asker = self._socket.recvfrom(2_048)
            if not self.muted.is_set():
                self._socket.sendto(_answer(question), asker)


def _answer(question: bytes) -> bytes:
    end = 12
    while question[end]:
        end += 1 + question[end]
    asked = question[12 : end + 5]
    is_there = asked[: end - 12].endswith(b"\4test")
    is_a = question[end + 2] == 1
    counts = b"\0\1" + (b"\0\1" if is_there and is_a else b"\0\0") + bytes(4)
    row = b"\xc0\x0c\0\1\0\1" + bytes(4) + b"\0\4" + socket.inet_aton(HERE)
    head = question[:2] + (_FOUND if is_there else _NO_SUCH_NAME) + counts
    return head + asked + (row if is_there and is_a else b"")


if __name__ == "__main__":
    NameServer().serve()
