"""The parts of the benchmark that are not the store's."""

from __future__ import annotations

import pytest

from kvstore.cli.bench import Row, _Shower


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
