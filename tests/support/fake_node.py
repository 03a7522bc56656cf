"""A ``kvstore-node`` that can pool the memory of the tests' fake GPU: ``--device fake:0``."""

from __future__ import annotations

from kvstore.cli import node
from tests.support import fake_device

if __name__ == "__main__":
    fake_device.add()
    node.main()
