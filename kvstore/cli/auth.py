"""``kvstore auth``: the certificate authority (CA) of a cluster, and the certificates of its
processes. Works on files only."""

from __future__ import annotations

import functools
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import click

from kvstore.cli.json_output import print_json
from kvstore.cli.options import EXIT_FAILED, EXIT_NOT_FOUND, Group, debug_option, json_option
from kvstore.errors import UsageError
from kvstore.runtime import memory_protection
from kvstore.runtime.formatting import sanitize
from kvstore.runtime.watched_files import write_file
from kvstore.security.identity import ALL, ROLES

HERE: Final = "kvstore-ca"

EXAMPLE = """\b
Examples:
  kvstore auth init
  kvstore auth issue master-1 --role master
  kvstore auth issue decode-7 --role engine --namespace 'llama/*'
  kvstore auth show decode-7.auth
  kvstore auth revoke decode-7

\b
A process takes its file from KVSTORE_AUTH, or from --auth FILE. Another CA (cert-manager, step-ca,
openssl) can write such files, too: docs/security.md.
"""

authority_option: Final = click.option(
    "--ca", "folder", metavar="DIR", type=click.Path(path_type=Path), default=HERE,
    show_default=True, help="The CA's folder.",
)  # fmt: skip
many_option: Final = functools.partial(click.option, multiple=True, metavar="PATTERN")


@click.group(
    cls=Group,
    epilog=EXAMPLE,
    help="Manage identities: issue, inspect, rotate and revoke certificates.",
)
def auth() -> None:
    memory_protection.hide_memory()


def _now() -> datetime:
    return datetime.now(UTC)


@auth.command(
    epilog="""\b
Examples:
  kvstore auth init
  kvstore auth init --ca /srv/kvstore-ca

\b
Who can read this folder can make every identity: keep it off the hosts of the cluster.
""",
    help="Create a certificate authority (CA) for a cluster.",
)
@authority_option
@debug_option
def init(folder: Path) -> None:
    from kvstore.security.ca import create

    until = create(folder, _now()).certificate.not_valid_after_utc
    option = "" if folder == Path(HERE) else f" --ca {shlex.quote(str(folder))}"
    click.echo(f"{folder}: valid until {until:%Y-%m-%d}")
    click.echo("Back this folder up: without its key nothing more can be issued.")
    click.echo(f"Next: kvstore auth issue NAME --role ROLE{option}")


@auth.command(
    epilog="""\b
Examples:
  kvstore auth issue master-1 --role master --host 10.0.0.7
  kvstore auth issue host-7 --role node --node host-7
  kvstore auth issue decode-7 --role engine --namespace 'acme/*'
  kvstore auth issue eval --role engine --read 'llama/*' --days 30
  kvstore auth issue decode-7 --role engine --namespace '*' --folder decode-7

\b
A pattern is a name, or the beginning of names and a star. Quote it for the shell.
To renew a file, issue it again with --force: no process starts again.
curl can use the file as it is: curl --cacert FILE --cert FILE https://...
""",
    help="""Issue a certificate for one process.

    Roles: master and node for these processes, engine for all that put and get (within its
    namespaces), observer for numbers alone, admin for everything.
    """,
)
@click.argument("name")
@click.option("--role", "roles", type=click.Choice(ROLES), multiple=True, required=True,
              help="Role of the process; may be repeated.")  # fmt: skip
@many_option("--namespace", "both", help="An engine may read and write these; may be repeated.")
@many_option("--read", "reads", help="An engine may only read these; may be repeated.")
@many_option("--write", "writes", help="An engine may only write these; may be repeated.")
@many_option("--node", "nodes", help="Names that a node may have; may be repeated.  [default: all]")
@many_option("--host", "hosts", metavar="NAME_OR_ADDRESS",
             help="Where browsers, curl and Prometheus find a master or a node; may be repeated. "
             "Processes of kvstore need none.")  # fmt: skip
@click.option("--days", metavar="N", type=click.IntRange(1, 3_650), default=365,
              show_default=True, help="Validity of the certificate.")  # fmt: skip
@click.option("--folder", "into", metavar="DIR", type=click.Path(path_type=Path, file_okay=False),
              help="Write tls.key, tls.crt and ca.crt there, as for a secret of Kubernetes.  "
              "[default: one file, NAME.auth]")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace existing files.")
@authority_option
@debug_option
def issue(
    name: str, roles: tuple[str, ...], both: tuple[str, ...], reads: tuple[str, ...],
    writes: tuple[str, ...], nodes: tuple[str, ...], hosts: tuple[str, ...], days: int,
    into: Path | None, force: bool, folder: Path,
) -> None:  # fmt: skip
    from kvstore.security import ca
    from kvstore.security.certificates import CertificateRequest

    own = Path(ca.file_name(name) + ".auth")
    files = [into / each for each in ("tls.key", "tls.crt", "ca.crt")] if into else [own]
    for path in files:
        if path.exists() and not force:
            raise UsageError(
                f"{path} already exists", advice="Nothing was issued. --force replaces it."
            )
    wanted = CertificateRequest(name, roles, both + reads, both + writes, nodes or ALL, hosts, days)
    leaf = ca.issue(folder, wanted, _now())
    if into:
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
    whole = ca.content_of(leaf, shlex.join(["kvstore", *sys.argv[1:]]))
    for path, content in zip(files, leaf.pems if into else [whole], strict=True):
        write_file(path, content)
    who = f"{sanitize(leaf.identity.display_name, 200)}, number {leaf.identity.number}"
    click.echo(f"{into or own}: {who}, valid until {leaf.until:%Y-%m-%d}")


@auth.command(
    epilog="""\b
Examples:
  kvstore auth show decode-7.auth
  kvstore auth show /etc/kvstore/tls --json

\b
Needs no CA, and shows no key. It does not know whether a certificate is revoked.
Exit codes: 0 the file can be used, 1 something is wrong with it, 2 it is no such file.
""",
    help="Show identity, validity and problems of a certificate file.",
)
@click.argument("file", type=click.Path())
@json_option
@debug_option
def show(file: str, as_json: bool | None) -> int:
    from kvstore.security.certificates import inspect

    found = inspect(file)
    if as_json:
        print_json(found)
        return EXIT_FAILED if found["problems"] else 0
    problems = found.pop("problems")
    for key, value in found.items():
        text = value if isinstance(value, str) else ", ".join(value)
        click.echo(f"{key:<12}{sanitize(text, 1_000) or '-'}")
    for problem in problems:
        click.echo(f"problem: {sanitize(problem, 500)}", err=True)
    return EXIT_FAILED if problems else 0


@auth.command(
    epilog="""\b
Examples:
  kvstore auth revoke decode-7              every certificate of this name
  kvstore auth revoke 9c41f0aa52e3b817      one certificate

\b
Exit codes: 0 done, or revoked before; 3 nothing of this name or number was issued.
""",
    help="Revoke all certificates of a name, or one by its number.",
)
@click.argument("which", metavar="NAME|NUMBER")
@authority_option
@debug_option
def revoke(which: str, folder: Path) -> int:
    from kvstore.security import ca

    found = ca.revoke(folder, which, _now())
    if not found:
        click.echo(f"{folder} has issued nothing of the name or number {which}", err=True)
        return EXIT_NOT_FOUND
    for number in found:
        click.echo(f"revoked {which}, number {number}")
    click.echo(
        f"Copy {folder / ca.REVOKED_NAME} to the file of --auth-revoked on the host of each "
        "master and node: it counts within a second. Clients do not read it: they accept a revoked "
        "master or node until its certificate ends, unless they trust another CA."
    )
    return 0
