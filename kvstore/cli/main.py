"""The command ``kvstore``: what an operator asks and does, each by one call of ``Client``."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NoReturn

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from kvstore._version import __version__
from kvstore.addresses import shown_place
from kvstore.calls import ClusterStatus, ObjectRow
from kvstore.cli.doctor import doctor
from kvstore.cli.options import (
    CONTEXT,
    FAILED,
    NOT_THERE,
    SOURCES,
    config_options,
    debug_option,
    json_option,
    run,
    version_option,
)
from kvstore.cli.show import (
    duration_text,
    key_from_text,
    key_text,
    plain,
    print_json,
    size_text,
)
from kvstore.config import ClientConfig, load
from kvstore.errors import UnsupportedValueError
from kvstore.limits import BATCH_KEYS_MAX, PROTOCOL_VERSION, Namespace

if TYPE_CHECKING:
    from kvstore import Client

PIECE_BYTES = 4 << 20
"""Read and written at once: the progress bar moves at least a few times a second."""

LIST_ROWS_MAX = 1_000
"""Rows of ``ls`` on a terminal, where nobody reads more; piped, it prints all."""

EXAMPLE = """\b
Examples:
  kvstore status
  kvstore put greeting hello.txt && kvstore get greeting
  kvstore ls --prefix gre --json
  kvstore --master 10.0.0.7:50001 rm greeting

\b
Exit codes: 0 done, 1 failed, 2 asked wrongly, 3 no such object.
"""

# Memory that lives as long as one command helps nobody.
SETTINGS_WITHOUT = ("memory",)


@dataclass(frozen=True, kw_only=True)
class Session:
    """What every command is given: its settings and how to print."""

    config: ClientConfig
    given: frozenset[str]
    """Settings that were options of this very command line."""
    as_json: bool

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        from kvstore import Client  # not above: --help should not wait for numpy and grpc

        with Client(config=self.config) as client:
            yield client

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.config.namespace)


def connects(*only: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of a ``Session`` a command with ``--master``, ``--json`` and so on."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        keys = ("master", "timeout_ms", *only)

        @functools.wraps(function)
        def command(config_path: str | None, as_json: bool, **arguments: Any) -> Any:
            outer: dict[str, Any] = click.get_current_context().obj
            here = {key: arguments.pop(key) for key in keys}
            flags = outer["flags"] | {k: v for k, v in here.items() if v is not None}
            config = load(
                ClientConfig,
                flags | {"memory": 0},
                config_path=outer["config_path"] if config_path is None else config_path,
                origin="{flag}",
            )
            given = frozenset(key for key, value in flags.items() if value is not None)
            session = Session(config=config, given=given, as_json=as_json or outer["as_json"])
            return function(session, **arguments)

        with_options = config_options(ClientConfig, only=keys)(command)
        return json_option(debug_option(with_options))

    return wrap


class Commands(click.Group):
    """With ``bench``, which is loaded only when it is asked for: it needs packages whose absence
    ``doctor`` is there to tell."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), "bench"])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "bench":
            from kvstore.cli.bench import bench

            return bench
        return super().get_command(ctx, cmd_name)


@click.group(cls=Commands, context_settings=CONTEXT, epilog=f"{EXAMPLE}\n\n{SOURCES}")
@config_options(ClientConfig, without=SETTINGS_WITHOUT)
@json_option
@debug_option
@version_option
@click.pass_context
def cli(context: click.Context, /, config_path: str | None, as_json: bool, **flags: object) -> None:
    """Look into a kvstore cluster and change what is in it."""
    context.obj = {"config_path": config_path, "as_json": as_json, "flags": flags}


def main() -> NoReturn:
    run(cli, "kvstore")


# --- commands ----------------------------------------------------------------------------------


@cli.command(epilog="\b\nExample:\n  kvstore status --master 10.0.0.7:50001")
@connects()
@click.option("--counters", is_flag=True, help="What happened since the master started, too.")
def status(session: Session, counters: bool) -> None:
    """Show the cluster at a glance: its nodes, their memory, what is in it."""
    with session.client() as client:
        found = client.status()
    if session.as_json:
        print_json(status_json(found))
        return
    console = Console()
    for part in status_tables(found, shown_place(session.config.master), counters=counters):
        console.print(part, highlight=False)


@cli.command(epilog="\b\nExample:\n  kvstore ls --namespace llama --prefix hex:9f86")
@connects("namespace")
@click.option("--prefix", default="", help="Only keys that begin so (hex:... for binary ones).")
@click.option("--limit", type=click.IntRange(min=0), help="At most so many; 0: all.")
def ls(session: Session, prefix: str, limit: int | None) -> None:
    """List objects, of all namespaces unless --namespace is given."""
    namespace = session.config.namespace if "namespace" in session.given else ""
    start = key_from_text(prefix) if prefix else b""
    table_wanted = sys.stdout.isatty() and not session.as_json
    rows_max = limit if limit is not None else LIST_ROWS_MAX if table_wanted else 0
    with session.client() as client:
        rows = iter(client.list_objects(namespace=namespace, prefix=start))
        shown = itertools.islice(rows, rows_max or None)
        if session.as_json:
            for row in shown:
                print_json(row_json(row))
        elif table_wanted:
            Console().print(rows_table(shown), highlight=False)
        else:
            for row in shown:
                click.echo("\t".join(row_cells(row, exact=True)))
        if rows_max and next(rows, None) is not None:
            click.echo(f"There are more: --limit {rows_max} reached.", err=True)


@cli.command(epilog="\b\nExample:\n  kvstore stat greeting")
@connects("namespace")
@click.argument("key")
@click.option("--hex", "as_hex", is_flag=True, help="KEY is hexadecimal.")
def stat(session: Session, key: str, as_hex: bool) -> int:
    """Show what is known of one object: size, place, lease, parent."""
    wanted = key_from_text(key, as_hex=as_hex)
    with session.client() as client:
        found = client.stat(wanted, namespace=session.namespace)
        if found is None or found.detail.row is None:
            return not_there(session, [wanted])
        nodes = {s.segment_id: node.name for node in client.status().nodes for s in node.segments}
    detail, header, row = found.detail, found.header, found.detail.row
    places = detail.placements
    fields = {
        **row_json(row),
        "parent": key_text(detail.parent) if detail.parent else None,
        "children": detail.children,
        "version": f"{detail.version.epoch}.{detail.version.counter}",
        "idle_ms": detail.idle_ms,
        "content": json.loads(header.descriptor or b"{}") if header is not None else None,
        "places": [
            {"node": nodes.get(segment, ""), "segment": segment, "offset": offset}
            for segment, offset in zip(places.segments, places.offsets, strict=True)
        ],
    }
    if session.as_json:
        print_json(fields)
        return 0
    table = Table.grid(padding=(0, 2))
    for name, value in fields.items():
        if name == "places":
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
            text = "-" if value is None else str(value)
        table.add_row(name, text)
    Console().print(table, highlight=False, markup=False)
    return 0


@cli.command(epilog="\b\nExamples:\n  kvstore put greeting hello.txt\n  date | kvstore put now -")
@connects("namespace", "replicas", "put_wait_ms")
@click.argument("key")
@click.argument("file", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--hex", "as_hex", is_flag=True, help="KEY is hexadecimal.")
@click.option("--npy", is_flag=True, help="FILE is a NumPy array (.npy): keep dtype and shape.")
@click.option("--parent", help="Key of the object that this one continues.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
def put(
    session: Session,
    key: str,
    file: str,
    as_hex: bool,
    npy: bool,
    parent: str | None,
    overwrite: bool,
) -> None:
    """Store a file as one object. FILE may be - for standard input."""
    from kvstore.calls import PutOutcome

    wanted = key_from_text(key, as_hex=as_hex)
    parent_key = key_from_text(parent, as_hex=as_hex) if parent is not None else None
    with byte_progress(session) as progress:
        content = read_file(file, progress)
        value: Any = array_of(content, file) if npy else content
        size = value.nbytes if npy else len(content)
        progress.step("storing", None)
        with session.client() as client:
            outcome = client.put(
                wanted,
                value,
                namespace=session.namespace,
                parent=parent_key,
                replicas=session.config.replicas,
                overwrite=overwrite,
                wait_ms=session.config.put_wait_ms,
            )
    told = {
        PutOutcome.STORED: "stored",
        PutOutcome.FOUND: "already there",
        PutOutcome.BEING_WRITTEN: "being written by another",
    }.get(outcome, outcome.name.lower())
    if session.as_json:
        print_json({"key": key_text(wanted), "outcome": outcome.name.lower(), "size": size})
    else:
        click.echo(f"{key_text(wanted)}: {told}, {size_text(size)}")


@cli.command(
    epilog="\b\nExamples:\n  kvstore get greeting\n  kvstore get block-7 --npy -o block.npy"
)
@connects("namespace")
@click.argument("key")
@click.option("-o", "--output", metavar="FILE", help="Write there instead of standard output.")
@click.option("--hex", "as_hex", is_flag=True, help="KEY is hexadecimal.")
@click.option("--npy", is_flag=True, help="Write a NumPy file, with dtype and shape.")
def get(session: Session, key: str, output: str | None, as_hex: bool, npy: bool) -> int:
    """Fetch one object's bytes."""
    wanted = key_from_text(key, as_hex=as_hex)
    with byte_progress(session) as progress:
        progress.step("fetching", None)
        with session.client() as client:
            # As bytes it needs neither torch nor NumPy's idea of the dtype.
            kind: Literal["numpy", "bytes"] = "numpy" if npy else "bytes"
            value: Any = client.get(wanted, namespace=session.namespace, kind=kind)
        if value is None:
            progress.stop()
            return not_there(session, [wanted])
        content = npy_of(value) if npy else memoryview(value)
        to_stdout = output in (None, "-")
        if to_stdout and sys.stdout.isatty() and not is_text(content):
            progress.stop()
            raise click.UsageError("This is not text: name a file with -o, or pipe it.")
        progress.step("writing", len(content))
        if to_stdout or output is None:
            copy_out(content, sys.stdout.buffer, progress)
        else:
            write_file(Path(output), content, progress)
    if session.as_json and not to_stdout:
        print_json({"key": key_text(wanted), "size": len(content), "file": output})
    return 0


@cli.command(epilog="\b\nExample:\n  kvstore rm greeting farewell")
@connects("namespace")
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
@click.option("--hex", "as_hex", is_flag=True, help="Each KEY is hexadecimal.")
def rm(session: Session, keys: tuple[str, ...], as_hex: bool) -> int:
    """Remove objects: hidden at once, their memory is free when nobody reads it any more."""
    wanted = list(dict.fromkeys(key_from_text(key, as_hex=as_hex) for key in keys))
    removed: list[bool] = []
    with session.client() as client:
        for start in range(0, len(wanted), BATCH_KEYS_MAX):
            some = wanted[start : start + BATCH_KEYS_MAX]
            removed += client.remove_many(some, namespace=session.namespace)
    missing = [key for key, was_there in zip(wanted, removed, strict=True) if not was_there]
    if session.as_json:
        print_json({"removed": sum(removed), "missing": [key_text(key) for key in missing]})
        return NOT_THERE if missing else 0
    click.echo(f"removed {sum(removed)}")
    return not_there(session, missing) if missing else 0


@cli.command(epilog="\b\nExample:\n  kvstore clear --namespace llama")
@connects("namespace")
@click.option("--all", "everything", is_flag=True, help="Of every namespace.")
@click.option("--yes", "-y", is_flag=True, help="Do not ask, on a terminal.")
def clear(session: Session, everything: bool, yes: bool) -> None:
    """Remove all objects of a namespace, or of all."""
    if everything and "namespace" in session.given:
        raise click.UsageError("--all and --namespace exclude each other.")
    namespace = None if everything else session.namespace
    what = "every namespace" if everything else f"namespace {namespace}"
    if sys.stdin.isatty() and not yes and not session.as_json:
        click.confirm(f"Remove all objects of {what}?", abort=True, err=True)
    columns = (TextColumn("removing"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with session.client() as client, bar(session, *columns) as shown:
        task = shown.add_task("", total=None)

        def report(removed: int, remaining: int) -> None:
            shown.update(task, completed=removed, total=removed + remaining)

        removed = client.clear(namespace, progress=report)
    if session.as_json:
        print_json({"removed": removed, "namespace": namespace})
    else:
        click.echo(f"removed {removed} of {what}")


@cli.command(
    epilog="\b\nExamples:\n  kvstore drain host-7          then stop it, or upgrade it\n"
    "  kvstore drain host-7 --undo"
)
@connects()
@click.argument("node")
@click.option("--undo", is_flag=True, help="Take it back: the node is given new objects again.")
@click.option("--discard", is_flag=True, help="Let it leave with what found no room elsewhere.")
@click.option("--wait-s", type=click.FloatRange(min=0), default=60.0, show_default=True,
              help="How long to go on when nothing moves: for puts under way there.")  # fmt: skip
def drain(session: Session, node: str, undo: bool, discard: bool, wait_s: float) -> int:
    """Empty a node: nothing new goes there, what it holds moves elsewhere, then it leaves."""
    from kvstore.cli.drain import drain_node

    with session.client() as client, byte_progress(session) as progress:
        if undo:
            client.drain(node, undo=True)
            progress.stop()
            said = {"node": node, "draining": False}
            print_json(said) if session.as_json else click.echo(f"{node} is given objects again")
            return 0
        progress.step(f"emptying {node}", None)
        done = drain_node(client, node, discard=discard, wait_s=wait_s, told=progress.reach)
    if session.as_json:
        print_json(done.as_json())
        return 0 if done.has_left else FAILED
    counted = f"{done.moved} objects ({size_text(done.moved_bytes)}) moved"
    if done.evicted:
        counted += f", {done.evicted} used longer ago made room"
    if done.left:
        counted += f", {done.left} ({size_text(done.left_bytes)}) found no room elsewhere"
    if done.corrupt:
        counted += f", {done.corrupt} are corrupt"
    if done.has_left:
        click.echo(f"{node} has left: {counted}")
        return 0
    click.echo(f"{node} is still there, and given nothing new: {counted}")
    if done.unfinished:
        click.echo(f"{done.unfinished} puts, allocations or moves under way did not end in time")
    click.echo(f"Lose the rest: kvstore drain {node} --discard; or take it back: --undo", err=True)
    return FAILED


@cli.command(epilog="\b\nExample:\n  kvstore version --json")
@json_option
@debug_option
@click.pass_context
def version(context: click.Context, as_json: bool) -> None:
    """Show the versions of this program and of what it runs on."""
    versions = {
        "kvstore": __version__,
        "protocol": PROTOCOL_VERSION,
        "python": platform.python_version(),
    }
    if as_json or context.obj["as_json"]:
        print_json(versions)
    else:
        for name, number in versions.items():
            click.echo(f"{name} {number}")


cli.add_command(doctor)


# --- what is shown -----------------------------------------------------------------------------


def not_there(session: Session, keys: Iterable[bytes]) -> int:
    for key in keys:
        if session.as_json:
            print_json(None)
        click.echo(f"kvstore: {key_text(key)} is not in {session.namespace}", err=True)
    return NOT_THERE


def row_json(row: ObjectRow) -> dict[str, Any]:
    return {**plain(row), "key": key_text(row.key), "key_hex": row.key.hex()}


def row_cells(row: ObjectRow, *, exact: bool) -> list[str]:
    return [
        row.namespace,
        key_text(row.key),
        str(row.size) if exact else size_text(row.size),
        str(row.replicas),
        str(row.depth),
        str(row.leased_ms) if exact else duration_text(row.leased_ms) if row.leased_ms else "-",
        row.state,
    ]


def rows_table(rows: Iterable[ObjectRow]) -> Table:
    table = Table("namespace", "key", box=None, pad_edge=False)
    for name in ("size", "replicas", "depth", "leased"):
        table.add_column(name, justify="right")
    table.add_column("state")
    for row in rows:
        table.add_row(*row_cells(row, exact=False))
    return table


def status_json(found: ClusterStatus) -> dict[str, Any]:
    return {**plain(found), "counters": dict(found.counters)}


def status_tables(found: ClusterStatus, master: str, *, counters: bool) -> Iterator[Any]:
    size = sum(segment.size for node in found.nodes for segment in node.segments)
    used = sum(segment.used for node in found.nodes for segment in node.segments)
    objects = sum(namespace.objects for namespace in found.namespaces)
    who = f"leader {found.leader}" if found.leader else f"master {master}"
    if found.leader and found.leader != master:
        who += f" (found by {master})"
    yield (
        f"{who}, version {found.version}, epoch {found.epoch}, up {duration_text(found.uptime_ms)}"
    )
    share = f" ({100 * used / size:.0f} %)" if size else ""
    counted = f"{objects} object" + ("" if objects == 1 else "s")
    yield f"{counted}, {size_text(used)} of {size_text(size)} used{share}\n"

    if found.nodes:
        nodes = Table("node", "state", "address", box=None, pad_edge=False)
        for name in ("used", "of", "largest free", "last heard"):
            nodes.add_column(name, justify="right")
        for node in found.nodes:
            nodes.add_row(
                node.name,
                node.state,
                node.address or "-",
                size_text(sum(segment.used for segment in node.segments)),
                size_text(sum(segment.size for segment in node.segments)),
                size_text(max((s.largest_free for s in node.segments), default=0)),
                duration_text(node.silent_ms),
            )
        yield nodes
    else:
        yield "No node: start one with kvstore-node, or kvstore-master with --memory."

    if found.namespaces:
        namespaces = Table("\nnamespace", box=None, pad_edge=False)
        namespaces.add_column("\nobjects", justify="right")
        namespaces.add_column("\nbytes", justify="right")
        for row in found.namespaces:
            namespaces.add_row(row.name, str(row.objects), size_text(row.size))
        yield namespaces

    if counters:
        table = Table("\ncounter", box=None, pad_edge=False)
        table.add_column("\nsince start", justify="right")
        for name, number in found.counters:
            table.add_row(name, str(number))
        yield table


# --- progress ----------------------------------------------------------------------------------


def bar(session: Session, *columns: Any) -> Progress:
    """A progress bar on stderr; nothing where that is no terminal or JSON is wanted."""
    console = Console(stderr=True)
    off = session.as_json or not console.is_terminal
    return Progress(*columns, console=console, disable=off, transient=True)


class ByteProgress:
    """One bar after the other, each over some bytes."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: TaskID | None = None

    def step(self, what: str, size: int | None) -> None:
        """Begin the next step; ``None``: of unknown size."""
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(what, total=size)

    def reach(self, done: int, size: int) -> None:
        """So much of it is done."""
        if self._task is not None:
            self._progress.update(self._task, completed=min(done, size), total=size)

    def advance(self, size: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, size)

    def stop(self) -> None:
        self._progress.stop()


@contextlib.contextmanager
def byte_progress(session: Session) -> Iterator[ByteProgress]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    with bar(session, *columns) as progress:
        yield ByteProgress(progress)


# --- files and values --------------------------------------------------------------------------


def read_file(name: str, progress: ByteProgress) -> bytearray:
    """A file's bytes, or those of standard input for ``-``."""
    with contextlib.ExitStack() as stack:
        if name == "-":
            source: IO[bytes] = sys.stdin.buffer
            size = None
        else:
            source = stack.enter_context(open(name, "rb"))
            size = os.fstat(source.fileno()).st_size
        progress.step("reading", size)
        content = bytearray()
        while piece := source.read(PIECE_BYTES):
            content += piece
            progress.advance(len(piece))
    return content


def write_file(path: Path, content: memoryview, progress: ByteProgress) -> None:
    """Whole or not at all: what was there stays until the new content is complete."""
    if path.exists() and not path.is_file():  # a pipe, /dev/null
        with path.open("wb") as target:
            copy_out(content, target, progress)
        return
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as target:
        try:
            copy_out(content, target.file, progress)
            mask = os.umask(0)
            os.umask(mask)
            os.fchmod(target.fileno(), 0o666 & ~mask)  # as a plain open would have made it
            os.replace(target.name, path)
        except BaseException:
            os.unlink(target.name)
            raise


def copy_out(content: memoryview, target: IO[bytes], progress: ByteProgress) -> None:
    for start in range(0, len(content), PIECE_BYTES):
        progress.advance(target.write(content[start : start + PIECE_BYTES]))
    target.flush()


def array_of(content: bytearray, name: str) -> Any:
    import numpy as np

    try:
        return np.load(io.BytesIO(content), allow_pickle=False)
    except ValueError as error:
        raise UnsupportedValueError(
            f"{name} is not a NumPy array: {error}", advice="Leave out --npy to store its bytes."
        ) from error


def npy_of(array: Any) -> memoryview:
    """An array as a ``.npy`` file."""
    import numpy as np

    if array.dtype.isbuiltin == 2:  # ml_dtypes' bfloat16: the file would say "two bytes each"
        raise UnsupportedValueError(
            f"NumPy files cannot hold {array.dtype}", advice="Leave out --npy to get its bytes."
        )
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return file.getbuffer()


def is_text(content: memoryview) -> bool:
    """Whether a terminal can show it: looks at the beginning only, like other tools."""
    head = bytes(content[:4096])
    try:
        text = head.decode()
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # else a character cut in two
            return False
        text = head[: error.start].decode()
    return all(sign.isprintable() or sign in "\n\r\t" for sign in text)


if __name__ == "__main__":
    main()
