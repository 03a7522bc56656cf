"""What all commands share: options made from the configuration classes, errors, exit codes.

Exit codes: 0 done; 1 it failed; 2 it was asked wrongly; 3 there is no such object; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import click

from kvstore._version import __version__
from kvstore.config import CONFIG_VARIABLE, Config, settings
from kvstore.errors import KVStoreError, UsageError

FAILED = 1
ASKED_WRONGLY = 2
NOT_THERE = 3
INTERRUPTED = 130

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

SOURCES = (
    "Each setting is taken from its option, else its KVSTORE_* variable, else the TOML file "
    "(--config, ./kvstore.toml or ~/.config/kvstore/kvstore.toml), else its default."
)

Command = TypeVar("Command", bound=Callable[..., Any])


def config_options(
    kind: type[Config], *, only: Sequence[str] = (), without: Sequence[str] = ()
) -> Callable[[Command], Command]:
    """Adds an option for each setting of ``kind``, and ``--config``.

    An option that was not given is ``None``: the defaults are the configuration's, not click's, so
    that the environment and the file come between.
    """

    def add(command: Command) -> Command:
        for setting in reversed(settings(kind)):
            if setting.key in without or (only and setting.key not in only):
                continue
            flag = setting.flag
            note = f"  [{', '.join(setting.variables)}; default: {setting.default or 'empty'}]"
            command = click.option(
                flag if setting.metavar else f"{flag}/--no-{flag[2:]}",
                setting.key,
                metavar=setting.metavar or None,
                default=None,
                multiple=setting.many,
                callback=_given if setting.many else None,
                help=setting.help + note,
            )(command)
        return click.option(
            "--config",
            "config_path",
            metavar="FILE",
            help=f"TOML file to read; '' for none.  [{CONFIG_VARIABLE}]",
        )(command)

    return add


def _given(_context: click.Context, _option: click.Parameter, values: object) -> object:
    """For click an option that may come several times is there even when it was not given."""
    return values or None


def version_option(command: Command) -> Command:
    def show(context: click.Context, _option: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            click.echo(__version__)
            context.exit()

    return click.option(
        "--version",
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=show,
        help="Show the version and exit.",
    )(command)


def debug_option(command: Command) -> Command:
    """Read by ``run`` from the arguments, because it matters where no command is reached."""
    return click.option(
        "--debug", is_flag=True, expose_value=False, help="Show where in the program it failed."
    )(command)


def json_option(command: Command) -> Command:
    return click.option(
        "--json", "as_json", is_flag=True, help="Print JSON, errors on stderr included."
    )(command)


def parent_option(command: Command) -> Command:
    """For ``kvstore.children``, which starts our servers as processes of other programs."""
    return click.option(
        "--parent-fd",
        type=click.IntRange(min=0),
        hidden=True,
        help="Descriptor of a socket: say there when ready, and stop cleanly when it ends.",
    )(command)


def orphan_option(command: Command) -> Command:
    """For the node of a master."""
    return click.option(
        "--keep-orphaned",
        is_flag=True,
        hidden=True,
        help="Leave the memory in /dev/shm when the parent is killed.",
    )(command)


def run(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs a command and ends the process. Whatever goes wrong is told in one line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = given[: given.index("--")] if "--" in given else given
    code = _run(command, name, given, as_json="--json" in options, debug="--debug" in options)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    sys.exit(code)


def _run(
    command: click.Command, name: str, arguments: list[str], *, as_json: bool, debug: bool
) -> int:
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:  # kvstore ls | head
        _forget_stdout()
        return FAILED
    except click.ClickException as error:
        if as_json:
            _print_json("usage", error.format_message(), "", {})
        else:
            error.show()
        return error.exit_code
    except KVStoreError as error:
        if debug:
            traceback.print_exc()
        elif as_json:
            _print_json(error.code, error.message, error.advice, error.fields)
        else:
            click.echo(f"{name}: {error}", err=True)
        return ASKED_WRONGLY if isinstance(error, UsageError) else FAILED
    except OSError as error:
        if debug:
            traceback.print_exc()
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        if as_json:
            _print_json("os", what, "", {})
        elif not debug:
            click.echo(f"{name}: {what}", err=True)
        return FAILED
    except Exception as error:  # noqa: BLE001 - a person sees this, so one line and what to do
        if debug:
            traceback.print_exc()
        what = f"unexpected {type(error).__name__}: {error}"
        advice = "This is a bug: run it again with --debug and report what it shows."
        if as_json:
            _print_json("internal", what, advice, {})
        else:
            click.echo(f"{name}: {what}. {advice}", err=True)
        return FAILED


def _print_json(code: str, message: str, advice: str, fields: dict[str, Any]) -> None:
    error = {"code": code, "message": message, "advice": advice, "fields": fields}
    click.echo(json.dumps({"error": error}), err=True)


def _forget_stdout() -> None:
    """Whoever read it is gone: let the interpreter's last flush go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
