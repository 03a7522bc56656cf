"""Puts of values: the flows of ``put``, which may commit an allocation, and ``put_many``."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.calls import PutOutcome
from kvstore.client.flows import allocate, control_calls, put_ahead
from kvstore.client.flows.device_io import ready
from kvstore.client.flows.steps import Context, Flow
from kvstore.client.flows.write_objects import Items, PutOptions, write
from kvstore.client.hints import HintRow
from kvstore.client.validation import Stream
from kvstore.client.values import EncodedBatch, Storable, encode_all
from kvstore.device.streams import computing_on
from kvstore.limits import Key


def put(
    context: Context, key: Key, value: Storable, options: PutOptions, stream: Stream | None = None
) -> Flow[PutOutcome]:
    item = Items([key], *_encoded(context, [value], stream))
    (parts,) = item.parts
    if not isinstance(parts, list):
        yield ready(parts.device, [parts], stream)
    elif len(parts) > 1:
        allocate.refuse_lost(context, item)
    elif parts and (lease := context.views.allocation(parts[0])) is not None:
        outcome = yield from allocate.put(context, lease, item, options)
        if outcome is not None:
            return outcome
    outcome = yield from put_ahead.put(context, item, options)
    if outcome is None:
        (outcome,) = yield from write(context, item, options)
    if context.ahead is not None:
        context.ahead.count((options.namespace, item.sizes[0]), outcome, context.clock())
    return outcome


def put_many(
    context: Context,
    keys: Sequence[Key],
    values: Sequence[Storable],
    options: PutOptions,
    stream: Stream | None = None,
) -> Flow[list[PutOutcome]]:
    """As ``Client.put_many``, and ``put_chain`` where ``options.chain``."""
    items = Items(keys, *_encoded(context, values, stream))
    if items.device is not None:
        yield ready(items.device, items.parts, stream)
    else:
        allocate.refuse_lost(context, items)
    outcomes = yield from write(context, items, options)
    if options.hint and outcomes and outcomes[-1] is PutOutcome.FOUND:  # no put carried it
        rows = [HintRow(options.hint, keys[-1], options.retain_ms)]
        yield from control_calls.hint(options.namespace, rows)
    return outcomes


def _encoded(context: Context, values: Sequence[Storable], stream: Stream | None) -> EncodedBatch:
    if stream is None:
        return encode_all(values, context.pool.devices)
    with computing_on([stream]):
        return encode_all(values, context.pool.devices)
