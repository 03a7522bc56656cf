"""Which rows ``kvstore bench`` has, and what it computes."""

from __future__ import annotations

import pytest

from kvstore.bench.cases import OWN, chosen, row_of, work_of


@pytest.mark.parametrize(
    ("patterns", "rows"),
    [
        ("exist/*/1", [("exist", 0, 1)]),
        ("put/4096/1", [("put", 4096, 1)]),
        ("get_a*", [("get_again", 4096, 1)]),
        ("get*/4096/64", [("get", 4096, 64), ("get_view", 4096, 64)]),
        ("put/4096/1,exist/0/1", [("put", 4096, 1), ("exist", 0, 1)]),
        ("nothing", []),
    ],
)
def test_patterns_choose_rows(patterns: str, rows: list[tuple[str, int, int]]) -> None:
    assert chosen(work_of("shm"), patterns.split(",")) == rows


def test_every_row() -> None:
    found = work_of("shm")
    for op in ("put", "get", "get_view"):
        assert {(op, kib << 10, n) for kib in (4, 64, 1024, 4096) for n in (1, 64)} <= set(found)
    assert ("get_again", 4096, 1) in found
    assert {("exist", 0, n) for n in (1, 64, 1024, 8192)} <= set(found)
    assert {("match_prefix", 0, n) for n in (1024, 8192)} <= set(found)
    assert len(found) == len(set(found))
    assert not any(op == "get_view" for op, _, _ in work_of("tcp"))


def test_a_row_is_of_one_call_and_its_whole_batch() -> None:
    row = row_of("shm", "put", 1_000_000, 64, [0.001, 0.003, 0.002])
    assert row == {
        "system": "kvstore", "mode": "shm", "op": "put", "size_bytes": 1_000_000, "batch": 64,
        "per_second": 32_000.0, "gb_per_second": 32.0, "p50_us": 2000.0, "p99_us": 3000.0,
    }  # fmt: skip
    assert OWN.cells(row)[3:] == ("64", "32,000", "32.00", "2,000.0", "3,000.0")


def test_a_view_moves_no_bytes_and_has_no_bandwidth() -> None:
    row = row_of("shm", "get_view", 4 << 20, 64, [0.0004])
    assert row["gb_per_second"] == 0.0
    assert OWN.cells(row)[4:6] == ("160,000", "-")
