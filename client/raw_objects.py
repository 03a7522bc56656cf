"""Objects as bytes and descriptors, for copies of them outside the store. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvstore.calls import PutOutcome
from kvstore.client.flows.read_objects import ReadTarget, read
from kvstore.client.flows.write_objects import Items, write
from kvstore.limits import Key

if TYPE_CHECKING:
    from kvstore import Client


class RawObject(NamedTuple):
    key: Key
    descriptor: bytes
    payload: memoryview


def get_raw(client: Client, namespace: str, keys: Sequence[Key]) -> list[RawObject | None]:
    """Return the objects, verified as by ``Client.get``; None: a miss."""
    targets = [ReadTarget(key) for key in keys]
    client._run(read(client._context, client._namespace(namespace), targets))
    return [
        None
        if target.descriptor is None or target.data is None
        else RawObject(target.key, target.descriptor, memoryview(target.data))  # type: ignore[arg-type]
        for target in targets
    ]


def put_raw(
    client: Client,
    namespace: str,
    objects: Sequence[RawObject],
    *,
    parent: Key | None,
    chain: bool,
) -> list[PutOutcome]:
    """Store objects as ``Client.put_chain`` (``chain``) or ``Client.put_many`` does, those that
    fit."""
    options = client._put_options(
        namespace=namespace, parent=parent, chain=chain, partial=True,
        replicas=None, wait_ms=None, ttl=None, timeout_ms=None,
    )  # fmt: skip
    items = Items(
        [row.key for row in objects],
        [len(row.payload) for row in objects],
        [[row.payload] if len(row.payload) else [] for row in objects],
        [row.descriptor for row in objects],
    )
    return client._run(write(client._context, items, options))
