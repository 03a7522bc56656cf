"""The table of what is compared: all that was promised, once."""

from __future__ import annotations

import pytest

from bench.tables import REDIS_ROWS, ROWS, TABLES
from kvstore.bench.rows import MODES, ComparisonCase, choose, memory_needed, rows_of_host, size_name
from kvstore.bench.session import EXIST, GET, GET_AGAIN, GET_VIEW, MATCH, PUT

KIB, MIB = 1 << 10, 1 << 20

GOALS = {
    (EXIST, "tcp", 0, 1): 2,
    (EXIST, "tcp", 0, 64): 2,
    (EXIST, "tcp", 0, 1024): 4,
    (EXIST, "tcp", 0, 8192): 7,
    (MATCH, "tcp", 0, 1024): 10,
    (MATCH, "tcp", 0, 8192): 20,
    (PUT, "shm", 4 * KIB, 1): 2,
    (GET, "shm", 4 * KIB, 1): 3,
    (PUT, "tcp", 4 * KIB, 1): 1.5,
    (GET, "tcp", 4 * KIB, 1): 2,
    (GET_AGAIN, "shm", 4 * KIB, 1): 8,
    (PUT, "shm", MIB, 1): 1.8,
    (GET, "shm", MIB, 1): 1.8,
    (PUT, "tcp", MIB, 1): 1.8,
    (GET, "tcp", MIB, 1): 1.5,
    (PUT, "shm", 64 * KIB, 64): 1.3,
    (GET, "shm", 64 * KIB, 64): 1.3,
    (PUT, "shm", MIB, 64): 1.1,
    (GET, "shm", MIB, 64): 1.1,
    (GET_VIEW, "shm", MIB, 64): 15,
    (PUT, "tcp", MIB, 64): 2,
    (GET, "tcp", MIB, 64): 2,
    (PUT, "tcp", 4 * MIB, 64): 2,
    (GET, "tcp", 4 * MIB, 64): 2,
    (PUT, "tcp", 4 * KIB, 64): 2,
    (GET, "tcp", 4 * KIB, 64): 2,
    (PUT, "shm", 4 * KIB, 64): 1.2,
    (GET, "shm", 4 * KIB, 64): 1.2,
}
"""As they were set, before anything was measured."""


def test_every_goal_has_its_row_and_no_other() -> None:
    assert {(row.op, row.mode, row.size, row.batch): row.goal for row in ROWS} == GOALS


def test_ids_are_unique_and_paths_known() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS)
    assert len({(row.title, row.mode) for row in ROWS}) == len(ROWS)
    assert {row.mode for row in ROWS} == set(MODES)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_each_row_once(name: str) -> None:
    assert len({row.id for row in TABLES[name].rows}) == len(TABLES[name].rows)


def test_redis_has_the_same_work_on_either_path() -> None:
    shm, tcp = ([(row.op, row.size, row.batch) for row in REDIS_ROWS if row.mode == mode]
                for mode in MODES)  # fmt: skip
    assert shm == tcp
    for size in (512, 4 * KIB, 64 * KIB, MIB, 16 * MIB):
        assert {(PUT, size, 1), (GET, size, 1)} <= set(shm)
    for size in (4 * KIB, MIB):
        assert {(PUT, size, 64), (GET, size, 64)} <= set(shm)
    assert {(EXIST, 0, 1), (EXIST, 0, 64), (MATCH, 0, 64), (MATCH, 0, 1024)} <= set(shm)
    assert {row.goal for row in REDIS_ROWS} == {1}, "met: ours is as fast"


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
