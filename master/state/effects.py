"""What the state asks the shell to do: small values, taken with ``MasterState.take_effects``."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.calls import MasterMessage, Reply
from kvstore.errors import KVStoreError


@dataclass(frozen=True, slots=True)
class Later:
    """In place of a reply: an ``Answer`` with this ticket will bring it."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Answer:
    ticket: int
    result: Reply | KVStoreError


@dataclass(frozen=True, slots=True)
class Send:
    """To the node that is heard on this session."""

    session: int
    message: MasterMessage


@dataclass(frozen=True, slots=True)
class Hangup:
    """End this session's stream: its node was taken over or declared dead."""

    session: int
    error: KVStoreError


@dataclass(frozen=True, slots=True)
class Notice:
    """Something an operator wants to find in the log."""

    event: str
    fields: dict[str, str | int]


Effect = Answer | Send | Hangup | Notice
