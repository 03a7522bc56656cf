"""A ``kvstore-node`` that knows the tests' fake GPU, and copies objects over tcp alone."""

from __future__ import annotations

from typing import Any

from kvstore.cli import node
from kvstore.client import repair
from kvstore.config import ClientConfig
from tests.support import fake_device


def over_tcp(**settings: Any) -> ClientConfig:
    settings["transports"] = ("tcp",)
    return ClientConfig(**settings)


if __name__ == "__main__":
    fake_device.add()
    repair.ClientConfig = over_tcp  # type: ignore[assignment, attr-defined]
    node.main()
