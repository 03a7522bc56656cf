"""Objects as bytes and descriptors, for copies of them outside the store. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstore.calls import PutOutcome
from kvstore.client.flows.read_objects import read
from kvstore.client.flows.read_targets import NewMemory
from kvstore.client.flows.write_objects import Items, write
from kvstore.limits import Key

if TYPE_CHECKING:
    from kvstore import Client


class RawObject(NamedTuple):
    key: Key
    descriptor: bytes
    payload: memoryview


def get_raw(client: Client, namespace: str, keys: Sequence[Key]) -> list[RawObject]:
    """Return those of the objects that exist, verified as by ``Client.get``."""
    targets = NewMemory(keys)
    client._run(read(client._context, client._namespace(namespace), targets))
    return [
        RawObject(key, descriptor, memoryview(payload))  # type: ignore[arg-type]
        for key, descriptor, payload in filter(None, targets.found())
    ]


def put_raw(
    client: Client, namespace: str, objects: Sequence[RawObject], *, parent: bytes, chain: bool
) -> list[PutOutcome]:
    """Store those that fit, as ``Client.put_chain`` (``chain``) or ``Client.put_many`` does."""
    options = client._put_options(
        namespace=namespace, parent=parent or None, chain=chain, partial=True,
        replicas=None, wait_ms=None, ttl=None, timeout_ms=None,
    )  # fmt: skip
    keys, descriptors, payloads = zip(*objects, strict=True)
    sizes = [len(payload) for payload in payloads]
    parts = [[payload] if len(payload) else [] for payload in payloads]
    return client._run(write(client._context, Items(keys, sizes, parts, descriptors), options))
