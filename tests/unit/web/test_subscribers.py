"""Places of subscribers: an address cannot keep all of them, and nobody keeps one for ever."""

from __future__ import annotations

import pytest

from kvstore.web.events.subscribers import TENURE_S, Subscribers


class Doorman:
    """Four places, and a clock that a test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.cut: list[str] = []
        self.subscribers = Subscribers(4)
        monkeypatch.setattr("kvstore.web.events.subscribers.time.monotonic", lambda: self.now)

    def come(self, name: str) -> bool:
        """``name``: the address, and something after it."""
        number = self.subscribers.enter(name[0], lambda: self.cut.append(name))
        assert len(self.subscribers) <= 4
        return number is not None


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Doorman:
    return Doorman(monkeypatch)


def test_an_address_gives_way_to_one_with_fewer(door: Doorman) -> None:
    assert all(door.come(name) for name in ("a1", "a2", "a3", "b1"))
    assert not door.come("a4")
    assert door.come("c1")
    assert not door.come("b2"), "a has no more than b would have"
    assert door.come("d1")
    assert door.cut == ["a1", "a2"]
    assert not door.come("e1"), "all have one"


def test_nobody_keeps_a_place_for_ever(door: Doorman) -> None:
    assert all(door.come(name) for name in ("b1", "a1", "a2"))
    door.now += TENURE_S / 2
    assert door.come("a3")
    door.now += TENURE_S / 2
    assert door.come("a4")
    assert door.cut == ["a1"], "b has fewer than a: it stays"
    assert door.come("a5")
    assert not door.come("a6"), "the others have not had their time"
    assert door.cut == ["a1", "a2"]
