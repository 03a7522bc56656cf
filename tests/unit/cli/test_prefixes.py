"""``kvstore prefixes``: the tree, hostile names included."""

from __future__ import annotations

from kvstore.calls import Branch
from kvstore.cli.prefixes import lines
from kvstore.limits import Key


def branch(last: bytes, above: int = 0, *, first: bytes = b"", space: str = "n", children: int = 0,
           matched: int = 0, blocks: int = 1) -> Branch:  # fmt: skip
    return Branch(
        space, above, Key(first or last), Key(last), blocks, 0, 0, 1024, 0, children, matched, 0, 0,
        5_000, 0, 0, False, [3, 4, 9], [1, 2, 1],
    )  # fmt: skip


NODES = {3: "one", 4: "one", 9: "two"}


def test_branches_are_below_the_one_that_they_continue() -> None:
    rows = [
        branch(b"c", first=b"a", blocks=3, children=5, matched=7),
        branch(b"x", 1, matched=2),
        branch(b"y", 2),
        branch(b"d", 1),
        branch(b"z", space="m"),
    ]
    shown = list(lines(rows, NODES))
    assert shown == [
        "n:",
        "  a … c  3 blocks, 1.00 KiB, matched 7, unused 5.0 s, on one two",
        "    x  1 block, 1.00 KiB, matched 2, unused 5.0 s, on one two",
        "      y  1 block, 1.00 KiB, no match counted, unused 5.0 s, on one two",
        "    d  1 block, 1.00 KiB, no match counted, unused 5.0 s, on one two",
        "    and 3 more",
        "m:",
        "  z  1 block, 1.00 KiB, no match counted, unused 5.0 s, on one two",
    ]


def test_names_cannot_command_the_terminal() -> None:
    [space, line] = lines([branch(b"\x1b[2J\n", space="a\x1b[2J\n\u202e")], {3: "n\x1b[0m"})
    for text in (space, line):
        assert text.isprintable() or text.replace("…", "").isprintable(), text
