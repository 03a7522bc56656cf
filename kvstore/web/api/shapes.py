"""Shapes of the dashboard's answers, for the OpenAPI document. Other paths describe nodes by
``Member`` and ``Memory``, too."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class Problem(BaseModel):
    level: str = Field(description="bad, warning or note.")
    text: str
    runbook: str = Field(description="The section of /runbook that says what to do.")


class Memory(BaseModel):
    """How memory of a node is used, in bytes."""

    size: int
    used: int
    largest_free: int
    pending: int
    quarantined: int
    reclaim: int
    device: str = Field(description="Whose memory it is; empty: the host's.")


class Segment(Memory):
    """Memory of a node, in bytes."""

    segment_id: int
    shm_name: str


class Member(BaseModel):
    """What is told of a node."""

    name: str
    host: str
    address: str
    state: str = Field(description="alive, draining, suspect or dead.")
    silent_ms: int = Field(description="Time since the master last heard of it.")
    version: str = Field(description="Of its program; empty: not known.")


class Node(Member):
    segments: list[Segment]
    transports: list[str]
    stored_bytes: int = Field(
        description="Payload of objects put, moved or repaired there, since it joined this master."
    )
    read_bytes: int = Field(description="Over its data port, since the node's start.")
    written_bytes: int = Field(description="Over its data port, since the node's start.")


class Namespace(BaseModel):
    name: str
    objects: int
    size: int
    pinned_objects: int
    pinned_bytes: int


class OtherNamespaces(Namespace):
    namespaces: int = Field(description="How many these are.")


class Tenant(BaseModel):
    """Bytes are those of memory: headers, replicas and puts under way included."""

    name: str = Field(description="Empty: has what belongs to no other tenant.")
    bytes: int
    guaranteed: int
    at_most: int = Field(description="0: no bound.")
    pinned: int
    pinned_max: int = Field(description="0: no bound of its own.")
    objects: int
    evicted_by_own: int = Field(
        description="Objects that made room for its own puts, since the master's start."
    )
    evicted_by_others: int = Field(description="Objects that made room for others.")
    refused: int = Field(description="Puts and pins that a quota refused.")
    namespaces: list[str] = Field(description="Patterns.")


class Status(BaseModel):
    """A master that stands by tells the first ones, leader and leader_page only."""

    address: str = Field(description="The master's host:port, as its own host reaches it.")
    at_ms: int = Field(description="Since 1970.")
    leads: bool
    epoch: int
    version: str
    cluster: str
    connections: dict[str, int]
    problems: list[Problem]
    leader: str
    leader_page: str = ""
    role: str = ""
    uptime_ms: int = 0
    nodes: list[Node] = []
    namespaces: list[Namespace] = Field(default=[], description="The largest 300.")
    other_namespaces: OtherNamespaces | None = None
    counters: dict[str, int] = {}
    tenants: list[Tenant] = Field(default=[], description="Empty: the master has none.")


class CallTimes(BaseModel):
    """One kind of call, in the last ten minutes."""

    call: str
    per_s: float
    p50_s: float | None
    p99_s: float | None


class History(BaseModel):
    """Lists of one length (but ``calls``), a point every 10 s. null: nothing of it happened."""

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
    calls: list[CallTimes] = Field(description="The most frequent first.")


class Notices(BaseModel):
    run: int = Field(description="Another one is another start of the master.")
    last: int
    notices: list[list[Any]] = Field(description="Number, time, name, fields.")


class FleetRecord(BaseModel):
    fingerprint: str
    loaded: str
    namespaces: list[str]
    differing: list[str] = Field(description="What it says in each of the differing fields.")


class FleetModel(BaseModel):
    engine: str
    model: str
    differing: list[str] = Field(description="Fields in which its records differ.")
    records: list[FleetRecord]


class Fleet(BaseModel):
    models: list[FleetModel]
