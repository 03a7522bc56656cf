"""Tables of the command ``kvstore``. Imports rich on demand, which is slow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvstore.calls import ClusterStatus, NamespaceStatus, NodeStatus
from kvstore.runtime.formatting import duration_text, name_text, size_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDE: Final = 1 << 16
"""Line width that no row of a table reaches."""


def console_of_names(*, stderr: bool = False, fits: bool = False) -> Console:
    """Return a console that prints names unchanged: without markup or truncation. Each row of a
    table is one line, which a narrow terminal wraps.

    ``fits``: on a terminal, cells are wrapped within their columns instead, for prose and for
    repeated output.
    """
    from rich.console import Console

    # If TERM is dumb, rich ignores a width without a height.
    console = Console(
        stderr=stderr, markup=False, emoji=False, highlight=False, width=WIDE, height=25
    )
    if fits and console.is_terminal and not console.is_dumb_terminal:
        console = Console(stderr=stderr, markup=False, emoji=False, highlight=False)
    return console


def table_of(*columns: str, right: Sequence[str] = (), show_header: bool = True) -> Table:
    """Return a table whose cells are wrapped, never truncated.

    Args:
        columns: column headers.
        right: headers of further, numeric columns.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=show_header)
    for name in columns:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, overflow="fold", justify="right")
    return table


def print_fields(fields: dict[str, Any]) -> None:
    """Print the fields of one object, for ``kvstore stat``."""
    table = table_of("", "", show_header=False)
    for name, value in fields.items():
        if name == "locations":
            text = ", ".join(
                f"{p['node']} segment {p['segment']} at {p['offset']:#x}" for p in value
            )
        elif name.endswith("_ms"):
            name, text = name.removesuffix("_ms"), duration_text(value)
        elif name == "size":
            text = size_text(value) + (f" ({value} bytes)" if value >= 1024 else "")
        elif isinstance(value, dict):
            text = ", ".join(f"{k} {v}" for k, v in value.items())
        else:
            text = "-" if value is None else name_text(str(value))
        table.add_row(name, text)
    console_of_names().print(table)


def print_rows(rows: Iterable[Sequence[str]]) -> None:
    """Print rows of objects, for ``kvstore ls``."""
    table = table_of("namespace", "key", right=("size", "replicas", "depth", "leased"))
    table.add_column("state", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console_of_names().print(table)


def print_status(found: ClusterStatus, master: str, *, counters: bool) -> None:
    console = console_of_names()
    for part in _status_parts(found, master, counters=counters):
        console.print(part)


def _status_parts(found: ClusterStatus, master: str, *, counters: bool) -> Iterator[Any]:
    from kvstore.console.diagnostics.problems import (
        of_a_status,  # here, because shell completion imports this module
    )

    size, used = found.size, found.used
    objects = sum(namespace.objects for namespace in found.namespaces)
    yield head_text(found, master)
    share = f" ({100 * used / size:.0f} %)" if size else ""
    counted = f"{objects} object" + ("" if objects == 1 else "s")
    yield f"{counted}, {size_text(used)} of {size_text(size)} used{share}"
    pinned = sum(namespace.pinned_objects for namespace in found.namespaces)
    if pinned:
        pinned_size = sum(namespace.pinned_bytes for namespace in found.namespaces)
        yield f"{pinned} of them pinned, {size_text(pinned_size)} of memory"
    yield ""

    yield nodes_of(found)
    if found.namespaces:
        yield namespaces_of(found.namespaces)

    if found.tenants:
        right = ("bytes", "guarantee", "limit", "on disks", "limit", "pinned", "objects",
                 "evicted", "by others", "refused")  # fmt: skip
        tenants = table_of("\ntenant", right=tuple(f"\n{each}" for each in right))
        for tenant in found.tenants:
            tenants.add_row(
                name_text(tenant.name) if tenant.name else "(none)",
                size_text(tenant.bytes),
                size_text(tenant.guarantee_bytes),
                size_text(tenant.limit_bytes) if tenant.limit_bytes else "-",
                size_text(tenant.disk_bytes),
                size_text(tenant.disk_limit_bytes) if tenant.disk_limit_bytes else "-",
                size_text(tenant.pinned),
                str(tenant.objects),
                str(tenant.evicted_by_own),
                str(tenant.evicted_by_others),
                str(tenant.refused),
            )
        yield tenants

    if problems := of_a_status(found):
        yield ""
        for wrong in problems:
            yield f"{wrong.level}: {wrong.text}\n  {wrong.advice}"

    if counters:
        table = table_of("\ncounter", right=("\nsince start",))
        for name, number in found.counters:
            table.add_row(name, str(number))
        yield table


def head_text(found: ClusterStatus, master: str) -> str:
    """Return the line about the master. ``master``: its requested address."""
    who = f"leader {found.leader}" if found.leader else f"master {master}"
    if found.leader and found.leader != master:
        who += f" (found by {master})"
    if found.cluster:
        who = f"cluster {found.cluster}, {who}"
    age = duration_text(found.uptime_ms)
    return f"{who}, version {found.version}, epoch {found.epoch}, up {age}"


def nodes_of(found: ClusterStatus) -> Table | str:
    """Return the nodes and their memory; without nodes, a hint to start one."""
    if not found.nodes:
        return "No node: start one with kvstore-node, or kvstore-master with --memory."
    nodes = table_of("node", "state", "address", right=("used", "of", "largest free", "last heard"))
    # Versions are shown only if they differ, as during an upgrade.
    differ = {node.version for node in found.nodes} != {found.version}
    if differ:
        nodes.add_column("version", overflow="fold")
    media = {node.name: _media(node) for node in found.nodes}
    several = set(media.values()) != {"host"}
    if several:
        nodes.add_column("memory", overflow="fold")
    disks = any(node.disks for node in found.nodes)
    if disks:
        nodes.add_column("on disk", justify="right")
        nodes.add_column("of", justify="right")
    for node in found.nodes:
        nodes.add_row(
            node.name,
            _state(node),
            node.address or "-",
            *map(size_text, (node.used, node.size, node.largest_free)),
            duration_text(node.silent_ms),
            *([node.version or "not known"] if differ else []),
            *([media[node.name]] if several else []),
            *(_disk_sizes(node) if disks else []),
        )
    return nodes


def namespaces_of(rows: Sequence[NamespaceStatus]) -> Table:
    are_pinned = any(row.pinned_objects for row in rows)
    on_disks = any(row.disk_objects for row in rows)
    also = ["\npinned"] * are_pinned + ["\non disks"] * on_disks
    table = table_of("\nnamespace", right=("\nobjects", "\nbytes", *also))
    for row in rows:
        cells = [name_text(row.name), str(row.objects), size_text(row.size)]
        cells += [size_text(row.pinned_bytes)] * are_pinned + [str(row.disk_objects)] * on_disks
        table.add_row(*cells)
    return table


def _state(node: NodeStatus) -> str:
    """Return the node's state in words, such as ``alive, unreachable, entry gone``."""
    words = [node.state]
    if node.unreachable:
        words.append("unreachable")
    if node.shm_entry_missing:
        words.append("entry gone")
    if any(disk.failed for disk in node.disks):
        words.append("disk failed")
    if any(each.reports for each in node.segments) or any(each.reports for each in node.disks):
        words.append("reports its objects")
    elif ready_ms := max((segment.ready_ms for segment in node.segments), default=0):
        words.append(f"takes puts in {duration_text(ready_ms)}")
    return ", ".join(words)


def _disk_sizes(node: NodeStatus) -> list[str]:
    return [size_text(sum(getattr(disk, of) for disk in node.disks)) for of in ("used", "size")]


def _media(node: NodeStatus) -> str:
    """Return the medium of the node's memory: ``host``, ``cuda:0``."""
    return ", ".join(sorted({segment.device or "host" for segment in node.segments})) or "host"
