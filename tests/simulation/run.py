"""Many seeds (``make sim``, ``make sim SEEDS=200``), or one: ``--seed 7``.

A failure prints the seed, the options, its story (the last events that name the key or version
concerned, among the faults) and the command that runs to the same step again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace

from tests.simulation.cluster import Options, SimulatedCluster
from tests.simulation.faults import KINDS
from tests.simulation.oracle import SimulationError

TELLING = ("FAULT", "fenced", "joined", "master ", "leads", "steps down", "BROKEN", "dies",
           "starts", "---")  # fmt: skip

LINE_S = 15.0
"""Between two lines of progress."""


@dataclass(frozen=True)
class Result:
    """What came of one seed."""

    seed: int
    steps: int
    digest: str
    seconds: float
    counts: dict[str, int]
    failure: str = ""
    """What to print; empty: it went well."""
    rule: str = ""
    """That was broken."""


def run_seed(options: Options, steps: int | None = None, lines: int = 60) -> Result:
    """One run; ``steps``: only so many, of the phase with faults."""
    logging.disable()  # thousands of failed nodes
    started = time.perf_counter()
    cluster = SimulatedCluster(options)
    error: Exception | None = None
    try:
        if steps is None:
            cluster.run()
        else:
            cluster.run_steps(steps)
    except Exception as raised:
        error = raised
    finally:
        logging.disable(logging.NOTSET)
    rule = error.rule if isinstance(error, SimulationError) else type(error).__name__
    return Result(
        seed=options.seed,
        steps=cluster.scheduler.steps,
        digest=cluster.scheduler.digest,
        seconds=time.perf_counter() - started,
        counts=cluster.oracle.counts,
        failure="" if error is None else told(cluster, error, lines),
        rule="" if error is None else rule,
    )


def run_many(options: Options, seeds: Iterable[int], jobs: int) -> Iterator[Result]:
    """As they end, in ``jobs`` processes; ``seeds`` may be endless."""
    runs = (replace(options, seed=seed) for seed in seeds)
    if jobs == 1:
        yield from map(run_seed, runs)
        return
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(jobs, context, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        under_way: set[Future[Result]] = set()
        try:
            for run in itertools.chain(runs, itertools.repeat(None)):
                if run is not None:
                    under_way.add(pool.submit(run_seed, run))
                    if len(under_way) <= jobs:
                        continue
                if not under_way:
                    return
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one and tell what happened")
    parser.add_argument(
        "--seeds", default="", metavar="N or FIRST:BEHIND", help="so many; default: until stopped"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="at the same time")
    parser.add_argument("--steps", type=int, help="of --seed, only so many; then the digest")
    parser.add_argument("--seconds", type=float, default=8.0, help="of faults, virtual")
    parser.add_argument("--masters", type=int, default=0, help="how many; 0: the seed decides")
    parser.add_argument("--faults", default=",".join(KINDS), help="kinds, separated by commas")
    parser.add_argument("--nodes", type=int, default=3, help="how many")
    parser.add_argument("--disks", action="store_true", help="nodes have disks")
    parser.add_argument("--lines", type=int, default=60, help="of the story of a failure")
    given = parser.parse_args(arguments)
    options = Options(
        seed=0,
        fault_seconds=given.seconds,
        masters=given.masters,
        nodes=given.nodes,
        disks=given.disks,
        faults=tuple(filter(None, given.faults.split(","))),
    )
    if given.seed is not None:
        result = run_seed(replace(options, seed=given.seed), given.steps, given.lines)
        print(line_of(result))
        print(result.failure or sorted(result.counts.items()))
        return bool(result.failure)
    first, colon, behind = given.seeds.rpartition(":")
    if not given.seeds:
        seeds: Iterable[int] = itertools.count(1)
    else:
        seeds = range(int(first) if colon else 1, int(behind) + (not colon))
    findings: dict[str, list[int]] = {}
    started = shown = time.monotonic()
    steps = 0
    try:
        for number, result in enumerate(run_many(options, seeds, given.jobs), 1):
            steps += result.steps
            if result.failure:
                findings.setdefault(result.rule, []).append(result.seed)
                print(line_of(result), result.failure, sep="\n", flush=True)
            now = time.monotonic()
            if now - shown >= LINE_S:
                shown = now
                speed = steps / (now - started)
                print(f"{number:,} seeds  {steps:,} steps  {speed:,.0f} steps/s", flush=True)
    except KeyboardInterrupt:
        pass
    print(f"{steps:,} steps, found: {findings or 'nothing'}")
    return bool(findings)


def line_of(result: Result) -> str:
    return (
        f"seed {result.seed}: {'FAILED' if result.failure else 'ok'} steps={result.steps} "
        f"digest={result.digest} {result.steps / result.seconds:,.0f} steps/s"
    )


def told(cluster: SimulatedCluster, error: Exception, lines: int) -> str:
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
    return "\n".join(
        (
            f"{type(error).__name__}: {error}{trace}",
            f"at step {cluster.scheduler.steps}, about {about}:",
            *story[-lines:],
            "the last events:",
            *last,
            f"again, to step {cluster.scheduler.steps}: {again(cluster.options)}",
        )
    )


def again(options: Options) -> str:
    """The command that does the same."""
    words = [f"python -m tests.simulation --seed {options.seed} --seconds {options.fault_seconds}"]
    if options.masters:
        words.append(f"--masters {options.masters}")
    if options.disks:
        words.append(f"--disks --nodes {options.nodes}")
    if options.faults != KINDS:
        words.append(f"--faults={','.join(options.faults)}")
    return " ".join(words)


if __name__ == "__main__":
    sys.exit(main())
