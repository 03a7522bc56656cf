"""The gate: identities of peers, signed tokens, and whose put a token is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvstore import calls
from kvstore.auth.identity import Identity, identity
from kvstore.config import MasterConfig
from kvstore.errors import PermissionDeniedError
from kvstore.limits import Key, Namespace
from kvstore.master.callers import caller_of, token_for
from kvstore.master.gate import LINES_PER_S, Gate
from kvstore.master.state.puts import GrantedAllocation, Pending
from kvstore.master.state.traffic import Caller
from tests.support.issuing import Identities

ENGINE = identity("e", ["engine"], reads=["a"], writes=["a"])
OTHER = identity("o", ["engine"], reads=["a"], writes=["a"])
SECRET = b"s" * 16
SPACE = Namespace("a")


@pytest.fixture
def identities(tmp_path: Path) -> Identities:
    return Identities(tmp_path)


@pytest.fixture
def gate(identities: Identities) -> Gate:
    return Gate(
        MasterConfig(auth=identities.file("master"), auth_revoked=str(identities.revoked_file))
    )


def shown(who: Identity, version: bytes = b"TLSv1.3") -> dict[str, list[bytes]]:
    return {"peer_uri": [who.uri.encode()], "ssl_tls_version": [version]}


def test_who_calls_is_in_the_certificate(gate: Gate) -> None:
    assert gate.of_grpc(shown(ENGINE)) == ENGINE
    peers: list[tuple[dict[str, list[bytes]], str]] = [
        ({}, "without an identity"),
        (shown(ENGINE, b"TLSv1.2"), "TLS 1.3 is the lowest"),
        ({"peer_uri": [b"spiffe://x"], "ssl_tls_version": [b"TLSv1.3"]}, "names 0 identities"),
    ]
    for peer, says in peers:
        with pytest.raises(PermissionDeniedError, match=says):
            gate.of_grpc(peer)
    assert gate.refused == 3


def test_where_it_is_only_preferred_peers_without_tls_get_in(identities: Identities) -> None:
    gate = Gate(MasterConfig(auth=identities.file("master"), auth_mode="prefer"))
    assert gate.of_grpc({}) is None
    assert gate.of_tls(None) is None
    gate.check(None, calls.Clear(SPACE, 1))
    with pytest.raises(PermissionDeniedError):
        gate.of_grpc(shown(ENGINE, b"TLSv1.2"))


def test_a_token_names_an_identity_and_a_number(gate: Gate) -> None:
    token = token_for(SECRET, "name of a client", ENGINE, gate, 7)
    caller = caller_of(token, SECRET, "10.0.0.1", gate)
    assert caller is not None
    assert (caller.identity, caller.holder, caller.name) == (ENGINE, 7, "name of a client 10.0.0.1")
    beside = caller_of(token, SECRET, "10.0.0.1", gate, ENGINE._replace(number="next"))
    assert beside is not None
    assert beside.identity == ENGINE._replace(number="next"), "what the connection shows counts"


def test_no_other_token_is_one(gate: Gate, identities: Identities) -> None:
    token = token_for(SECRET, "c", ENGINE, gate, 7)
    assert caller_of(token, SECRET, "", gate, OTHER) is None, "of another identity"
    assert caller_of(token, b"t" * 16, "", gate) is None, "of another term"
    for at in range(len(token)):
        changed = bytes(byte ^ (at == index) for index, byte in enumerate(token))
        assert caller_of(changed, SECRET, "", gate) is None, at
    for short in (b"", SECRET, token[:39], SECRET + b"c"):
        assert caller_of(short, SECRET, "", gate) is None
    again = Gate(MasterConfig(auth=identities.file("master")))
    assert caller_of(token, SECRET, "", again) is None, "of another process"


def test_a_number_belongs_to_who_came_with_it_first(gate: Gate) -> None:
    token_for(SECRET, "c", ENGINE, gate, 7)
    token_for(SECRET, "again", ENGINE, gate, 7)
    with pytest.raises(PermissionDeniedError, match="the number of another client"):
        token_for(SECRET, "c", OTHER, gate, 7)
    mine = caller_of(token_for(SECRET, "c", OTHER, gate, 0), SECRET, "", gate)
    assert mine is not None
    assert mine.holder not in (0, 7)


def test_who_is_revoked_is_out(
    gate: Gate, identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.check(ENGINE, calls.Exists(SPACE, [Key(b"k")]))
    identities.revoked_file.write_text("77\n")
    monkeypatch.setattr(gate._revoked, "_look_at", 0.0)
    revoked = ENGINE._replace(number="77")
    for refused in (
        partial(gate.check, revoked, calls.Exists(SPACE, [Key(b"k")])),
        partial(gate.of_grpc, shown(revoked)),
        partial(gate.check_node, identity("n", ["node"], number="77"), "n"),
    ):
        with pytest.raises(PermissionDeniedError, match="was revoked"):
            refused()
    gate.check(ENGINE, calls.Exists(SPACE, [Key(b"k")]))


def test_puts_get_the_number_of_their_caller(gate: Gate) -> None:
    caller = Caller("c", ENGINE, 7)
    made = calls.PutStart(SPACE, [Key(b"k")], [1], None, True, 1, False, 0, "", client_number=9)
    for request in (made, calls.Allocate(1, 0, "", client_number=9)):
        owned = gate.own(caller, request, Pending())
        assert isinstance(owned, calls.PutStart | calls.Allocate)
        assert owned.client_number == 7
        assert gate.own(Caller("c"), request, Pending()) is request, "without an identity"


@pytest.mark.parametrize(
    "request_of",
    [
        lambda token: calls.PutEnd(1, [1, token]),
        lambda token: calls.PutRevoke(1, [token], True),
        lambda token: calls.Renew(SPACE, [], [], [], 1, [token]),
        lambda token: calls.Commit(1, token, SPACE, Key(b"k"), None, 1, False),
    ],
)
def test_a_token_is_of_the_client_that_got_it(
    gate: Gate, request_of: Callable[[int], calls.Request]
) -> None:
    pending = Pending()
    pending.add(GrantedAllocation(5, [], 10, 1_000, 7))
    ending, unknown = request_of(5), request_of(6)
    assert gate.own(Caller("c", ENGINE, 7), ending, pending) is ending
    assert gate.own(Caller("c", OTHER, 8), unknown, pending) is unknown, "it has ended before"
    with pytest.raises(PermissionDeniedError, match="a put of another client"):
        gate.own(Caller("c", OTHER, 8), ending, pending)


def test_removals_are_logged_and_refusals_counted_within_a_bound(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstore.auth")
    for _ in range(100):
        gate.check(ENGINE, calls.Remove(SPACE, [Key(b"k")]))
        with pytest.raises(PermissionDeniedError):
            gate.check(ENGINE, calls.Clear(Namespace("b"), 1))
    audits = [
        each for each in caplog.messages if each.startswith("audit call=Remove identity=e on=a")
    ]
    refusals = [each for each in caplog.messages if each.startswith("refused ")]
    assert gate.refused == 100
    for lines in (audits, refusals):
        assert 1 <= len(lines) <= 2 * LINES_PER_S
