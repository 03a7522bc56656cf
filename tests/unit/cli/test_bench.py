"""The parts of the benchmark that are not the store's."""

from __future__ import annotations

from typing import cast

import pytest

from kvstore.bench.session import Session
from kvstore.cli.bench import Row, _Shower, measure


def shown(patterns: str) -> list[tuple[str, int, int]]:
    rows: list[Row] = []
    shower = _Shower("shm", patterns.split(","), rows.append)
    for op, size in (("put", 4096), ("get", 4096), ("get_view", 1 << 20), ("exist", 0)):
        for batch in (1, 64):
            if shower.wants(op, size, batch):
                shower.row(op, size, batch, [0.001, 0.002, 0.006])
    return [(row.op, row.size_bytes, row.batch) for row in rows]


@pytest.mark.parametrize(
    ("patterns", "rows"),
    [
        ("exist", [("exist", 0, 1), ("exist", 0, 64)]),
        ("put/4096/1", [("put", 4096, 1)]),
        ("get*/*/64", [("get", 4096, 64), ("get_view", 1 << 20, 64)]),
        ("put/*/1,exist/0/1", [("put", 4096, 1), ("exist", 0, 1)]),
        ("nothing", []),
    ],
)
def test_patterns_choose_rows(patterns: str, rows: list[tuple[str, int, int]]) -> None:
    assert shown(patterns) == rows


class Unmeasured:
    """A session in which every call takes a second."""

    def measure(self, op: str, size: int, batch: int, seconds: float) -> list[float]:
        return [1.0]


def test_every_row() -> None:
    rows: list[Row] = []
    measure(cast(Session, Unmeasured()), "shm", 1.0, _Shower("shm", ["*"], rows.append))
    found = {(row.op, row.size_bytes, row.batch) for row in rows}
    for op in ("put", "get", "get_view"):
        assert {(op, kib << 10, n) for kib in (4, 64, 1024, 4096) for n in (1, 64)} <= found
    assert ("get_again", 4096, 1) in found
    assert {("exist", 0, n) for n in (1, 64, 1024, 8192)} <= found
    assert {("match_prefix", 0, n) for n in (1024, 8192)} <= found
    assert len(rows) == len(found)


def test_a_row_is_of_one_call_and_its_whole_batch() -> None:
    rows: list[Row] = []
    _Shower("shm", ["*"], rows.append).row("put", 1_000_000, 64, [0.001, 0.003, 0.002])
    assert rows == [
        Row(
            system="kvstore",
            mode="shm",
            op="put",
            size_bytes=1_000_000,
            batch=64,
            per_second=32_000.0,
            gb_per_second=32.0,
            p50_us=2000.0,
            p99_us=3000.0,
        )
    ]
