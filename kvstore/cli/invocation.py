"""What most commands of ``kvstore`` get: their settings, a client, how to print."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kvstore.cli.options import config_options, debug_option, json_option
from kvstore.config import ClientConfig, load, settings
from kvstore.limits import Namespace
from kvstore.runtime import memory_protection

if TYPE_CHECKING:
    from kvstore import Client

CONNECTION: Final = {
    "master": "",
    "auth": "File of this process's identity, which kvstore auth issue writes.",
    "cluster": "Name that the cluster must have.",
    "timeout_ms": "",
}
"""Settings that the help of every command with a client names, and what it says of them where the
setting's own words are long."""

OF_SOME: Final = ("memory", "namespace", "replicas")
"""Settings that are options only of the commands that use them."""

EVERYWHERE: Final = tuple(each.key for each in settings(ClientConfig) if each.key not in OF_SOME)
"""Settings that are options of every command with a client, as well as of ``kvstore`` itself:
people write them before the command or behind it."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One call of a command: its settings, and how to print."""

    config: ClientConfig
    given: frozenset[str]
    """Settings that were options of this very command line."""
    as_json: bool

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        from kvstore import Client  # not above: --help should not wait for numpy and grpc

        # A person reads why nothing happens; a program gets the error at the end.
        said = logging.NullHandler() if self.as_json else logging.StreamHandler()
        said.setFormatter(logging.Formatter("kvstore: %(message)s"))
        logging.getLogger("kvstore").addHandler(said)
        try:
            with Client(config=self.config) as client:
                yield client
        finally:
            logging.getLogger("kvstore").removeHandler(said)

    @property
    def namespace(self) -> Namespace:
        return Namespace(self.config.namespace)


def client_config(flags: Mapping[str, Any], config_path: str | None) -> ClientConfig:
    """The settings of a command with a client. Hides this process's memory if it has an identity.

    Raises:
        ConfigError
    """
    config = load(ClientConfig, flags, config_path=config_path, origin="{flag}")
    if config.auth:
        memory_protection.hide_memory()
    return config


def client_command(*only: str, **helps: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a function that takes an ``Invocation`` the options ``--master``, ``--json`` etc. The
    help names those of ``CONNECTION``; that of ``kvstore`` names all.

    Args:
        only: further settings that the command uses.
        helps: as ``only``, with what the setting does in this command.
    """

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        keys = (*EVERYWHERE, *only, *helps)

        @functools.wraps(function)
        def command(config_path: str | None, as_json: bool | None, **arguments: Any) -> Any:
            flags = {key: arguments.pop(key) for key in keys}
            config = client_config(flags | {"memory": 0}, config_path)
            given = frozenset(key for key, value in flags.items() if value is not None)
            invocation = Invocation(config=config, given=given, as_json=bool(as_json))
            return function(invocation, **arguments)

        with_options = config_options(
            ClientConfig,
            only=keys,
            common=EVERYWHERE,
            hidden=[key for key in EVERYWHERE if key not in CONNECTION],
            helps=CONNECTION | helps,
        )
        return json_option(debug_option(with_options(command)))

    return wrap
