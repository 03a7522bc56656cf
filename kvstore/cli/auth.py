"""``kvstore auth``: the authority of a cluster, and the files by which processes prove who they
are. All of it works on files; no command talks to a cluster."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kvstore.auth.identity import ALL, ENGINE, MASTER, NODE, ROLES
from kvstore.cli.invocation import outer_of
from kvstore.cli.options import CONTEXT, FAILED, NOT_THERE, Group, debug_option, json_option
from kvstore.cli.show import print_json
from kvstore.errors import UsageError
from kvstore.process import dumps
from kvstore.texts import shown_text

if TYPE_CHECKING:
    from kvstore.auth.authority import Authority
    from kvstore.auth.credentials import Pems
    from kvstore.auth.identity import Identity
    from kvstore.auth.ledger import Row

HERE: Final = "kvstore-authority"
DAYS: Final = 365
SUFFIX: Final = ".auth"

# Shown once where they apply, in the words of docs/auth.md.
TELL_MASTERS: Final = (
    "Masters read the file that --auth-revoked names, within a second of a change. "
    "Copy {file} to the host of each master."
)
NOT_READ_BY_CLIENTS: Final = (
    "Only masters read that file. Until it expires, clients still accept this {role} if its "
    "key was stolen: replace the authority (kvstore auth rotate --new-authority)."
)

RENEWED: Final = (
    "The old authority stays trusted beside it. Next: kvstore auth rotate, which issues all anew; "
    "put the files in place; then kvstore auth rotate --drop-old."
)
DROPPED: Final = (
    "Files issued from now on trust this authority only. Files from before trust the old one, too, "
    "until they are issued anew: kvstore auth rotate."
)

SHOWN: Final = 8

Command = TypeVar("Command", bound=Callable[..., Any])

EXAMPLE = """\b
Examples:
  kvstore auth init
  kvstore auth issue master-1 --role master
  kvstore auth issue host-7 --role node
  kvstore auth issue decode-7 --role engine --namespace 'llama/*'
  kvstore auth ls
  kvstore auth show decode-7.auth
  kvstore auth revoke decode-7
  kvstore auth rotate

\b
A process takes its file from KVSTORE_AUTH, or from --auth FILE.
"""


@click.group(
    cls=Group,
    before=(),
    context_settings=CONTEXT,
    epilog=EXAMPLE,
    help="Write the files by which processes prove who they are, and revoke them.",
)
def auth() -> None:
    dumps.hide_memory()


def authority_option(command: Command) -> Command:
    return click.option(
        "--authority",
        "folder",
        metavar="DIR",
        type=click.Path(path_type=Path),
        default=HERE,
        show_default=True,
        help="The authority's folder.",
    )(command)


def _is_json(context: click.Context, as_json: bool) -> bool:
    return as_json or bool(outer_of(context)["as_json"])


def _now() -> datetime:
    return datetime.now(UTC)


# --- init -----------------------------------------------------------------------------------------


@auth.command(
    context_settings=CONTEXT,
    epilog="""\b
Examples:
  kvstore auth init
  kvstore auth init --authority /srv/kvstore-authority --cluster prod

\b
Who can read this folder can make every identity: keep it off the hosts of the cluster.
""",
    help="Write a new authority: a key that signs the identities of one cluster.",
)
@authority_option
@click.option("--cluster", metavar="NAME", default="", help="Part of the authority's name.")
@debug_option
def init(folder: Path, cluster: str) -> None:
    from kvstore.auth.authority import create, opened

    create(folder, cluster, _now)
    with opened(folder, _now) as authority:
        name, until = authority.name, authority.until
    option = "" if folder == Path(HERE) else f" --authority {shlex.quote(str(folder))}"
    click.echo(f"{folder}: {name}, valid until {until:%Y-%m-%d}")
    click.echo("Back this folder up: without its key nothing more can be issued. Next:")
    for example in (
        "master-1 --role master",
        "host-7 --role node",
        "decode-7 --role engine --namespace '*'",
        "me --role admin",
    ):
        click.echo(f"  kvstore auth issue {example}{option}")


# --- issue ----------------------------------------------------------------------------------------


@auth.command(
    context_settings=CONTEXT,
    epilog="""\b
Examples:
  kvstore auth issue master-1 --role master --host 10.0.0.7
  kvstore auth issue host-7 --role node --node host-7
  kvstore auth issue decode-7 --role engine --namespace 'acme/*'
  kvstore auth issue eval --role engine --read 'llama/*' --days 30
  kvstore auth issue prometheus --role observer
  kvstore auth issue decode-7 --role engine --namespace '*' --folder decode-7

\b
A pattern is a name, or the beginning of names and a star. Quote it for the shell.
curl can use the file as it is: curl --cacert FILE --cert FILE https://...
""",
    help="""Write a file by which one process proves who it is.

    Roles: master and node for these processes, engine for all that put and get (within its
    namespaces), observer for numbers alone, admin for everything.
    """,
)
@click.argument("name")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, required=True,
              help="What the process is; may be repeated.")  # fmt: skip
@click.option("--namespace", "both", metavar="PATTERN", multiple=True,
              help="An engine may read and write these; may be repeated.")  # fmt: skip
@click.option("--read", "reads", metavar="PATTERN", multiple=True,
              help="An engine may only read these; may be repeated.")  # fmt: skip
@click.option("--write", "writes", metavar="PATTERN", multiple=True,
              help="An engine may only write these; may be repeated.")  # fmt: skip
@click.option("--node", "nodes", metavar="PATTERN", multiple=True,
              help="Names that a node may have; may be repeated.  [default: all]")  # fmt: skip
@click.option("--host", "hosts", metavar="NAME_OR_ADDRESS", multiple=True,
              help="Where browsers, curl and Prometheus find a master or a node; may be "
              "repeated. Processes of kvstore need none.")  # fmt: skip
@click.option("--days", metavar="N", type=click.IntRange(min=1), default=DAYS, show_default=True,
              help="How long it is valid.")  # fmt: skip
@click.option("--out", metavar="FILE", type=click.Path(path_type=Path, dir_okay=False),
              help=f"The file to write.  [default: NAME{SUFFIX}]")  # fmt: skip
@click.option("--folder", "into", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Write tls.key, tls.crt and ca.crt there instead, as for a secret of "
              "Kubernetes.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace what is there.")
@authority_option
@json_option
@debug_option
@click.pass_context
def issue(
    context: click.Context,
    /,
    name: str,
    roles: Sequence[str],
    both: tuple[str, ...],
    reads: tuple[str, ...],
    writes: tuple[str, ...],
    nodes: tuple[str, ...],
    hosts: tuple[str, ...],
    days: int,
    out: Path | None,
    into: Path | None,
    force: bool,
    folder: Path,
    as_json: bool,
) -> None:
    from kvstore.auth.authority import opened
    from kvstore.auth.ledger import Wanted

    if out is not None and into is not None:
        raise click.UsageError("give --out or --folder, not both")
    wanted = Wanted(
        name, tuple(_distinct(roles)), _distinct([*both, *reads]), _distinct([*both, *writes]),
        _distinct(nodes) or ALL, _distinct(hosts), days,
    )  # fmt: skip
    place = into or out or Path(_file_name(name))
    with opened(folder, _now) as authority:
        if not force:
            _check_free(place, is_folder=into is not None)
        row, pems = authority.issue(wanted)
        _write(place, row, pems, is_folder=into is not None)
        _tell_issued(row, place, as_json=_is_json(context, as_json))
        _warn_of_end(row, authority)


def _distinct(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(values))


def _file_name(name: str, *, is_folder: bool = False) -> str:
    """In this folder, whatever the name."""
    plain = name.replace("/", "%2F")
    if is_folder:
        return plain.replace(".", "%2E") if plain in (".", "..") else plain
    return plain + SUFFIX


FOLDER_FILES: Final = ("tls.key", "tls.crt", "ca.crt")


def _check_free(place: Path, *, is_folder: bool) -> None:
    """Raises UsageError."""
    for each in [place / name for name in FOLDER_FILES] if is_folder else [place]:
        if each.exists():
            raise UsageError(
                f"{each} is there already", advice="Nothing was issued. --force replaces it."
            )


def _write(place: Path, row: Row, pems: Pems, *, is_folder: bool = False) -> None:
    from kvstore.auth.authority import content_of
    from kvstore.auth.files import PUBLIC, SECRET, write_whole

    if is_folder:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in zip(FOLDER_FILES, pems, strict=True):
            write_whole(place / name, content, SECRET if content is pems.key else PUBLIC)
    else:
        write_whole(place, content_of(row, pems, _command_of(row)), SECRET)


def _command_of(row: Row) -> str:
    """The command that makes such a file again."""
    wanted = row.wanted
    words = ["kvstore", "auth", "issue", wanted.name]
    for role in wanted.roles:
        words += ["--role", role]
    both = [each for each in wanted.reads if each in wanted.writes]
    for flag, values in (
        ("--namespace", both),
        ("--read", [each for each in wanted.reads if each not in both]),
        ("--write", [each for each in wanted.writes if each not in both]),
        ("--node", wanted.nodes if wanted.nodes != ALL else ()),
        ("--host", wanted.hosts),
    ):
        for value in values:
            words += [flag, value]
    return shlex.join([*words, "--days", str(wanted.days)])


def _tell_issued(row: Row, place: Path, *, as_json: bool) -> None:
    if as_json:
        print_json({**row.as_json(), "path": str(place)})
        return
    who = shown_text(row.wanted.identity().shown, 200)
    click.echo(f"{place}: {who}, valid until {row.until:%Y-%m-%d}, number {row.number}")


def _warn_of_end(row: Row, authority: Authority) -> None:
    if row.until >= authority.until.replace(microsecond=0):
        click.echo(
            f"note: {authority.name} ends on {authority.until:%Y-%m-%d}, and so does this "
            "certificate",
            err=True,
        )


# --- ls and show ----------------------------------------------------------------------------------


@auth.command(
    context_settings=CONTEXT,
    epilog="\b\nExamples:\n  kvstore auth ls\n  kvstore auth ls --json | jq -r .until",
    help="Show what the authority has issued.",
)
@authority_option
@json_option
@debug_option
@click.pass_context
def ls(context: click.Context, /, folder: Path, as_json: bool) -> None:
    from kvstore.auth.authority import issued

    now = _now()
    rows = issued(folder)
    if _is_json(context, as_json):
        for row in rows:
            print_json({**row.as_json(), "state": row.state(now)})
        return
    if not rows:
        click.echo("nothing was issued so far")
        return
    from kvstore.cli.tables import console_of_names, table_of

    table = table_of("name", "roles", "namespaces", "number", "until", "state")
    for row in rows:
        table.add_row(
            row.wanted.name,
            "+".join(row.wanted.roles),
            shown_text(row.wanted.shown_namespaces, 500),
            row.number,
            f"{row.until:%Y-%m-%d}",
            row.state(now),
        )
    console_of_names().print(table)


@auth.command(
    context_settings=CONTEXT,
    epilog="""\b
Examples:
  kvstore auth show decode-7.auth
  kvstore auth show /etc/kvstore/tls --json

\b
Needs no authority, and shows no key. It does not know whether a certificate is revoked.
Exit codes: 0 the file can be used, 1 something is wrong with it, 2 it is no such file.
""",
    help="Say who a file is, until when, and what is wrong with it.",
)
@click.argument("file", type=click.Path())
@json_option
@debug_option
@click.pass_context
def show(context: click.Context, /, file: str, as_json: bool) -> int:
    from kvstore.auth.holders import holder_of, shown
    from kvstore.auth.inspection import inspect
    from kvstore.auth.ledger import text_of

    found = inspect(file, _now())
    who = found.identity
    holder = "-" if who is None else shown(holder_of(who))
    if _is_json(context, as_json):
        print_json(
            {
                "identity": _identity_json(who) if who is not None else None,
                "number": found.number,
                "holder": holder,
                "since": text_of(found.since),
                "until": text_of(found.until),
                "hosts": found.hosts,
                "signed_by": found.signed_by or None,
                "trusts": found.trusts,
                "problems": found.problems,
            }
        )
        return FAILED if found.problems else 0
    fields: dict[str, str] = {}
    if who is not None:
        fields |= {"name": who.name, "roles": ", ".join(sorted(who.roles))}
        if ENGINE in who.roles:
            fields |= {"may read": ", ".join(who.reads) or "-"}
            fields |= {"may write": ", ".join(who.writes) or "-"}
        if NODE in who.roles:
            fields["node names"] = ", ".join(who.nodes)
    fields |= {
        "number": found.number,
        "holder": holder,
        "valid": f"{found.since:%Y-%m-%d %H:%M} to {found.until:%Y-%m-%d %H:%M} UTC",
        "server names": ", ".join(found.hosts) or "-",
        "signed by": found.signed_by or "-",
        "trusts": ", ".join(found.trusts),
    }
    for name, value in fields.items():
        click.echo(f"{name:<14}{shown_text(value, 1_000)}")
    for problem in found.problems:
        click.echo(f"problem: {shown_text(problem, 500)}", err=True)
    return FAILED if found.problems else 0


def _identity_json(who: Identity) -> dict[str, Any]:
    return {
        "name": who.name,
        "roles": sorted(who.roles),
        "reads": who.reads,
        "writes": who.writes,
        "nodes": who.nodes if NODE in who.roles else (),
    }


# --- revoke ---------------------------------------------------------------------------------------


@auth.command(
    context_settings=CONTEXT,
    epilog="""\b
Examples:
  kvstore auth revoke decode-7              every valid certificate of this name
  kvstore auth revoke decode-7 --old        all but the newest, once that is in place
  kvstore auth revoke 9c41f0aa52e3b817      one certificate

\b
Exit codes: 0 done, or revoked before; 3 nothing of this name or number was issued.
""",
    help="Revoke the certificates of a name, or the one of a number.",
)
@click.argument("which", metavar="NAME|NUMBER")
@click.option("--old", is_flag=True, help="Keep the newest certificate of the name.")
@authority_option
@json_option
@debug_option
@click.pass_context
def revoke(context: click.Context, /, which: str, old: bool, folder: Path, as_json: bool) -> int:
    from kvstore.auth.authority import opened
    from kvstore.auth.ledger import newest

    with opened(folder, _now) as authority:
        rows = authority.valid([which])
        if old:
            kept = newest(authority.rows).values()
            rows = [row for row in rows if row not in kept]
        known = any(which in (row.wanted.name, row.number) for row in authority.rows)
        if rows:
            authority.revoke(rows)
    if not known:
        click.echo(f"{which}: nothing of this name or number was issued", err=True)
        return NOT_THERE
    if _is_json(context, as_json):
        print_json({"revoked": [row.number for row in rows], "file": str(authority.revoked_file)})
    else:
        _tell_revoked(rows, authority.revoked_file)
    return 0


def _tell_revoked(rows: Sequence[Row], file: Path) -> None:
    for row in rows:
        click.echo(f"revoked {row.wanted.name}, number {row.number}")
    if not rows:
        click.echo("there is no such certificate that is valid")
        return
    click.echo(TELL_MASTERS.format(file=file))
    for role in (MASTER, NODE):
        if any(role in row.wanted.roles for row in rows):
            click.echo(NOT_READ_BY_CLIENTS.format(role=role))


# --- rotate ---------------------------------------------------------------------------------------


@auth.command(
    context_settings=CONTEXT,
    epilog="""\b
Examples:
  kvstore auth rotate                               every name that is valid, into this folder
  kvstore auth rotate decode-7 --out-dir files --revoke-old
  kvstore auth rotate --new-authority               a new key for the authority itself
  kvstore auth rotate --drop-old                    the end of that rotation

\b
Copy the new files over the old ones. Processes read them by themselves: no restart.
""",
    help="""Issue anew, with the rights of the newest certificate of each name.

    The old certificate stays valid until it ends, or is revoked.
    """,
)
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--out-dir", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              default=".", help="Where to write NAME.auth; replaces old files.  [default: .]"
              )  # fmt: skip
@click.option("--folders", is_flag=True,
              help="Write DIR/NAME/ with tls.key, tls.crt and ca.crt instead.")  # fmt: skip
@click.option("--revoke-old", is_flag=True,
              help="Revoke the older certificates at once: processes are refused until they have "
              "the new files. kvstore auth revoke --old does it later.")  # fmt: skip
@click.option(
    "--days",
    metavar="N",
    type=click.IntRange(min=1),
    help="How long.  [default: as long as before]",
)
@click.option("--new-authority", "renew", is_flag=True,
              help="Make a new key for the authority instead; the old one stays trusted."
              )  # fmt: skip
@click.option("--drop-old", is_flag=True, help="Stop trusting the authority's old key instead.")
@click.option(
    "--force", is_flag=True, help="With --drop-old: even if certificates of it are valid."
)
@authority_option
@json_option
@debug_option
@click.pass_context
def rotate(
    context: click.Context,
    /,
    names: tuple[str, ...],
    out_dir: Path,
    folders: bool,
    revoke_old: bool,
    days: int | None,
    renew: bool,
    drop_old: bool,
    force: bool,
    folder: Path,
    as_json: bool,
) -> int:
    from kvstore.auth.authority import opened

    as_json = _is_json(context, as_json)
    if renew + drop_old + bool(names or folders or revoke_old or days) > 1:
        raise click.UsageError(
            "--new-authority and --drop-old stand alone: each is a step of its own"
        )
    if force and not drop_old:
        raise click.UsageError("--force is for --drop-old")
    with opened(folder, _now) as authority:
        if renew:
            authority.rotate()
            _tell_authority(authority, RENEWED, as_json=as_json)
        elif drop_old:
            _check_unused(authority, force=force)
            authority.drop_old()
            _tell_authority(authority, DROPPED, as_json=as_json)
        else:
            return _issue_anew(
                authority, names, out_dir, days, folders=folders, revoke_old=revoke_old,
                as_json=as_json,
            )  # fmt: skip
    return 0


def _tell_authority(authority: Authority, then: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"authority": authority.name, "until": f"{authority.until:%Y-%m-%dT%H:%M:%SZ}"})
    else:
        click.echo(f"{authority.name}, valid until {authority.until:%Y-%m-%d}")
        click.echo(then)


def _check_unused(authority: Authority, *, force: bool) -> None:
    """Raises UsageError."""
    rows = authority.only_of_old()
    if rows and authority.has_old and not force:
        shown = ", ".join(row.wanted.name for row in rows[:SHOWN])
        more = ", ..." if len(rows) > SHOWN else ""
        raise UsageError(
            f"of {len(rows)} names, the old authority has signed the newest certificate: "
            f"{shown}{more}",
            advice="Files issued after this would refuse them. Issue them anew (kvstore auth "
            "rotate), put the files in place, and try again; or give --force.",
        )


def _issue_anew(
    authority: Authority,
    names: Sequence[str],
    out_dir: Path,
    days: int | None,
    *,
    folders: bool,
    revoke_old: bool,
    as_json: bool,
) -> int:
    from kvstore.auth.ledger import newest

    known = newest(authority.rows)
    missing = [name for name in names if name not in known]
    rows = [known[name] for name in names if name in known] if names else authority.to_rotate()
    if missing:
        for name in missing:
            click.echo(f"{name}: nothing of this name was issued", err=True)
        return NOT_THERE
    out_dir.mkdir(parents=True, exist_ok=True)
    old = authority.valid(row.wanted.name for row in rows)
    wanted = {row.wanted.name: row.wanted for row in rows}.values()
    for new, pems in authority.issue_all(each._replace(days=days or each.days) for each in wanted):
        place = out_dir / _file_name(new.wanted.name, is_folder=folders)
        _write(place, new, pems, is_folder=folders)
        _tell_issued(new, place, as_json=as_json)
        _warn_of_end(new, authority)
    if revoke_old and old:
        authority.revoke(old)
    if not as_json:
        if not rows:
            click.echo("there is no certificate that is valid")
        elif revoke_old:
            _tell_revoked(old, authority.revoked_file)
    return 0
