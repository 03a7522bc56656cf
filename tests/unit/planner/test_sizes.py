"""Sizes: the worked example of docs/sizing.md, the kinds of attention, and what a config lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvstore.cli.main import cli
from kvstore.errors import InvalidArgumentError
from kvstore.planner.sizes import Load, figures_of, load_shape

CONFIG: dict[str, Any] = {"num_hidden_layers": 12, "num_attention_heads": 8, "hidden_size": 512}


def config(tmp_path: Path, **fields: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
    return str(tmp_path)


def test_the_example_of_the_page() -> None:
    arguments = ["llama-3-70b", "--tensor-parallel", "8", "--engines", "16"]
    shown = CliRunner().invoke(cli, ["--json", "size", *arguments])
    assert shown.exit_code == 0, shown.output
    figures = json.loads(shown.output)
    assert figures["bytes_per_block"] == 5 << 20
    assert (figures["bytes_per_object"], figures["objects_per_block"]) == (2_560 << 10, 8)
    assert figures["blocks_per_object"] == 4
    expected = {
        "stored_bytes_per_s": 5.2e9, "read_bytes_per_s": 21e9, "memory_bytes": 10.6e12,
        "memory_bytes_per_node": 664e9, "objects": 4.05e6, "master_memory_bytes": 1.34e9,
        "puts_per_s": 2_000, "reads_per_s": 8_000, "master_core": 0.019,
        "connections_per_node": 512, "network_bytes_per_s_per_node": 1.23e9,
        "node_host_cores": 0.83,
    }  # fmt: skip
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=0.02)
    with_disks = json.loads(
        CliRunner().invoke(cli, ["--json", "size", *arguments, "--disk", "100TiB"]).output
    )
    assert with_disks["disk_reuse_s"] == pytest.approx(20_900, rel=0.02)
    assert with_disks["disk_writes_per_day"] == pytest.approx(4.13, rel=0.02)
    assert with_disks["master_memory_bytes"] == pytest.approx(13.1e9, rel=0.02)
    assert "9.66 TiB" in CliRunner().invoke(cli, ["size", *arguments]).output
    for memory, reuse_s in ((figures["memory_bytes"], 1_800), (2 * figures["memory_bytes"], 3_600)):
        load = Load(ranks=8, engines=16, memory_bytes=memory)
        assert figures_of(load_shape("llama-3-70b"), load)["reuse_s"] == pytest.approx(reuse_s)


@pytest.mark.parametrize(
    ("fields", "ranks", "token", "objects"),
    [
        ({}, 1, 2 * 12 * 8 * 64 * 2, 1),
        ({"num_key_value_heads": 2, "head_dim": 128}, 2, 2 * 12 * 2 * 128 * 2, 2),
        ({"num_key_value_heads": 2}, 8, 2 * 12 * 8 * 64 * 2, 8),
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 8, 12 * 576 * 2, 1),
        ({"sliding_window": 512, "sliding_window_pattern": 6}, 1, 2 * 12 * 8 * 64 * 2, 6),
        ({"layer_types": ["sliding_attention", "full_attention"] * 6}, 1, 24 * 8 * 64 * 2, 2),
        ({"layer_types": ["linear_attention"] * 9 + ["full_attention"] * 3}, 1, 6 * 8 * 64 * 2, 1),
        ({"text_config": CONFIG | {"num_hidden_layers": 6}}, 1, 2 * 6 * 8 * 64 * 2, 1),
    ],
)
def test_a_token_takes_what_its_kind_of_attention_stores(
    tmp_path: Path, fields: dict[str, Any], ranks: int, token: int, objects: int
) -> None:
    figures = figures_of(load_shape(config(tmp_path, **fields)), Load(ranks=ranks))
    assert (figures["bytes_per_token"], figures["objects_per_block"]) == (token, objects)


def test_copies_of_heads_are_read_by_all_ranks_and_latents_too(tmp_path: Path) -> None:
    latent = load_shape(config(tmp_path, kv_lora_rank=512, qk_rope_head_dim=64))
    one, eight = (figures_of(latent, Load(ranks=ranks)) for ranks in (1, 8))
    assert eight["stored_bytes_per_s"] == one["stored_bytes_per_s"]
    assert eight["read_bytes_per_s"] == 8 * one["read_bytes_per_s"]


@pytest.mark.parametrize(
    ("fields", "ranks", "text"),
    [
        ({"num_hidden_layers": None}, 1, "config.json: num_hidden_layers is missing"),
        ({"num_attention_heads": None}, 1, "num_attention_heads is missing"),
        ({"hidden_size": None}, 1, "head_dim is missing"),
        ({"kv_lora_rank": 512}, 1, "qk_rope_head_dim is missing"),
        ({"num_key_value_heads": "8"}, 1, "num_key_value_heads is '8'"),
        ({"layer_types": ["linear_attention"]}, 1, "layer_types"),
        ({}, 3, "8 KV heads cannot be divided among 3 ranks"),
    ],
)
def test_what_a_config_lacks_is_named(
    tmp_path: Path, fields: dict[str, Any], ranks: int, text: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        figures_of(load_shape(config(tmp_path, **fields)), Load(ranks=ranks))
    with pytest.raises(InvalidArgumentError, match="no readable config"):
        load_shape(str(tmp_path / "none.json"))
