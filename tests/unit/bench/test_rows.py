"""The table of what is compared: all that was promised, once."""

from __future__ import annotations

import pytest

from bench.tables import ROWS, TABLES
from kvstore.bench.rows import MODES, ComparisonCase, choose, memory_needed, rows_of_host, size_name
from kvstore.bench.session import EXIST, GET, GET_VIEW, PUT

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_each_row_once(name: str) -> None:
    assert len({row.id for row in TABLES[name].rows}) == len(TABLES[name].rows)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_where_the_work_differs_the_row_says_so(row: ComparisonCase) -> None:
    assert row.notes
    assert row.peers_op in (PUT, GET, EXIST), "what the peer has"
    if row.peers_op != row.op:
        assert any(note.startswith("Not the same work") for note in row.notes)


@pytest.mark.parametrize(
    ("patterns", "ids"),
    [
        ("get_again", ["get_again/shm/4KiB/1"]),
        ("exist/tcp/-/1", ["exist/tcp/-/1"]),
        ("put/tcp/4KiB", ["put/tcp/4KiB/1", "put/tcp/4KiB/64"]),
        ("*/4MiB/64", ["put/tcp/4MiB/64", "get/tcp/4MiB/64"]),
    ],
)
def test_patterns_choose_rows(patterns: str, ids: list[str]) -> None:
    assert [row.id for row in choose(patterns, ROWS)] == ids


def test_a_row_that_is_named_whole_is_that_row_alone() -> None:
    rows = TABLES["clients"].rows
    assert [row.clients for row in choose("get/tcp/4KiB/1", rows)] == [1]
    assert [row.clients for row in choose("get/tcp/4KiB", rows)] == [1, 2, 4, 16]


def test_a_pattern_that_chooses_nothing_is_named_with_all_rows() -> None:
    with pytest.raises(ValueError, match="nosuch selects no row; the rows are exist/tcp/-/1, "):
        choose("put,nosuch", ROWS)


def test_the_rows_of_one_host() -> None:
    rows = rows_of_host(MODES)
    assert len({row.id for row in rows}) == len(rows)
    for op in (PUT, GET, GET_VIEW):
        moved = {(row.size, row.batch) for row in rows if (row.op, row.mode) == (op, "shm")}
        assert moved == {(kib << 10, n) for kib in (4, 64, 1024, 4096) for n in (1, 64)}
    assert not [row for row in rows if (row.op, row.mode) == (GET_VIEW, "tcp")]


def test_a_client_has_memory_for_the_largest_batch() -> None:
    assert memory_needed(ROWS) == 64 * 4 * MIB
    assert memory_needed(choose("exist", ROWS)) == MIB, "to write the pool through"


def test_sizes_are_named() -> None:
    assert [size_name(size) for size in (0, 512, 4 * KIB, MIB)] == ["-", "512B", "4KiB", "1MiB"]
