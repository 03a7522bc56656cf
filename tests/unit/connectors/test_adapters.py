"""The salt of an adapter that the workers load and drop, as the scheduler side remembers it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.connectors.vllm.scheduler import Scheduler


class Side:
    """As much of ``Scheduler`` as knows adapters, with one worker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.loaded: dict[int, str] = {}
        self.asked = 0
        side: Any = object.__new__(Scheduler)
        self.side = side
        self.side._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.side._core = SimpleNamespace(ask=self._ask)
        self.side._on_worker = self.side._options = None
        self.side._adapters, self.side._known_adapters = {}, {}
        self.side._before_loading, self.side._of_files = {}, {}
        self.side._asked_for, self.side._numbers = set(), {}
        self.changed: list[set[int]] = []
        self.side.decisions = SimpleNamespace(adapters_changed=self.changed.append)

    def _ask(self, *_: object) -> list[dict[int, dict[int, str]]]:
        self.asked += 1
        return [{0: dict(self.loaded)}]

    def request(self, name: str, number: int) -> Any:
        lora = SimpleNamespace(lora_int_id=number, lora_name="tuned", lora_path=str(self.path))
        return SimpleNamespace(request_id=name, lora_request=lora)

    def salt(self, request: str, number: int = 1) -> bytes | None:
        found: bytes | None = self.side._salt(self.request(request, number))
        return found

    def renumber(self, number: int) -> bool:
        return bool(self.side._renumber(self.request("r", number)))

    def load(self, digest: str | None, number: int = 1) -> None:
        """The worker loads, replaces or drops an adapter, and reports it after the step."""
        if digest is None:
            self.loaded.pop(number, None)
        else:
            self.loaded[number] = digest
        self.side._take_adapters({0: dict(self.loaded)})


@pytest.fixture
def side(tmp_path: Path) -> Side:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    return Side(tmp_path)


def test_an_adapter_that_was_dropped_has_the_salt_that_it_had(side: Side) -> None:
    assert side.salt("a") is None
    side.load("digest")
    salt = side.salt("a")
    assert salt is not None
    side.load(None)
    assert side.salt("b") == salt
    assert side.salt("c", number=2) is None


def test_not_if_its_files_have_changed(side: Side) -> None:
    assert side.salt("a") is None
    side.load("digest")
    before = side.salt("a")
    side.load(None)
    file = side.path / "adapter_model.safetensors"
    there = file.stat()
    file.write_bytes(b"WEIGHTS")
    os.utime(file, ns=(there.st_atime_ns, there.st_mtime_ns + 1))
    assert side.salt("b") is None
    side.load("other")
    after = side.salt("b")
    assert after not in (None, before)
    side.load(None)
    assert side.salt("c") == after


def test_files_that_changed_while_it_was_loaded_are_not_remembered(side: Side) -> None:
    assert side.salt("a") is None
    (side.path / "adapter_config.json").write_text("{}")  # before or after it was read?
    side.load("digest")
    assert side.salt("a") is not None
    side.load(None)
    assert side.salt("b") is None


def test_an_adapter_without_files_here_is_known_while_it_is_loaded(tmp_path: Path) -> None:
    side = Side(tmp_path / "organisation" / "name")
    assert side.salt("a") is None
    side.load("digest")
    assert side.salt("a") is not None
    side.load(None)
    assert side.salt("b") is None
    assert side.asked == 2


def test_another_id_means_other_weights_until_these_are_known_to_be_equal(side: Side) -> None:
    side.load("digest", number=1)
    assert [side.renumber(number) for number in (1, 1, 2, 2)] == [False, False, True, False]
    assert side.changed == [{1}]
    side.load("digest", number=2)
    assert [side.renumber(number) for number in (1, 2, 1)] == [False] * 3
    side.load("other", number=2)
    assert [side.renumber(number) for number in (2, 1)] == [True, True]
