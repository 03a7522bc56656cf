"""``kvstore completion``: the script by which a shell completes commands, flags and values.

The script runs the program itself at each TAB, with a variable by which click prints what could
stand there (``_KVSTORE_COMPLETE``): what is completed is what this version has.
"""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import get_completion_class

from kvstore.cli.options import CONTEXT, Command, debug_option

SHELLS: Final = ("bash", "zsh", "fish")
PROGRAMS: Final = ("kvstore", "kvstore-master", "kvstore-node", "kvstore-proxy")

EXAMPLE = """\b
Examples:
  eval "$(kvstore completion bash)"                        in ~/.bashrc
  eval "$(kvstore completion zsh)"                         in ~/.zshrc, after compinit
  kvstore completion fish > ~/.config/fish/conf.d/kvstore.fish
"""


@click.command(
    cls=Command,
    before=(),
    context_settings=CONTEXT,
    epilog=EXAMPLE,
    help="Print the script by which a shell completes kvstore's commands, flags and values.",
)
@click.argument("shell", type=click.Choice(SHELLS))
@debug_option
def completion(shell: str) -> None:
    kind = get_completion_class(shell)
    assert kind is not None
    for program in PROGRAMS:
        variable = f"_{program.replace('-', '_')}_COMPLETE".upper()
        made = kind(click.Command(program), {}, program, variable)
        # click's script for fish would end a description at its first comma.
        source = made.source_template.replace('string split ","', 'string split -m 1 ","')
        click.echo(source % made.source_vars())
