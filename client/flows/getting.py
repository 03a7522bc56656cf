"""Getting values: the flows of ``get`` and its siblings."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from kvstore.client.arguments import Stream, check_apart
from kvstore.client.flows import viewing
from kvstore.client.flows.devices import DeviceReads, ready
from kvstore.client.flows.objects import ObjectReads
from kvstore.client.flows.reading import GetOptions, Target, look_up_to_read, read, read_values
from kvstore.client.flows.steps import Context, Flow
from kvstore.client.values import (
    UNREADABLE,
    Buffer,
    Found,
    View,
    fillable,
)
from kvstore.limits import Key, Namespace

log = logging.getLogger("kvstore.client")


def get(context: Context, key: Key, options: GetOptions) -> Flow[View | None]:
    (found,) = yield from _found(context, [key], options)
    if isinstance(found, UNREADABLE):
        raise found
    return found


def get_many(context: Context, keys: Sequence[Key], options: GetOptions) -> Flow[list[View | None]]:
    found = yield from _found(context, keys, options)
    values = [None if isinstance(each, UNREADABLE) else each for each in found]
    unreadable = [each for each in found if isinstance(each, UNREADABLE)]
    if unreadable:
        context.count("unreadable_objects", len(unreadable))
        log.warning(
            "unreadable_objects namespace=%s objects=%d first=%s",
            options.namespace, len(unreadable), unreadable[0],
        )  # fmt: skip
    return values


def _found(context: Context, keys: Sequence[Key], options: GetOptions) -> Flow[list[Found]]:
    """Gets values as ``options`` say: as copies, or as views of the pool."""
    if options.copy:
        return read_values(context, keys, options)
    view = viewing.view_tensors if options.device else viewing.view_values
    return view(context, keys, options)


def get_into(
    context: Context,
    wanted: Iterable[tuple[Key, Buffer | Sequence[Buffer]]],
    options: GetOptions,
    stream: Stream | None,
) -> Flow[list[int | None]]:
    targets = [Target(key, *fillable(each, context.pool.devices)) for key, each in wanted]
    device = check_apart([(target.key, target.views or []) for target in targets])
    kind = ObjectReads
    if device is not None:
        yield ready(device, [target.views or [] for target in targets], stream)
        kind = DeviceReads
    yield from read(context, options.namespace, targets, options.timeout_ms, kind)
    return [None if target.placed is None else target.placed.size for target in targets]


def lookup(context: Context, namespace: Namespace, keys: Sequence[Key]) -> Flow[list[int | None]]:
    placed = yield from look_up_to_read(context, namespace, keys)
    return [None if known is None else known.size for known in placed]
