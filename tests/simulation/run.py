"""One seed, or many: ``python -m tests.simulation --seed 7``, ``--seeds 1:500``.

A failure prints the seed, the options and the story of what it was about: the last events that name
the key or version concerned, among the faults. The same seed runs to the same step again.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
from dataclasses import replace

from tests.simulation.cluster import Cluster, Options
from tests.simulation.faults import KINDS
from tests.simulation.known import KNOWN_ISSUES
from tests.simulation.oracle import SimulationError

TELLING = ("FAULT", "fenced", "joined", "master ", "BROKEN", "dies", "starts", "---")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one and tell what happened")
    parser.add_argument("--seeds", default="1:51", help="FIRST:BEHIND_LAST (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="only so many steps, then print the digest")
    parser.add_argument("--seconds", type=float, default=8.0, help="of faults, virtual")
    parser.add_argument("--faults", default=",".join(KINDS), help="kinds, separated by commas")
    parser.add_argument("--waive", default="", help="further rules that are only counted")
    parser.add_argument("--strict", action="store_true", help="raise known issues, too")
    parser.add_argument("--lines", type=int, default=60, help="of the story of a failure")
    parser.add_argument("--keep-going", action="store_true", help="after a failing seed")
    given = parser.parse_args(arguments)
    logging.disable()  # thousands of failed nodes
    waived = frozenset(filter(None, given.waive.split(",")))
    if not given.strict:
        waived |= frozenset(KNOWN_ISSUES)
    options = Options(
        seed=0,
        fault_seconds=given.seconds,
        faults=tuple(filter(None, given.faults.split(","))),
        waived=waived,
    )
    if given.seed is not None:
        seeds = range(given.seed, given.seed + 1)
    else:
        first, _, behind = given.seeds.partition(":")
        seeds = range(int(first), int(behind))
    failed: dict[str, list[int]] = {}
    for seed in seeds:
        started = time.perf_counter()
        cluster = Cluster(replace(options, seed=seed))
        error: Exception | None = None
        try:
            if given.steps is None:
                cluster.run()
            else:
                cluster.run_steps(given.steps)
        except Exception as raised:
            error = raised
        took_s = time.perf_counter() - started
        steps = cluster.scheduler.steps
        print(
            f"seed {seed}: {'FAILED' if error else 'ok'} steps={steps} "
            f"digest={cluster.scheduler.digest} {steps / took_s:,.0f} steps/s "
            f"waived={cluster.oracle.waivers}",
            flush=True,
        )
        if given.seed is not None and error is None:
            print(sorted(cluster.oracle.counts.items()))
        if error is not None:
            rule = error.rule if isinstance(error, SimulationError) else type(error).__name__
            failed.setdefault(rule, []).append(seed)
            print(told(cluster, error, given.lines))
            if not given.keep_going:
                break
    if failed:
        print(f"failed: {failed}")
    return 1 if failed else 0


def told(cluster: Cluster, error: Exception, lines: int) -> str:
    """What a failure was about, and how to see it again."""
    about = error.about if isinstance(error, SimulationError) else []
    story = [
        f"  step {step:>6}  {now_us / 1e6:9.6f} s  {text}"
        for step, now_us, text in cluster.scheduler.story
        if any(word in text for word in (*about, *TELLING))
    ]
    last = [
        f"  step {step:>6}  {now_us / 1e6:9.6f} s  {text}"
        for step, now_us, text in list(cluster.scheduler.story)[-15:]
    ]
    trace = "" if isinstance(error, SimulationError) else "".join(traceback.format_exception(error))
    options = cluster.options
    again = (
        f"python -m tests.simulation --seed {options.seed} --seconds {options.fault_seconds} "
        f"--strict --waive={','.join(sorted(options.waived))}"
        + ("" if options.faults == KINDS else f" --faults={','.join(options.faults)}")
    )
    return "\n".join(
        (
            f"{type(error).__name__}: {error}{trace}",
            f"at step {cluster.scheduler.steps}, about {about}:",
            *story[-lines:],
            "the last events:",
            *last,
            f"again: {again}",
        )
    )


if __name__ == "__main__":
    sys.exit(main())
