"""The settings, client and output format of a command."""

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
"""Settings in the help of every command with a client, with a text if the setting's own is long."""

OF_SOME: Final = ("memory", "namespace", "replicas")
"""Settings that are options of some commands only."""

EVERYWHERE: Final = tuple(
    setting.key for setting in settings(ClientConfig) if setting.key not in OF_SOME
)
"""Settings that are options of ``kvstore`` and of every command with a client."""


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """One call of a command: its settings and output format."""

    config: ClientConfig
    given: frozenset[str]
    """Settings that were options of this command line."""
    as_json: bool

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        from kvstore import Client  # here, so that --help does not load numpy and grpc

        # A person sees reasons for delays; a program gets the error at the end.
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

    @property
    def given_namespace(self) -> Namespace | None:
        """The namespace of this command line; None: it names none."""
        return self.namespace if "namespace" in self.given else None


def client_config(flags: Mapping[str, Any], config_path: str | None) -> ClientConfig:
    """Return the settings of a command with a client. Hides this process's memory if it has an
    identity.

    Raises:
        ConfigError
    """
    config = load(ClientConfig, flags, config_path=config_path, origin="{flag}")
    if config.auth:
        memory_protection.hide_memory()
    return config


def client_command(*only: str, **helps: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options ``--master``, ``--json`` etc. to a function that takes an ``Invocation``. The
    help lists those of ``CONNECTION``; that of ``kvstore`` lists all.

    Args:
        only: further settings that the command uses.
        helps: as ``only``, with the help text for this command.
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
