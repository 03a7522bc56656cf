"""Reads settings from arguments, the environment and a TOML file."""

from __future__ import annotations

import logging
import os
import re
import stat
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from kvstore.config.base import (
    CONFIG_VARIABLE,
    HTTP_TOKEN_VARIABLE,
    NATIVE_VARIABLE,
    PREFIX,
    STRICT_VARIABLE,
    Config,
    ConfigT,
    settings,
    unknown_setting,
    variables_of,
)
from kvstore.config.clients import ClientConfig, ConnectorConfig, ProxyConfig
from kvstore.config.servers import MasterConfig, NodeConfig
from kvstore.config.setting_types import InvalidSettingError, check_token
from kvstore.errors import ConfigError
from kvstore.runtime.watched_files import read_file

log = logging.getLogger("kvstore.config")

_NO_SETTINGS = (CONFIG_VARIABLE, HTTP_TOKEN_VARIABLE, NATIVE_VARIABLE, STRICT_VARIABLE)

# Kubernetes and Docker announce a service called "kvstore" to other containers in variables of
# these forms (KVSTORE_MASTER_PORT=tcp://10.0.0.7:50001).
_SERVICE_VARIABLE = re.compile(
    r"\w+_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_VALUE = re.compile(r"(tcp|udp|sctp)://")

_TOKEN_BYTES_MAX = 4_096

KINDS: tuple[type[Config], ...] = (
    MasterConfig,
    NodeConfig,
    ClientConfig,
    ConnectorConfig,
    ProxyConfig,
)


def load(
    kind: type[ConfigT],
    arguments: Mapping[str, object] | None = None,
    *,
    config_path: str | os.PathLike[str] | None = None,
    environ: Mapping[str, str] | None = None,
    origin: str = "argument {key}",
) -> ConfigT:
    """Load the configuration of one process from all sources.

    Args:
        arguments: values of flags or of a program; ``None``: absent.
        config_path: the TOML file; "": none; ``None``: ``KVSTORE_CONFIG`` or a default path.
        environ: instead of ``os.environ``.
        origin: the source of ``arguments`` in errors, with ``{key}`` or ``{flag}`` for the field.

    Raises:
        ConfigError: an unknown argument, an unreadable file, a value out of its range; with
            ``KVSTORE_STRICT_CONFIG`` any unknown name. Its fields: ``key``, ``origin`` and, where
            one is near, ``nearest``.
    """
    environ = os.environ if environ is None else environ
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    unknown: list[ConfigError] = []

    for key, value, where in _from_file(kind, config_path, environ, unknown):
        values[key], origins[key] = value, where
    for key, value, where in _from_environment(kind, environ, unknown):
        values[key], origins[key] = value, where
    _complain(unknown, strict=bool(environ.get(STRICT_VARIABLE)))
    for key, value in (arguments or {}).items():
        if value is not None:
            values[key] = value
            origins[key] = origin.format(key=key, flag="--" + key.replace("_", "-"))
    try:
        return kind(**values)
    except ConfigError as error:
        where = origins.get(str(error.fields.get("key", "")), "default")
        fields = {**error.fields, "origin": where}
        raise ConfigError(
            f"{error.message} (from {where})", advice=error.advice, **fields
        ) from None


def unknown_settings(config_path: str | os.PathLike[str] | None = None) -> list[ConfigError]:
    """Return the unknown settings of the environment and the file, which ``load`` logs.

    Raises:
        ConfigError: the file cannot be read.
    """
    unknown: list[ConfigError] = []
    list(_from_file(ClientConfig, config_path, os.environ, unknown))
    list(_from_environment(ClientConfig, os.environ, unknown))
    return unknown


def read_token(path: str, setting: str = "http_token_file") -> str:
    """Read a token or another secret from a file: one line.

    Raises:
        ConfigError: the file cannot be read, or contains no token. The error does not show it.
    """
    try:
        content = read_file(Path(path).expanduser(), setting, bytes_max=_TOKEN_BYTES_MAX)
        return check_token(content.decode("ascii", "replace").strip())
    except InvalidSettingError as error:
        what = f"{setting} {path} holds no token: it {error}"
        raise ConfigError(what, advice=error.advice, key=setting) from None


def http_token_given() -> str:
    """Return the HTTP token in the environment; may be empty."""
    return os.environ.get(HTTP_TOKEN_VARIABLE, "").strip()


_logged: set[str] = set()
"""Warnings already logged by this process."""


def _complain(unknown: list[ConfigError], *, strict: bool) -> None:
    for error in unknown:
        if strict:
            raise error
        if (text := str(error)) not in _logged:
            _logged.add(text)
            log.warning("unknown setting, ignored: %s", text)


def _from_environment(
    kind: type[Config], environ: Mapping[str, str], unknown: list[ConfigError]
) -> Iterable[tuple[str, object, str]]:
    known = {
        variable: (other, key)
        for other in KINDS
        for key in other.model_fields
        for variable in variables_of(other, key)
    }
    for variable, value in environ.items():
        if not variable.startswith(PREFIX) or variable in _NO_SETTINGS:
            continue
        if _SERVICE_VARIABLE.fullmatch(variable) or _SERVICE_VALUE.match(value):
            continue
        if variable not in known:
            unknown.append(unknown_setting(variable, "the environment", [*known, CONFIG_VARIABLE]))
    for key in kind.model_fields:
        for variable in variables_of(kind, key):
            if variable in environ and not _SERVICE_VALUE.match(environ[variable]):
                yield key, environ[variable], variable
                break


def _from_file(
    kind: type[Config],
    config_path: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    unknown: list[ConfigError],
) -> Iterable[tuple[str, object, str]]:
    path = _file_to_read(config_path, environ)
    if path is None:
        return
    sections = _read_toml(path)
    for name, section in sections.items():
        other = next((other for other in KINDS if other.section == name), None)
        if other is None:
            sections_known = [f"[{other.section}]" for other in KINDS]
            unknown.append(unknown_setting(f"[{name}]", str(path), sections_known))
            continue
        if not isinstance(section, dict):
            raise ConfigError(
                f"{name} in {path} is a value, not a section",
                advice=f"Sections are written [{name}], the settings on the lines below.",
                key=name,
                origin=str(path),
            )
        unknown += [  # all sections: all kinds share one file
            unknown_setting(key, f"{path} [{name}]", [setting.key for setting in settings(other)])
            for key in section
            if key not in other.model_fields
        ]
        if other is kind:
            for key, value in section.items():
                if key not in other.model_fields:
                    continue
                yield key, value, f"{path} [{name}] {key}"


def _file_to_read(
    config_path: str | os.PathLike[str] | None, environ: Mapping[str, str]
) -> Path | None:
    named = environ.get(CONFIG_VARIABLE) if config_path is None else os.fspath(config_path)
    if named is not None:
        return Path(named).expanduser() if named else None
    places = [Path("kvstore.toml")]
    home = environ.get("XDG_CONFIG_HOME") or (
        environ.get("HOME", "") and environ["HOME"] + "/.config"
    )
    if home:
        places.append(Path(home) / "kvstore" / "kvstore.toml")
    found = next((place for place in places if os.path.lexists(place)), None)
    if found is not None and found == places[0] and os.stat(".").st_mode & stat.S_IWOTH:
        user = os.lstat(found).st_uid
        if user not in (0, os.geteuid()):
            raise ConfigError(
                f"{found.absolute()} belongs to the user {user}, in a folder where all may write",
                advice="Name a file with --config, or none with --config ''.",
                key=str(found),
            )
    return found


def _read_toml(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        reason = error.strerror or str(error)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = f"not valid TOML: {error}"
    raise ConfigError(
        f"cannot read the configuration {path}: {reason}",
        advice="Name another with --config, or none with --config ''.",
        key=str(path),
        origin=str(path),
    )
