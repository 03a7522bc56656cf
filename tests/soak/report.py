"""The table at the end of a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from tests.soak.workloads import DISKS

if TYPE_CHECKING:
    from tests.soak.run import Soak


def table(soak: Soak) -> str:
    """Operations, faults and violations, as Markdown."""
    checker = soak.checker
    by_verb: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for (verb, outcome), number in checker.counts.items():
        by_verb[verb][outcome] += number
    lines = ["", "| operation | calls | good | what else |", "|---|---|---|---|"]
    calls = 0
    disks = by_verb.pop(DISKS, Counter())
    for verb in sorted(by_verb, key=lambda verb: (verb.removeprefix("async "), verb)):
        outcomes = by_verb[verb]
        good = outcomes.pop("ok", 0)
        known = ("hit", "miss", "stored", "found", "being_written", "refused")
        whole = good + sum(n for name, n in outcomes.items() if name not in known)
        calls += whole
        rest = ", ".join(f"{name} {number:,}" for name, number in sorted(outcomes.items()))
        lines.append(f"| {verb} | {whole:,} | {good:,} | {rest} |")
    lines += [f"| all | {calls:,} | | |", "", "| fault | times |", "|---|---|"]
    lines += [f"| {kind} | {number} |" for kind, number in sorted(soak.nemesis.done.items())]
    if soak.left_out:
        lines += [f"| {kind} | left out: {why} |" for kind, why in soak.left_out.items()]
    if disks:
        lines += ["", "| disks | at least |", "|---|---|"]
        lines += [f"| {what} | {number:,} |" for what, number in sorted(disks.items())]
    if checker.notes:
        lines += ["", "| allowed, and noted | times |", "|---|---|"]
        lines += [f"| {what} | {number} |" for what, number in sorted(checker.notes.items())]
    lines += ["", "| violation | times | first after | for example |", "|---|---|---|---|"]
    rules = Counter(violation.rule for violation in checker.violations)
    for rule, number in rules.most_common():
        first = next(each for each in checker.violations if each.rule == rule)
        after = max(0.0, first.at - soak.began)
        example = first.detail.replace("\n", " ").replace("|", "\\|")[:160]
        lines.append(f"| {rule} | {number} | {after:.1f} s | {example} |")
    if not rules:
        lines.append("| none | 0 | | |")
    return "\n".join(lines) + "\n"
