"""Fleet records, by which engines describe themselves; imports no engine.

A *fleet record* is one object per fingerprint in the namespace ``vllm-fleet``, or in that of a
tenant, ``TENANT/vllm-fleet``: JSON with the engine, its models, the namespaces of its blocks, and
the inputs of its fingerprint. ``kvstore.connectors.common.fleet`` puts records; ``kvstore why``,
the dashboard and the proxy read them. Pure.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from math import lcm
from typing import Any, Final, NamedTuple

from kvstore.calls import ObjectRow
from kvstore.limits import FLEET_NAMESPACE, Key, Namespace, is_fleet, of_tenant, tenant_of

FORMAT: Final = 1
"""Version of fleet records; the proxy reads only this one."""

RECORD_BYTES_MAX: Final = 1 << 16
"""The size limit of a record; larger objects are not records."""

RECORDS_MAX: Final = 256
"""Records that a reader takes from one store; the rest is not read."""

ROWS_MAX: Final = 1 << 16
"""Listed objects that a reader examines to find the records."""

FLEETS_MAX: Final = 256
"""Tenants whose records one reader takes: the maximum of a tenants file. They share
``RECORDS_MAX``."""

LIFETIME_S: Final = 86_400.0
"""Time from the last announcement to the expiry of a record: a crashed engine does not remove
it."""

ANNOUNCED_EVERY_S: Final = 60.0
"""Interval at which an engine announces its record again."""

SERVES_S: Final = 3 * ANNOUNCED_EVERY_S
"""Time after its last announcement during which an engine counts as serving."""

BLOCK_TOKENS_MAX: Final = 1 << 31
"""Maximum tokens per block: more than any engine uses, and representable in every format."""

RANKS_MAX: Final = 1_024
"""The maximum of ``tp_shards``."""

DEPTH_MAX: Final = 4
"""Levels of nesting that are compared field by field; deeper values are compared as a unit."""

_GROUP: Final = re.compile(r"(?:[^/]+/)?vllm/[^/]*/g([0-9]+)/")
"""The cache group of a namespace (``kvstore.connectors.vllm.messages``)."""

_GUESSES: Final = re.compile(r"(?:[^/]+/)?vllm/[^/]*/g[0-9]+/[^/]*\.draft-[0-9a-f]+\Z")

_DEFAULTS: Final[Mapping[str, Any]] = {"engine": "vllm", "block_size": 0, "format": FORMAT}


def is_draft_namespace(namespace: str) -> bool:
    """Whether this namespace holds draft pages, on which no hit depends
    (``kvstore.connectors.vllm.messages.draft_part``)."""
    return _GUESSES.match(namespace) is not None


class Hashes(NamedTuple):
    """The parameters by which engines compute the keys of a prompt's blocks."""

    block_size: int
    """Tokens per hash, of which ``FleetRecord.block_size`` is a multiple."""
    algorithm: str
    none_hash: bytes
    """The hash before the first block."""


class FleetRecord(NamedTuple):
    """One fleet record: engines that share blocks with each other."""

    engine: str
    models: tuple[str, ...]
    """Names of the model, first the name or path that was loaded."""
    fingerprint: str
    namespaces: tuple[str, ...]
    description: Mapping[str, Any]
    block_size: int = 0
    """Tokens per block; 0: unknown."""
    hashes: Hashes | None = None
    """None: missing or invalid in the record."""
    format: int = FORMAT
    announced: float = 0.0
    """Time of the last announcement, in seconds since the epoch by the engine's clock; 0:
    unknown."""

    @property
    def tenant(self) -> str:
        """The tenant of the engines; may be empty."""
        return tenant_of(self.namespaces[0]) if self.namespaces else ""

    @property
    def model(self) -> str:
        """The last part of the model's name or path, independent of where it was loaded from."""
        return short_name(self.models[0])

    @property
    def states(self) -> frozenset[str]:
        """The namespaces of recurrent state, as far as the record of a vLLM connector lists
        them."""
        return self._namespaces_with("state")

    @property
    def ends(self) -> frozenset[str]:
        """As ``states``, and those of sliding windows: a hit needs only its last objects."""
        return self.states | self._namespaces_with("window")

    def _namespaces_with(self, field: str) -> frozenset[str]:
        """Return the namespaces of the groups whose description has this field."""
        groups = {str(at) for at, group in enumerate(_groups(self.description)) if field in group}
        found = {name: _GROUP.match(name) for name in self.namespaces}
        return frozenset(name for name, match in found.items() if match and match[1] in groups)

    def is_stopped(self, now: float) -> bool:
        """Return whether the engines of this record have stopped, according to the record.

        Args:
            now: seconds since the epoch.
        """
        return 0 < self.announced < now - SERVES_S

    def serves(self, model: str) -> bool:
        names = {*self.models, *map(short_name, self.models)}
        return model in names or short_name(model) in names


class Difference(NamedTuple):
    """A field in which two descriptions differ. A value is None if that side lacks the field."""

    field: str
    ours: object
    theirs: object


class SplitDifference(NamedTuple):
    """A difference in how two engines split the same bytes among their ranks."""

    ours: object
    theirs: object
    setting: str
    """The setting with which both find the chunks of the other one."""
    provided: str
    """Further requirements that the descriptions do not contain."""

    def text(self, here: str, there: str) -> str:
        both = f"{self.ours} {here}, {self.theirs} {there}"
        return f"tensor-parallel size: {both} ({self.setting} would let them share{self.provided})"


class DescriptionDiff(NamedTuple):
    """The differences that keep two engines of one kind and model from sharing blocks."""

    must: list[Difference]
    """Fields that must be equal and differ."""
    split: SplitDifference | None

    def text(self) -> str:
        """Return the text for the engine whose description is ``ours``."""
        must = "; ".join(f"{f}: {ours!r} here, {theirs!r} there" for f, ours, theirs in self.must)
        parts = [f"must be equal: {must}"] if must else []
        if self.split is not None:
            parts.append(f"can be reconciled: {self.split.text('here', 'there')}")
        return "; ".join(parts) or "only the layout of the cache differs"


def short_name(model: str) -> str:
    """Return the last part of a model's path."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def fleets_of(tenant: str, namespaces: Iterable[str]) -> list[Namespace]:
    """Return the fleet namespaces to read: the tenant's; without a tenant those of all tenants,
    ``FLEETS_MAX`` at most.

    Args:
        namespaces: those with objects that the reader may see.
    """
    if tenant:
        return [of_tenant(tenant, FLEET_NAMESPACE)]
    found = sorted(filter(is_fleet, namespaces), key=lambda name: (name != FLEET_NAMESPACE, name))
    return [Namespace(name) for name in found[:FLEETS_MAX]] or [FLEET_NAMESPACE]


def record_keys(rows: Iterable[ObjectRow], records_max: int = RECORDS_MAX) -> list[Key]:
    """Return the keys of the records among listed objects, of which ``ROWS_MAX`` are examined."""
    found = (
        row.key
        for row in islice(rows, ROWS_MAX)
        if row.size <= RECORD_BYTES_MAX and row.state == "complete"
    )
    return list(islice(found, records_max))


def records_of(values: Iterable[object], tenant: str) -> list[FleetRecord]:
    """Return the records among objects that were read as bytes."""
    parsed = [parse(value, tenant=tenant) for value in values if isinstance(value, bytes)]
    return [record for record in parsed if record is not None]


def parse(data: bytes, *, tenant: str = "") -> FleetRecord | None:
    """Parse a record; return None if the bytes are not one.

    Args:
        tenant: the owner of the fleet. A record that names namespaces of another tenant is invalid.
    """
    try:
        value = {**_DEFAULTS, **json.loads(data)}
        record = FleetRecord(
            engine=value["engine"],
            models=tuple(value["models"]),
            fingerprint=value["fingerprint"],
            namespaces=tuple(value["namespaces"]),
            description=value["description"],
            block_size=value["block_size"],
            hashes=_hashes(value),
            format=value["format"],
            announced=float(value.get("announced", 0.0)),
        )
        for text in (record.engine, record.fingerprint, *record.models, *record.namespaces):
            text.encode()  # raises for other types, and for text that UTF-8 cannot encode
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_one = (
        bool(record.models)
        and isinstance(record.description, dict)
        and isinstance(value["block_size"], int)
        and 0 <= record.block_size <= BLOCK_TOKENS_MAX
        and all(tenant_of(name) == tenant for name in record.namespaces)
    )
    return record if is_one else None


def _hashes(value: Mapping[str, Any]) -> Hashes | None:
    size, algorithm = value.get("hash_block_size"), value.get("hash_algorithm")
    if type(size) is not int or size <= 0 or not isinstance(algorithm, str):
        return None
    try:
        return Hashes(size, algorithm, bytes.fromhex(value["none_hash"]))
    except (ValueError, TypeError, KeyError):
        return None


def differences(
    ours: Mapping[Any, Any], theirs: Mapping[Any, Any], above: str = "", depth: int = 1
) -> list[Difference]:
    """Return the fields in which two descriptions differ. If both have a field as a mapping, or as
    lists of equal length, its fields are compared: ``groups.0.block_tokens``. Both consist of plain
    JSON values (``as_read``)."""
    found: list[Difference] = []
    for key in sorted({*ours, *theirs}):
        mine, other = ours.get(key), theirs.get(key)
        if mine == other:
            continue
        if isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
            mine, other = dict(enumerate(mine)), dict(enumerate(other))
        if isinstance(mine, dict) and isinstance(other, dict) and depth < DEPTH_MAX:
            found += differences(mine, other, f"{above}{key}.", depth + 1)
        else:
            found.append(Difference(f"{above}{key}", mine, other))
    return found


def compare_descriptions(
    engine: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> DescriptionDiff:
    """Separate differences that prevent sharing from a different split of the same bytes.

    Args:
        engine: the kind of both. Only the vLLM connector can share between different splits.
        ours, theirs: as for ``differences``.
    """
    split = _ranks(ours, theirs) if engine == _DEFAULTS["engine"] else None
    if split is not None:
        is_told = "shards" in ours and "shards" in theirs  # otherwise each rank has its own
        fields = {"tensor_parallel", "shards", "blocks_per_object"}
        fields |= set() if is_told else {"weights", "files"}
        ours, theirs = _without(ours, fields), _without(theirs, fields)
    return DescriptionDiff(differences(ours, theirs), split)


def _ranks(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> SplitDifference | None:
    """Return the difference in ranks; None: equal, or no setting helps."""
    mine, other = (
        f"tp_shards={record['shards']}" if "shards" in record else record.get("tensor_parallel")
        for record in (ours, theirs)
    )
    sizes = [record.get("shards", record.get("tensor_parallel")) for record in (ours, theirs)]
    are_counts = all(type(size) is int and 0 < size <= RANKS_MAX for size in sizes)
    kinds = [str(group.get("kind")) for side in (ours, theirs) for group in _groups(side)]
    if mine == other or not are_counts or any("Mamba" in kind for kind in kinds):
        return None
    number = lcm(*sizes)
    is_told = "shards" in ours and "shards" in theirs
    return None if number > RANKS_MAX else SplitDifference(
        mine, other, f'"tp_shards": {number} in both',
        "" if is_told else ", if their weights are the same",
    )  # fmt: skip


def _without(description: Mapping[str, Any], fields: Collection[str]) -> dict[str, Any]:
    """Return the description without these fields, and those of its parts that follow from the
    number of ranks."""
    left = {name: value for name, value in description.items() if name not in fields}
    groups = _groups(description)
    if groups:
        left["groups"] = [
            {name: value for name, value in group.items() if name != "page_bytes"}
            for group in groups
        ]
    if isinstance(left.get("attention"), list):
        left["attention"] = [
            [part for part in manner if not str(part).startswith("num_kv_heads=")]
            if isinstance(manner, list) else manner
            for manner in left["attention"]
        ]  # fmt: skip
    return left


def _groups(description: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the cache groups; empty: none, or described in another way."""
    groups = description.get("groups")
    is_list = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    return list(groups or ()) if is_list else []


def as_read(description: Mapping[str, object]) -> dict[str, Any]:
    """Return the description as the store returns it: plain JSON values."""
    read: dict[str, Any] = json.loads(json.dumps(description, default=str))
    return read
