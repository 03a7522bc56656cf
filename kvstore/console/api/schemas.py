"""Response models, also for the OpenAPI document; most have the fields of ``kvstore.calls``."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Collection, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from kvstore import calls
from kvstore.calls.described import field_texts, types_of
from kvstore.console.diagnostics.problems import DetectedProblem
from kvstore.limits import Key
from kvstore.runtime.formatting import key_text

ModelT = TypeVar("ModelT", bound=BaseModel)

Hex = Annotated[str, BeforeValidator(bytes.hex)]
KeyText = Annotated[str, BeforeValidator(key_text)]
"""A key as printed by kvstore ls."""


def shaped(kind: Any, without: Collection[str] = ()) -> Callable[[type[ModelT]], type[ModelT]]:
    """Add the fields and properties of a class to a model, with their docstrings, except those in
    ``without`` and those that the model declares. The model then validates values of the class."""

    def with_fields(model: type[ModelT]) -> type[ModelT]:
        texts, defaults = field_texts(kind), getattr(kind, "_field_defaults", {})
        fields: dict[str, Any] = {
            name: (_json(hint), Field(default=defaults.get(name, ...), description=texts.get(name)))
            for name, hint in types_of(kind).items()
            if name not in (*without, *model.model_fields)
        }
        doc = model.__doc__ or texts[""] or None
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=doc, **fields
        )

    return with_fields


def _json(hint: Any) -> Any:
    """Return the type of a field in JSON: keys are in hexadecimal."""
    origin = typing.get_origin(hint)
    if origin is Sequence:
        return types.GenericAlias(list, (_json(typing.get_args(hint)[0]),))
    if origin in (typing.Union, types.UnionType):
        return typing.Optional[_json(typing.get_args(hint)[0])]  # noqa: UP045
    if hasattr(hint, "_fields"):
        return _shape(hint)
    return Hex if hint in (bytes, Key) else hint


@functools.cache
def _shape(kind: Any) -> type[BaseModel]:
    return shaped(kind)(type(kind.__name__, (Shape,), {"__module__": __name__}))


class Shape(BaseModel):
    model_config = ConfigDict(from_attributes=True)


@shaped(calls.SegmentStatus)
class SegmentUsage(Shape):
    """Memory of a node, in bytes."""


@shaped(calls.NodeStatus)
class NodeDetail(Shape):
    """State and memory of a node."""

    segments: list[SegmentUsage]


@shaped(calls.NamespaceStatus)
class OtherNamespacesTotal(Shape):
    namespaces: int = Field(description="How many these are.")


@shaped(DetectedProblem)
class Problem(Shape):
    pass


@shaped(calls.NamespaceStatus)
class Namespace(Shape):
    pass


@shaped(calls.ClusterStatus, without=("next_cursor", "departed", "size", "used"))
class StatusResponse(Shape):
    """The status of the cluster. A standby knows its process, the leader and its own problems
    only."""

    address: str = Field(description="The master's host:port, as its own host reaches it.")
    at_ms: int = Field(description="Since 1970.")
    leads: bool
    connections: int = Field(description="Of clients and nodes, to the lane.")
    problems: list[Problem]
    leader_page: str = ""
    role: str = ""
    uptime_ms: int = 0
    nodes: list[NodeDetail] = []
    namespaces: list[Namespace] = Field(default=[], description="The largest 300.")
    other_namespaces: OtherNamespacesTotal | None = None
    counters: dict[str, int] = {}


class CallLatency(BaseModel):
    """One kind of call, in the last ten minutes."""

    call: str
    per_s: float
    p50_s: float | None
    p99_s: float | None


class HistoryResponse(BaseModel):
    """Lists of equal length (except ``calls``), a point every 10 s. null: no such event."""

    every_s: float
    at_ms: list[int]
    matched_per_s: list[float]
    missed_per_s: list[float]
    stored_per_s: list[float]
    stored_bytes_per_s: list[float]
    evicted_per_s: list[float]
    calls_per_s: list[float]
    call_p50_s: list[float | None]
    call_p99_s: list[float | None]
    eviction_age_s: list[float | None]
    used_bytes: list[int]
    size_bytes: list[int]
    objects: list[int]
    calls: list[CallLatency] = Field(description="The most frequent first.")


class ClusterEventsResponse(BaseModel):
    run: int = Field(description="Changes at each start of the master.")
    last: int
    events: list[list[Any]] = Field(description="Number, time, name, fields.")


class FleetRecordResponse(BaseModel):
    fingerprint: str
    loaded: str
    namespaces: list[str]
    differing: list[str] = Field(description="Its values of the differing fields.")


class FleetModel(BaseModel):
    engine: str
    model: str
    differing: list[str] = Field(description="Fields in which its records differ.")
    records: list[FleetRecordResponse]


class FleetResponse(BaseModel):
    models: list[FleetModel]
