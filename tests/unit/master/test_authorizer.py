"""The gate: identities of peers, signed tokens, and whose put a token is."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore import calls
from kvstore.config import MasterConfig
from kvstore.errors import PermissionDeniedError
from kvstore.limits import Key, Namespace
from kvstore.master.authorizer import Authorizer, assign_client_number
from kvstore.master.capabilities import MASTER
from kvstore.master.service import MasterService
from kvstore.master.state.grants import PendingGrants
from kvstore.master.state.master_state import MasterState
from kvstore.master.state.traffic import Caller
from kvstore.runtime.logs import BURST, RateLimit
from kvstore.security.holder_ids import holder_of
from kvstore.security.identity import UNAUTHENTICATED, Identity, validated_identity
from tests.support.certificates import Identities
from tests.unit.master.test_term import JOIN
from tests.unit.wire.test_request_chunking import service_with

ENGINE = validated_identity("e", ["engine"], reads=["a"], writes=["a"])
OTHER = validated_identity("o", ["engine"], reads=["a"], writes=["a"])
SECRET = b"s" * 16
SPACE = Namespace("a")


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


@pytest.fixture
def gate(identities: Identities) -> Authorizer:
    return Authorizer(
        MasterConfig(auth=identities.file("master"), auth_revoked=str(identities.revoked_file))
    )


def shown(who: Identity, version: bytes = b"TLSv1.3") -> dict[str, list[bytes]]:
    return {"peer_uri": [who.uri.encode()], "ssl_tls_version": [version]}


def test_who_calls_is_in_the_certificate(gate: Authorizer) -> None:
    assert gate.identify_grpc_peer(lambda: shown(ENGINE)) == ENGINE
    peers: list[tuple[dict[str, list[bytes]], str]] = [
        ({}, "names 0 identities"),
        (shown(ENGINE, b"TLSv1.2"), "TLS 1.3 is the lowest"),
        ({"peer_uri": [b"spiffe://x"], "ssl_tls_version": [b"TLSv1.3"]}, "names 0 identities"),
    ]
    for peer, says in peers:
        with pytest.raises(PermissionDeniedError, match=says):
            gate.identify_grpc_peer(partial(dict, peer))
    with pytest.raises(PermissionDeniedError, match="without an identity"):
        gate.check(UNAUTHENTICATED, calls.Clear(SPACE, 1))
    assert gate.refused == 4


def test_a_token_names_an_identity_and_a_number(gate: Authorizer) -> None:
    token = gate.issue_client_token(SECRET, "name of a client", ENGINE, 7)
    caller = gate.verify_client_token(token, SECRET, "10.0.0.1")
    assert caller is not None
    assert (caller.identity, caller.name) == (ENGINE, "name of a client 10.0.0.1")
    assert (caller.holder, caller.number) == (holder_of(ENGINE), assign_client_number(ENGINE, 7))
    beside = gate.verify_client_token(token, SECRET, "10.0.0.1", ENGINE._replace(number="next"))
    assert beside is not None
    assert beside.identity == ENGINE._replace(number="next"), "what the connection shows counts"


def test_no_other_token_is_one(gate: Authorizer, identities: Identities) -> None:
    token = gate.issue_client_token(SECRET, "c", ENGINE, 7)
    assert gate.verify_client_token(token, SECRET, "", OTHER) is None, "of another identity"
    assert gate.verify_client_token(token, b"t" * 16, "") is None, "of another term"
    for at in range(len(token)):
        changed = bytes(byte ^ (at == index) for index, byte in enumerate(token))
        assert gate.verify_client_token(changed, SECRET, "") is None, at
    for short in (b"", SECRET, token[:39], SECRET + b"c"):
        assert gate.verify_client_token(short, SECRET, "") is None
    again = Authorizer(MasterConfig(auth=identities.file("master")))
    assert again.verify_client_token(token, SECRET, "") is None, "of another process"


def test_a_number_is_of_one_identity(gate: Authorizer, identities: Identities) -> None:
    """Also at a master that has just started, which has seen nobody yet."""
    numbers = []
    for master in (gate, Authorizer(MasterConfig(auth=identities.file("master")))):
        for who in (ENGINE, ENGINE._replace(number="renewed"), OTHER):
            caller = master.verify_client_token(
                master.issue_client_token(SECRET, "c", who, 7), SECRET, ""
            )
            assert caller is not None
            numbers.append(caller.number)
    mine, renewed, theirs = numbers[:3]
    assert mine == renewed != theirs
    assert numbers[3:] == numbers[:3]
    assert {number & 0xFFFF_FFFF for number in numbers} == {7}, "nodes cut connections by this half"
    taken = gate.issue_client_token(SECRET, "c", OTHER, mine)
    caller = gate.verify_client_token(taken, SECRET, "")
    assert caller is not None
    assert caller.number == theirs, "who shows the number of another gets its own"
    drawn = {assign_client_number(ENGINE, 0) & 0xFFFF_FFFF for _ in range(4)}
    assert 0 not in drawn
    assert len(drawn) > 1


def test_a_holder_is_a_certificate() -> None:
    holders = [
        holder_of(who)
        for who in (ENGINE, OTHER, ENGINE._replace(number="1"), ENGINE._replace(number="2"))
    ]
    assert len(set(holders)) == len(holders)
    assert all(0 < holder < MASTER for holder in holders)
    assert holder_of(ENGINE._replace(number="0x0A:1b")) == holder_of(OTHER._replace(number="a1b"))


@pytest.mark.usefixtures("files_at_once")
def test_who_is_revoked_is_out(gate: Authorizer, identities: Identities) -> None:
    gate.check(ENGINE, calls.Exists(SPACE, [Key(b"k")]))
    identities.revoked_file.write_text("77\n")
    revoked = ENGINE._replace(number="77")
    for refused in (
        partial(gate.check, revoked, calls.Exists(SPACE, [Key(b"k")])),
        partial(gate.identify_grpc_peer, lambda: shown(revoked)),
        partial(gate.check_node, validated_identity("n", ["node"], number="77"), "n"),
    ):
        with pytest.raises(PermissionDeniedError, match="was revoked"):
            refused()
    gate.check(ENGINE, calls.Exists(SPACE, [Key(b"k")]))
    ended = validated_identity("n", ["node"])._replace(until=time.time())
    with pytest.raises(PermissionDeniedError, match="certificate of node n expired"):
        gate.check_node(ended, "n")


@pytest.mark.usefixtures("files_at_once")
def test_a_nodes_stream_ends_once_its_identity_is_revoked(
    gate: Authorizer, identities: Identities
) -> None:
    async def main() -> None:
        messages: asyncio.Queue[calls.NodeMessage] = asyncio.Queue()

        async def incoming() -> AsyncIterator[calls.NodeMessage]:
            while True:
                yield await messages.get()

        service = MasterService(MasterState(epoch=7), access=gate)
        node = validated_identity("n", ["node"], number="77")
        async with contextlib.aclosing(cast(Any, service.node_session(incoming(), node))) as stream:
            messages.put_nowait(JOIN)
            assert isinstance(await anext(stream), calls.MasterAccepted)
            messages.put_nowait(calls.NodeHeartbeat(1))
            assert isinstance(await anext(stream), calls.MasterHeartbeat)
            identities.revoked_file.write_text("77\n")
            messages.put_nowait(calls.NodeHeartbeat(2))
            with pytest.raises(PermissionDeniedError, match="was revoked"):
                await anext(stream)

    asyncio.run(main())


def test_puts_and_copies_get_the_number_of_their_caller(gate: Authorizer) -> None:
    caller = Caller("c", ENGINE, number=7)
    made = calls.PutStart(SPACE, [Key(b"k")], [1], None, True, 1, False, 0, "", client_number=9)
    for request in (
        made,
        calls.Allocate(SPACE, 1, 0, "", client_number=9),
        calls.StartMoves("n", 0, 1, 1, client_number=9),
    ):
        owned = gate.bind_to_caller(caller, request, PendingGrants())
        assert isinstance(owned, calls.PutStart | calls.Allocate | calls.StartMoves)
        assert owned.client_number == 7


def test_no_identity_hides_what_another_removes_or_is_refused(
    gate: Authorizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Five lines of all together were written in a second."""
    caplog.set_level(logging.INFO, "kvstore.security")
    limit = RateLimit(lambda: 1.0)
    caplog.handler.addFilter(limit)
    try:
        for _ in range(3 * BURST):
            gate.check(ENGINE, calls.Remove(SPACE, [Key(b"k"), Key(b"l")]))
            with pytest.raises(PermissionDeniedError):
                gate.check(ENGINE, calls.Clear(Namespace("b"), 1))
            with pytest.raises(PermissionDeniedError):
                gate.identify_grpc_peer(lambda: {"ssl_tls_version": [b"TLSv1.3"]})
        gate.check(OTHER, calls.Remove(SPACE, [Key(b"k")]))
        with pytest.raises(PermissionDeniedError):
            gate.check(OTHER, calls.Clear(Namespace("b"), 1))
    finally:
        caplog.handler.removeFilter(limit)
    assert gate.refused == 6 * BURST + 1
    assert Counter(line.partition(" reason=")[2] or line for line in caplog.messages) == {
        "audit call=Remove identity=e on=a keys=2": BURST,
        "audit call=Remove identity=o on=a keys=1": 1,
        "\"Clear: engine e may not write namespace 'b'\"": BURST,
        "\"Clear: engine o may not write namespace 'b'\"": 1,
        "'the certificate names 0 identities'": BURST,
    }


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(
    "ask",
    [
        lambda keys: calls.Exists(SPACE, keys),
        lambda keys: calls.Lookup(SPACE, keys),
        lambda keys: calls.MatchPrefix([SPACE], keys, True),
        lambda keys: calls.StatObject(SPACE, keys[0]),
        lambda keys: calls.PutStart(SPACE, keys, [1], None, False, 1, False, 0, ""),
        lambda keys: calls.Remove(SPACE, keys),
    ],
    ids=["exists", "lookup", "match", "stat", "put", "remove"],
)
def test_what_is_refused_is_not_looked_up(
    gate: Authorizer,
    monkeypatch: pytest.MonkeyPatch,
    ask: Callable[[list[Key]], calls.Request],
    *,
    there: bool,
) -> None:
    """So the time of a refusal cannot tell whether a block of others is there."""
    state = MasterState(epoch=1)
    if there:
        state.common.forest.ensure(SPACE, Key(b"k"))
    refused = lambda *_: pytest.fail("the state was asked")  # noqa: E731
    monkeypatch.setattr(state, "steps", dict.fromkeys(state.steps, refused))
    service = MasterService(state, access=gate)
    stranger = Caller("c", validated_identity("s", ["engine"], reads=["b"], writes=["b"]))
    with pytest.raises(PermissionDeniedError):
        service.call(ask([Key(b"k")]), stranger)


@pytest.mark.parametrize(
    "request_of",
    [
        lambda tokens: calls.PutEnd(7, tokens),
        lambda tokens: calls.PutRevoke(7, tokens, True),
        lambda tokens: calls.Renew(SPACE, [], [], [], 7, tokens, [], []),
        lambda tokens: calls.Commit(7, tokens[-1], SPACE, Key(b"k"), None, 1, False),
    ],
)
def test_a_token_of_another_client_is_refused(
    gate: Authorizer, request_of: Callable[[list[int]], calls.Request]
) -> None:
    service = service_with(0, gate)
    ours, theirs = Caller("c", ENGINE, number=7), Caller("d", OTHER, number=8)
    put = calls.PutStart(SPACE, [Key(b"k")], [1], None, False, 1, False, 0, "h")
    grants = service.call(put, ours)
    assert isinstance(grants, calls.Grants)
    with pytest.raises(PermissionDeniedError, match="a put of another client"):
        service.call(request_of([1_000_000, *grants.tokens]), theirs)
    ended = service.call(calls.PutEnd(7, grants.tokens), ours)
    assert isinstance(ended, calls.PutEndReply)
    assert list(ended.outcomes) == [calls.PutOutcome.STORED]
