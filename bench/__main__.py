"""The command ``python -m bench``: measures this store and another one side by side."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import click

from bench import history, mooncake, page, redis
from bench.client import REDIS
from bench.rows import BUSY, HICACHE, LMCACHE, TABLES, Row, chosen
from bench.side_by_side import NAMES, Plan, compare, comparisons, page_of, table_of

MODULES = {LMCACHE: "lmcache", HICACHE: "sglang"}
REDIS_PACKAGES = (*redis.PACKAGES, "numpy", "grpcio", "xxhash")
PACKAGES = (mooncake.PACKAGE, *MODULES.values(), "torch", "numpy", "grpcio", "xxhash")
POOL_BYTES = 2 << 30
QUICK_SECONDS = 0.1
EXAMPLE = """\b
Examples:
  python -m bench
  python -m bench --rows 'exist,match_prefix,*/shm/4KiB/1' --rounds 9 --out /tmp/found
  python -m bench --quick
  python -m bench --redraw docs/benchmarks/mooncake.json
"""


def _rows(context: click.Context, parameter: click.Parameter, value: str) -> list[Row]:
    table = TABLES[context.params["behind"] or context.params["beside"] or ""]
    rows = chosen([pattern.strip() for pattern in value.split(",")], table)
    if not rows:
        ids = ", ".join(row.id for row in table)
        raise click.BadParameter(f"there is no row {value!r}; the rows are {ids}")
    return rows


@click.command(epilog=EXAMPLE)
@page.rounds_option
@click.option("--seconds", type=click.FloatRange(min=0.01), default=0.5, show_default=True,
              help="Seconds per row, round and system.")  # fmt: skip
@click.option(
    "--behind", type=click.Choice(list(MODULES)), is_eager=True,
    help="Measure both systems as storage of LMCache, or of SGLang's HiCache, which must be"
    " installed.",
)  # fmt: skip
@click.option(
    "--beside", type=click.Choice([REDIS, BUSY]), is_eager=True,
    help="Measure Redis instead of Mooncake Store, or both stores next to busy loops.",
)  # fmt: skip
@click.option(
    "--rows", metavar="PATTERN,...", default="*", show_default=True, callback=_rows,
    help="Only these rows: OP/PATH/SIZE/BATCH or a prefix, such as 'put' or 'get/tcp'.",
)  # fmt: skip
@page.quick_option
@page.out_option
@page.redraw_option
def main(
    rounds: int,
    seconds: float,
    behind: str | None,
    beside: str | None,
    rows: list[Row],
    quick: bool,
    out: Path | None,
    redraw: Path | None,
) -> None:
    """Measure this store and another one on this machine, row by row, in turn.

    Needs the extra bench (pip install '.[bench]' in a checkout). Writes mooncake.md, mooncake.json
    and mooncake.png, or lmcache.md and so on, and adds a run of all rows to history.json. The exit
    status is 0 when everything was measured, whether or not the goals are met.
    """
    is_redis = beside == REDIS
    if behind and beside:
        raise click.UsageError("--behind has Mooncake Store beside this store, and not Redis")
    if redraw is not None:
        found = json.loads(redraw.read_text())
        found["rows"] = [each.as_json() for each in comparisons(found)]
    else:
        if reason := redis.missing() if is_redis else mooncake.missing() or _missing(behind):
            raise click.ClickException(reason)
        plan = Plan(rounds=rounds, seconds=seconds, pool_bytes=POOL_BYTES)
        if quick:
            plan = Plan(rounds=1, seconds=QUICK_SECONDS, pool_bytes=POOL_BYTES)
        found = page.measured(
            lambda progress: compare(rows, plan, progress),
            plan.rounds * len(rows),
            REDIS_PACKAGES if is_redis else PACKAGES,
        )
        if is_redis:
            found["machine"][redis.PROGRAM] = redis.version()
    table = table_of(found)
    name = NAMES[table][0]
    folder = out if redraw is None else redraw.parent
    runs = history.read(folder, name) if folder else []
    if redraw is None and not quick and len(rows) == len(TABLES[table]):
        runs = [*runs, history.entry(found, comparisons(found))][-history.RUNS_MAX :]
    page.publish(page_of(found, runs), found, out)
    if out is not None:
        history.write(out, name, runs)


def _missing(behind: str | None) -> str | None:
    """Why LMCache or SGLang cannot be used here, and what to do; None: it can."""
    if behind is None or importlib.util.find_spec(MODULES[behind]) is not None:
        return None
    return f"{MODULES[behind]} is missing; make bench-{behind} uses an environment that has it."


if __name__ == "__main__":
    main()
