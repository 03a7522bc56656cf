"""Large calls are cut into pieces, which together say what the whole call would."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, get_args
from unittest import mock

import pytest

from kvstore import calls
from kvstore.errors import BatchTooLargeError
from kvstore.limits import (
    AVOID_MAX,
    BATCH_KEYS_MAX,
    KEY_BYTES_MAX,
    NAMESPACES_MAX,
    PUT_KEYS_MAX,
    REQUEST_BYTES_MAX,
    Key,
    Namespace,
)
from kvstore.master.authorizer import Access
from kvstore.master.service import MasterService
from kvstore.master.state.effects import SendToNode
from kvstore.master.state.master_state import MasterState
from kvstore.native.packed_keys import PackedKeys, keys_per_request
from kvstore.wire.messages import encode_request
from kvstore.wire.request_chunking import CHUNKINGS, KEYS_PER_CHUNK, PROBES_PER_CHUNK
from tests.unit.master.test_term import JOIN

SPACE = Namespace("n")
MANY = 3 * KEYS_PER_CHUNK + 7
KEYS = [Key(index.to_bytes(4, "big")) for index in range(MANY)]
REPEATED = (KEYS * (BATCH_KEYS_MAX // MANY + 1))[:BATCH_KEYS_MAX]


def service_with(objects: int, access: Access | None = None) -> MasterService:
    """A master with a node that wipes at once, and so many objects."""
    state = MasterState(epoch=7)
    offer = JOIN.segments[0]._replace(size=64 << 20)
    state.nodes.on_node_join(0, 1, JOIN._replace(segments=[offer]))
    service = MasterService(state, clock=lambda: 0, access=access)
    settle = service._apply_effects

    def wiping() -> None:
        orders = [
            effect.message.wipe_seq
            for effect in state.effects
            if isinstance(effect, SendToNode) and isinstance(effect.message, calls.MasterWipe)
        ]
        settle()
        for order in orders:
            state.nodes.on_node_message(0, 1, calls.NodeWipeDone(order))
        settle()

    service._apply_effects = wiping  # type: ignore[method-assign]
    for start in range(0, objects, KEYS_PER_CHUNK):
        keys = KEYS[start : min(start + KEYS_PER_CHUNK, objects)]
        put = calls.PutStart(SPACE, keys, [1] * len(keys), None, False, 1, False, 0, "h")
        grants = state.putting.put_start(0, put)
        assert isinstance(grants, calls.Grants)
        state.putting.put_end(0, calls.PutEnd(7, grants.tokens))
    return service


def ask(service: MasterService, request: calls.Request) -> Any:
    """The reply to one request, whatever its size."""

    async def main() -> Any:
        with mock.patch("kvstore.master.service.CHUNKINGS", {}):
            reply = service.call(request)
        return reply if isinstance(reply, tuple) else await asyncio.wait_for(reply, 10)

    return asyncio.run(main())


def versions(service: MasterService) -> tuple[list[int], list[int]]:
    found = service.state.asking.lookup(0, calls.Lookup(SPACE, KEYS)).placements
    return list(found.epochs), list(found.counters)


def removal(_: MasterService) -> calls.Request:
    return calls.Remove(SPACE, KEYS)


def report(service: MasterService) -> calls.Request:
    return calls.ReportCorrupt(SPACE, KEYS, *versions(service), [b"u" * 16] * MANY)


def renewal(service: MasterService) -> calls.Request:
    return calls.Renew(
        SPACE, KEYS, *versions(service), 7, list(range(MANY)), [b"u" * 16] * MANY, [0] * MANY
    )


def revocation(_: MasterService) -> calls.Request:
    return calls.PutRevoke(7, list(range(MANY)), True)


def ending(_: MasterService) -> calls.Request:
    return calls.PutEnd(7, list(range(MANY)))


def match(_: MasterService) -> calls.Request:
    return calls.MatchPrefix([SPACE] * NAMESPACES_MAX, KEYS, False)


def states(_: MasterService) -> calls.Request:
    return calls.MatchPrefix([SPACE] * NAMESPACES_MAX, KEYS, False, [SPACE] * NAMESPACES_MAX)


def lookup(_: MasterService) -> calls.Request:
    return calls.Lookup(SPACE, REPEATED)


def exists(_: MasterService) -> calls.Request:
    return calls.Exists(SPACE, REPEATED)


def leased_exists(_: MasterService) -> calls.Request:
    return calls.Exists(SPACE, REPEATED, True)


@pytest.mark.parametrize(
    "request_of",
    [removal, report, renewal, revocation, ending, match, states, lookup, exists, leased_exists],
)
def test_the_pieces_of_a_large_call_say_what_a_whole_one_would(
    request_of: Callable[[MasterService], calls.Request],
) -> None:
    whole = service_with(MANY - 3)
    request = request_of(whole)
    cut = CHUNKINGS[type(request)]
    with pytest.raises(BatchTooLargeError):
        whole.call(request)
    expected = ask(whole, request)
    service = service_with(MANY - 3)
    pieces = cut.chunks(request_of(service))
    assert len(pieces) > 1
    assert not any(cut.is_large(piece) for piece in pieces), "it would be cut again"
    reply = cut.joined([ask(service, piece) for piece in pieces])
    assert as_lists(reply) == as_lists(expected)


@pytest.mark.parametrize("size", [1, 2, 16, 127, 128, KEY_BYTES_MAX])
@pytest.mark.parametrize("packed", [True, False])
def test_no_piece_is_longer_than_a_request_may_be(size: int, packed: bool) -> None:
    data = bytes(size * BATCH_KEYS_MAX)
    keys: Sequence[Key] = PackedKeys(data, size)
    if not packed:
        keys = [*keys[1:], Key(b"another size" * 2)]
    numbers = list(range(1 << 62, (1 << 62) + len(keys)))
    spaces = [Namespace(f"{number:0128}") for number in range(NAMESPACES_MAX)]
    for request in (
        calls.Lookup(spaces[0], keys),
        calls.Exists(spaces[0], keys),
        calls.Remove(spaces[0], keys),
        calls.Renew(
            spaces[0], keys, numbers, numbers, 1, numbers, [bytes(16)] * len(keys), numbers
        ),
        calls.MatchPrefix(spaces, keys[: keys_per_request(keys)], False, spaces),
    ):  # fmt: skip
        for piece in CHUNKINGS[type(request)].chunks(request):
            assert len(encode_request(piece)) <= REQUEST_BYTES_MAX
    put = calls.PutStart(
        spaces[0], keys[:PUT_KEYS_MAX], list(range(PUT_KEYS_MAX)), keys[0], True, 8, True, 1, "h",
        [bytes(16)] * AVOID_MAX,
    )  # fmt: skip
    assert len(encode_request(put)) <= REQUEST_BYTES_MAX


def as_lists(value: Any) -> object:
    if isinstance(value, bytes | bytearray | Sequence) and not isinstance(value, str):
        return [as_lists(each) for each in value]
    return value


def test_every_call_with_many_keys_is_cut_or_quick() -> None:
    """What is neither must be added to one of them."""
    quick = {calls.PutStart, calls.Pin, calls.Unpin, calls.Hint, calls.Chains, calls.Blocks}
    batches = {
        kind
        for kind in get_args(calls.Request)
        if {"keys", "tokens"} & set(getattr(kind, "_fields", ()))
    }
    assert batches == quick | set(CHUNKINGS)
    assert BATCH_KEYS_MAX <= PROBES_PER_CHUNK
