"""Options generated from the configuration classes, errors and exit codes of all commands.

Exit codes: 0 done; 1 failed; 2 wrong usage; 3 no such object; 130 interrupted.
With ``--json`` an error is one line of JSON on stderr, whatever its exit code.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, TextIO, TypeVar

import click

from kvstore._version import __version__
from kvstore.config import CONFIG_VARIABLE, STRICT_VARIABLE, Config, settings
from kvstore.errors import KVStoreError, UsageError
from kvstore.runtime import descriptors
from kvstore.runtime.formatting import parse_duration
from kvstore.runtime.refused_calls import refused_call

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_NOT_FOUND = 3
INTERRUPTED = 130

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 1_000}

SOURCES = (
    "Each setting is taken from its option, else its KVSTORE_* variable, else the TOML file "
    "(--config, ./kvstore.toml or ~/.config/kvstore/kvstore.toml), else its default."
)

CommandT = TypeVar("CommandT", bound=Callable[..., Any])


SENTENCE_MAX: Final = 200
"""Characters of the first sentence of a help, which is not truncated."""


def sentence(command: click.Command | None) -> str:
    return "" if command is None else command.get_short_help_str(SENTENCE_MAX)


class Common(click.Option):
    """An option that many commands share, such as ``--json``."""


class Command(click.Command):
    """A command whose help lists its own options before the common ones."""

    def __init__(self, name: str | None, **settings: Any) -> None:
        super().__init__(name, **{"context_settings": CONTEXT, **settings})

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own: list[tuple[str, str]] = []
        common: list[tuple[str, str]] = []
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                is_common = isinstance(param, Common) or param is self.get_help_option(ctx)
                (common if is_common else own).append(record)
        for title, records in (("Options", own), ("Common options", common)):
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Duration(click.FloatRange):
    """A number of seconds, or a text with a unit."""

    name = "duration such as 90, 90s, 5min or 1h"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        seconds = parse_duration(str(value))
        return super().convert(value if seconds is None else seconds, param, ctx)


command: Final = functools.partial(click.command, cls=Command)


class Group(click.Group, Command):
    """A command with subcommands."""

    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write complete sentences; click would truncate them."""
        names = self.list_commands(ctx)
        with formatter.section("Commands"):
            formatter.write_dl([(name, sentence(self.get_command(ctx, name))) for name in names])

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands before the options."""
        self.format_commands(ctx, formatter)
        Command.format_options(self, ctx, formatter)


def config_options(
    kind: type[Config],
    *,
    only: Sequence[str] = (),
    without: Sequence[str] = (),
    common: Sequence[str] = (),
    hidden: Sequence[str] = (),
    helps: Mapping[str, str] | None = None,
) -> Callable[[CommandT], CommandT]:
    """Add an option for each setting of ``kind``, and ``--config``.

    An option that is absent after and before the command is ``None``: defaults come from the
    configuration, because the environment and the file take precedence.

    Args:
        only: the settings; empty: all except ``without``.
        common: settings listed with the common options in the help.
        hidden: settings omitted from the help.
        helps: help texts of settings for this command.
    """

    def add(command: CommandT) -> CommandT:
        for setting in reversed(settings(kind)):
            if setting.key in without or (only and setting.key not in only):
                continue
            flag = setting.flag
            note = f"  [{', '.join(setting.variables)}; default: {setting.default or 'empty'}]"
            command = click.option(
                flag if setting.metavar else f"{flag}/--no-{flag[2:]}",
                setting.key,
                cls=Common if setting.key in common else None,
                hidden=setting.key in hidden,
                metavar=setting.metavar or None,
                default=None,
                multiple=setting.many,
                callback=given_anywhere,
                shell_complete=_values_of(setting.metavar),
                help=((helps or {}).get(setting.key) or setting.help) + note,
            )(command)
        command = click.option(
            "--strict-config",
            cls=Common,
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_strict,
            help="Fail on unknown environment variables and configuration keys.  "
            f"[{STRICT_VARIABLE}]",
        )(command)
        return click.option(
            "--config",
            "config_path",
            cls=Common,
            metavar="FILE",
            callback=given_anywhere,
            shell_complete=_values_of("FILE"),
            help=f"TOML file to read; '' for none.  [{CONFIG_VARIABLE}]",
        )(command)

    return add


def _values_of(
    metavar: str,
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Return the completion of a value: a file, or one of several words (``tcp|rdma``)."""

    def values(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        if metavar == "FILE":
            return [CompletionItem(incomplete, type="file")]
        words = [each for each in metavar.split("|") if each.islower()]
        return [CompletionItem(word) for word in words if word.startswith(incomplete)]

    return values


def _strict(_context: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        os.environ[STRICT_VARIABLE] = "1"


def given_anywhere(context: click.Context, option: click.Parameter, value: object) -> object:
    """Return an option's value after the command, else before it (``kvstore --json status``), else
    ``None``; click passes an empty value for repeatable ones."""
    return (context.obj or {}).get(option.name) if value in (None, ()) else value


version_option: Final = click.version_option(__version__, message="%(version)s", cls=Common)

debug_option: Final = click.option(
    "--debug", cls=Common, is_flag=True, expose_value=False, help="Show a traceback on errors."
)
"""``run`` searches the arguments for it, because it applies before a command runs."""

json_option: Final = click.option(
    "--json", "as_json", cls=Common, is_flag=True, default=None, callback=given_anywhere,
    help="Print JSON, including errors on stderr.",
)  # fmt: skip


def confirm(question: str, *, yes: bool = False, as_json: bool = False) -> None:
    """Ask for confirmation before objects or processes are affected that the command line does not
    name.

    Raises:
        click.UsageError: there is no terminal to ask, and no --yes.
        click.Abort: the answer was no.
    """
    if yes:
        return
    if as_json or not sys.stdin.isatty():
        where = "with --json" if as_json else "without a terminal"
        raise click.UsageError(f"{question} It is not asked {where}: give --yes.")
    click.confirm(question, abort=True, err=True)


def run(command: click.Command, name: str, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and end the process. Each error is reported in one line."""
    descriptors.keep_standard()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # other than UTF-8: show \\u65e5
            stream.reconfigure(errors="backslashreplace")
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = given[: given.index("--")] if "--" in given else given
    code = _run(command, name, given, as_json="--json" in options, debug="--debug" in options)
    try:
        if sys.stdout is not None:  # closed when Python started
            sys.stdout.flush()
    except BrokenPipeError:
        _forget(sys.stdout)
    except OSError as error:  # a full disk: output is lost
        _forget(sys.stdout)
        click.echo(f"{name}: standard output: {error.strerror}", err=True)
        code = code or EXIT_FAILED
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except OSError:  # an error that nobody reads
        _forget(sys.stderr)
    sys.exit(code)


def _run(
    command: click.Command, name: str, arguments: list[str], *, as_json: bool, debug: bool
) -> int:
    try:
        result = command.main(arguments, prog_name=name, standalone_mode=False)
        return result if isinstance(result, int) else 0
    except BrokenPipeError:  # kvstore ls | head
        return EXIT_FAILED
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - reported in one line
        with contextlib.suppress(OSError):  # stderr was closed
            _print_error(error, name, as_json=as_json, debug=debug)
        return _code_of(error)


def _code_of(error: BaseException) -> int:
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, click.ClickException):
        return error.exit_code
    return EXIT_USAGE if isinstance(error, UsageError) else EXIT_FAILED


def _print_error(error: BaseException, name: str, *, as_json: bool, debug: bool) -> None:
    if isinstance(error, click.Abort | KeyboardInterrupt):
        if as_json:
            print_json_error("interrupted", "interrupted")
        return
    if isinstance(error, click.ClickException):
        if as_json:
            print_json_error("usage", error.format_message())
        else:
            error.show()
        return
    if debug:
        traceback.print_exception(error)
    advice, fields = "", None
    error = refused_call(error) or error
    if isinstance(error, KVStoreError):
        code, what, advice, fields = error.code, error.message, error.advice, error.fields
    elif isinstance(error, OSError):
        code = "os"
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        code, what = "internal", f"unexpected {type(error).__name__}: {error}"
        advice = "This is a bug: run it again with --debug and report what it shows."
    if as_json:
        print_json_error(code, what, advice, fields)
    elif not debug or code == "internal":
        click.echo(f"{name}: {what}" + (f". {advice}" if advice else ""), err=True)


def print_json_error(
    code: str, message: str, advice: str = "", fields: dict[str, Any] | None = None
) -> None:
    """Print an error as one line of JSON on stderr; stdout is for results only."""
    error = {"code": code, "message": message, "advice": advice, "fields": fields or {}}
    click.echo(json.dumps({"error": error}), err=True)


def print_not_found(message: str, *, as_json: bool, fields: dict[str, Any] | None = None) -> int:
    """Print the error on stderr; return its exit code."""
    if as_json:
        print_json_error("not_there", message, fields=fields)
    else:
        click.echo(f"kvstore: {message}", err=True)
    return EXIT_NOT_FOUND


def _forget(stream: TextIO | None) -> None:
    """Redirect an unwritable stream to /dev/null, for the interpreter's last flush."""
    if stream is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
