"""Settings, logs and parent processes, shared by the commands of servers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from kvstore.cli.options import (
    EXIT_FAILED,
    SOURCES,
    Command,
    config_options,
    debug_option,
    version_option,
)
from kvstore.config import MasterConfig, NodeConfig, ProxyConfig, load
from kvstore.runtime import logs, memory_protection
from kvstore.runtime.child_process import ParentLink
from kvstore.runtime.refused_calls import check_threads

Settings = MasterConfig | NodeConfig | ProxyConfig
Kind = type[MasterConfig] | type[NodeConfig] | type[ProxyConfig]


def serves(kind: Kind, examples: str, text: str) -> Callable[[Callable[..., int]], click.Command]:
    """Decorate a function as a server's command with the help ``text``. It receives the settings,
    the link to a parent (``kvstore.runtime.child_process`` starts servers as children), and its own
    options."""

    def wrap(serve: Callable[..., int]) -> click.Command:
        @functools.wraps(serve)
        def command(config_path: str | None, parent_fd: int | None, **given: Any) -> int:
            with ParentLink(parent_fd) as parent:
                flags = {key: given.pop(key) for key in kind.model_fields if key in given}
                check_threads()
                config: Settings = load(kind, flags, config_path=config_path, origin="{flag}")
                logs.configure(config.log_level, config.log_format)
                if config.auth:
                    memory_protection.hide_memory()
                return serve(config, parent, **given)
            return EXIT_FAILED  # the parent received the error

        parent_option = click.option(
            "--parent-fd",
            type=click.IntRange(min=0),
            hidden=True,
            help="Socket descriptor: report readiness there, and stop cleanly when it closes.",
        )
        made = config_options(kind)(parent_option(debug_option(version_option(command))))
        epilog = f"{examples}\n\n{SOURCES}"
        return click.command(cls=Command, epilog=epilog, help=text)(made)

    return wrap
