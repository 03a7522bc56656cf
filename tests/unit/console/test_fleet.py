"""Who shares with whom, and why not."""

from __future__ import annotations

from kvstore.calls.fleet_records import FleetRecord
from kvstore.console.dashboard.routes import FIELDS_MAX, TEXT_MAX, compared


def record(
    mark: str, model: str = "/models/m", engine: str = "vllm", **described: object
) -> FleetRecord:
    return FleetRecord(engine, (model,), mark, (f"{engine}/{mark}/p0",), described, 16)


def test_records_of_one_model_are_compared_field_by_field() -> None:
    found = compared(
        [
            record("a", dtype="bfloat16", block=16, extra=None),
            record("b", model="m/", dtype="float8", block=16),
            record("c", engine="sglang", dtype="x"),
        ]
    )
    assert [(each["engine"], each["model"]) for each in found] == [("sglang", "m"), ("vllm", "m")]
    assert found[0]["differing"] == []
    assert found[1]["differing"] == ["dtype", "extra"]
    rows = found[1]["records"]
    assert [row["differing"] for row in rows] == [['"bfloat16"', "null"], ['"float8"', ""]]
    assert rows[0]["namespaces"] == ("vllm/a/p0",)


def test_what_is_shown_is_bounded() -> None:
    many = {f"f{number}": "x" * 10_000 for number in range(1_000)}
    other = dict.fromkeys(many, "y")
    (found,) = compared([record("a", **many), record("b", **other)])
    assert len(found["differing"]) == FIELDS_MAX
    assert max(map(len, found["records"][0]["differing"])) == TEXT_MAX
