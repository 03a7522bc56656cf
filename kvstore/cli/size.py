"""``kvstore size``: memory, nodes, network and the master's load for a model and its requests."""

from __future__ import annotations

from typing import Any, Final

import click

from kvstore.cli.json_output import print_json
from kvstore.cli.options import command, json_option
from kvstore.cli.tables import console_of_names, table_of
from kvstore.config.setting_types import parse_size
from kvstore.planner.sizes import SHAPES, Load, figures_of, load_shape
from kvstore.runtime.formatting import duration_text, parse_duration, size_text

EXAMPLE = f"""\b
Examples:
  kvstore size llama-3-70b --tensor-parallel 8 --engines 16 --tokens 5000 --hits 0.8 --reuse 30min
  kvstore size model/config.json --dtype fp8 --engines 4 --memory 2TiB

\b
MODEL is a config.json of Hugging Face or its folder, or {", ".join(SHAPES)}.
The hit ratio of your requests is in kvstore plan.
"""

ELEMENT_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}


def _parse_reuse(_ctx: click.Context, _param: click.Parameter, text: str) -> float:
    if not (seconds := parse_duration(text)):
        raise click.BadParameter(f"{text!r} is no time: write 30min or 8h")
    return seconds


def _parse_memory(_ctx: click.Context, _param: click.Parameter, text: str) -> int:
    try:
        return parse_size(text) if text else 0
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_COUNT: Final = click.IntRange(min=1)


@command(epilog=EXAMPLE, help="Show what a model and its load need: memory, network, the master.")
@click.argument("model")
@click.option("--dtype", type=click.Choice([*ELEMENT_BYTES]), default="bfloat16",
              show_default=True, help="Type of the KV cache.")  # fmt: skip
@click.option("--tensor-parallel", "ranks", type=_COUNT, default=1, show_default=True,
              help="Ranks of an engine.")  # fmt: skip
@click.option("--block-tokens", type=_COUNT, default=16, show_default=True,
              help="Tokens of a block.")  # fmt: skip
@click.option("--engines", type=_COUNT, default=1, show_default=True)
@click.option("--tokens", "tokens_per_s", type=click.FloatRange(min=0, min_open=True),
              default=5_000, show_default=True,
              help="Prompt tokens a second of one engine, found ones included.")  # fmt: skip
@click.option("--hits", type=click.FloatRange(0, 1, max_open=True), default=0.8, show_default=True,
              help="The part of the prompt tokens that is found.")  # fmt: skip
@click.option("--reuse", "reuse_s", metavar="TIME", default="30min", show_default=True,
              callback=_parse_reuse,
              help="Idle time after which a block should still be found.")  # fmt: skip
@click.option("--memory", "memory_bytes", metavar="SIZE", default="", callback=_parse_memory,
              help="Instead of --reuse: memory of the pool.")  # fmt: skip
@click.option("--disk", "disk_bytes", metavar="SIZE", default="", callback=_parse_memory,
              help="All disks below it.")  # fmt: skip
@click.option("--replicas", type=_COUNT, default=1, show_default=True)
@click.option("--prompt-tokens", type=_COUNT, default=16_000, show_default=True,
              help="Tokens of a prompt.")  # fmt: skip
@click.option("--nodes", type=_COUNT, help="Nodes. Default: one per engine.")
@json_option
def size(model: str, dtype: str, as_json: bool, **load: Any) -> int:
    figures = figures_of(load_shape(model), Load(element_bytes=ELEMENT_BYTES[dtype], **load))
    if as_json:
        print_json(figures)
        return 0
    table = table_of("", right=("",), show_header=False)
    for name, value in figures.items():
        table.add_row(*_row(name, value))
    console = console_of_names(fits=True)
    console.print(
        f"{dtype}, blocks of {load['block_tokens']} tokens, {load['tokens_per_s']:,.0f} tokens/s "
        f"per engine, {load['hits']:.0%} of them found"
    )
    console.print(table)
    return 0


def _row(name: str, value: float) -> tuple[str, str]:
    words = name.replace("_per_s", "").replace("_bytes", "").removeprefix("bytes_")
    title, second = words.replace("_", " "), "/s" if "_per_s" in name else ""
    if "network" in name:
        return title, f"{value * 8 / 1e9:,.1f} Gbit/s each way"
    if "bytes" in name:
        return title, size_text(round(value)) + second
    if name.endswith("reuse_s"):
        return title.replace("reuse s", "reuse time"), duration_text(round(1000 * value))
    if name == "disk_writes_per_day":
        return title, f"{value:,.1f}"
    if "core" in name:
        return title, f"{value:.2f}"
    return title, f"{value:,.0f}{second}"
