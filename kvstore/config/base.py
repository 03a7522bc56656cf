"""The base of the settings of every kind of process."""

from __future__ import annotations

import re
from typing import ClassVar, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvstore.config.setting_types import CliType, InvalidSettingError, format_size
from kvstore.errors import ConfigError

PREFIX = "KVSTORE_"
CONFIG_VARIABLE = "KVSTORE_CONFIG"
MASTER_VARIABLE = "KVSTORE_MASTER"
CLUSTER_VARIABLE = "KVSTORE_CLUSTER"
AUTH_VARIABLE = "KVSTORE_AUTH"
TENANT_VARIABLE = "KVSTORE_TENANT"
ENCRYPTION_VARIABLE = "KVSTORE_DATA_ENCRYPTION"
HTTP_TOKEN_VARIABLE = "KVSTORE_HTTP_TOKEN"  # noqa: S105 - the name of a variable
"""Not a setting: programs that send HTTP requests to a master read it."""
STRICT_VARIABLE = "KVSTORE_STRICT_CONFIG"
"""If it is not empty, unknown settings are errors; ``--strict-config`` sets it."""
NATIVE_VARIABLE = "KVSTORE_NATIVE"
"""Not a setting: ``kvstore.native`` reads it."""

_SHARED = {
    "master": MASTER_VARIABLE,
    "cluster": CLUSTER_VARIABLE,
    "auth": AUTH_VARIABLE,
    "tenant": TENANT_VARIABLE,
    "data_encryption": ENCRYPTION_VARIABLE,
}
"""Variables read by several kinds of process."""


class Config(BaseModel):
    """The base class of settings: frozen, keyword-only, validated when built.

    Raises (when built):
        ConfigError: an unknown name, or a value out of its range; ``fields["key"]`` names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    section: ClassVar[str]

    def __init__(self, /, **values: object) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise config_error(type(self), error) from None


ConfigT = TypeVar("ConfigT", bound=Config)


class Setting(NamedTuple):
    """A field, as required by the command line, the environment and the documentation."""

    key: str
    flag: str
    variables: tuple[str, ...]
    metavar: str
    """Empty for a switch."""
    default: str
    help: str
    many: bool = False
    """Whether the flag may be repeated."""


def settings(kind: type[Config]) -> list[Setting]:
    """Return the settings of a kind, in the order of their definition. Inherited ones follow the
    kind's own HTTP settings, or are first if it has none."""
    fields = kind.model_fields
    keys = [key for key in fields if key in kind.__annotations__]
    behind = max((n for n, key in enumerate(keys, 1) if key.startswith("http_")), default=0)
    keys[behind:behind] = [key for key in fields if key not in keys]
    found = []
    for key in keys:
        field = fields[key]
        shown = _shown(kind, key)
        metavar = shown.metavar
        if not metavar and field.annotation not in (bool, bool | None):
            metavar = "|".join(getattr(field.annotation, "__args__", ()))
        found.append(
            Setting(
                key=key,
                flag="--" + key.replace("_", "-"),
                variables=variables_of(kind, key),
                metavar=metavar,
                default=_default_text(field.default, metavar),
                help=field.description or "",
                many=shown.many,
            )
        )
    return found


def variables_of(kind: type[Config], key: str) -> tuple[str, ...]:
    """Return the environment variables of a field; the first that is set takes precedence."""
    own = f"{PREFIX}{kind.section.upper()}_{key.upper()}"
    shared = _SHARED.get(key)
    return (own,) if shared is None else (own, shared)


def _shown(kind: type[Config], key: str) -> CliType:
    field = kind.model_fields.get(key)
    metadata = () if field is None else field.metadata
    return next((item for item in metadata if isinstance(item, CliType)), CliType(""))


def _default_text(default: object, metavar: str) -> str:
    if default is None:
        return "see above" if metavar else "auto"
    if isinstance(default, bool):
        return "on" if default else "off"
    if metavar == "SIZE" and isinstance(default, int):
        return format_size(default)
    return ",".join(default) if isinstance(default, tuple) else str(default)


def config_error(kind: type[Config], error: ValidationError) -> ConfigError:
    """Return the first of pydantic's errors as a ``ConfigError``."""
    first = error.errors(include_url=False)[0]
    key = str(first["loc"][0]) if first["loc"] else ""
    if first["type"] == "extra_forbidden":
        return unknown_setting(key, "", [*kind.model_fields])
    what, advice = re.sub(r"^(Input|String) should", "must", first["msg"]), ""
    if isinstance(refused := first.get("ctx", {}).get("error"), InvalidSettingError):
        key, what, advice = refused.key or key, str(refused), refused.advice
    is_hidden = not first["loc"] or _shown(kind, key).is_secret
    given = "" if is_hidden else f" = {first['input']!r}"
    return ConfigError(
        f"{key}{given}: {what}" if given else f"{key} {what}", advice=advice, key=key
    )


def unknown_setting(key: str, origin: str, known: list[str]) -> ConfigError:
    import difflib  # only for the message: 5 ms

    fields: dict[str, str] = {"key": key} | ({"origin": origin} if origin else {})
    near = difflib.get_close_matches(key, known, n=1)
    if near:
        fields["nearest"] = near[0]
    return ConfigError(
        f"there is no setting {key}" + (f" ({origin})" if origin else ""),
        advice=f"Did you mean {near[0]}?" if near else f"There are: {', '.join(known)}.",
        **fields,
    )
