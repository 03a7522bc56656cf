"""Actions that the state requests from the shell: small values (``MasterState.take_effects``)."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.calls import MasterMessage, Reply
from kvstore.errors import KVStoreError


@dataclass(frozen=True, slots=True)
class DeferredReply:
    """Returned instead of a reply: an ``SendReply`` with this ticket will follow."""

    reply_id: int


@dataclass(frozen=True, slots=True)
class SendReply:
    reply_id: int
    result: Reply | KVStoreError


@dataclass(frozen=True, slots=True)
class SendToNode:
    """Send a message to the node on this session."""

    session: int
    message: MasterMessage


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End this session's stream: its node opened another one, was declared dead or dismissed."""

    session: int
    error: KVStoreError


@dataclass(frozen=True, slots=True)
class LogClusterEvent:
    """An event for the log."""

    event: str
    fields: dict[str, str | int]


@dataclass(frozen=True, slots=True)
class SupersedeEpoch:
    """A node knows a master of this epoch, which is above this master's: end this term, and begin
    another one above that epoch. Until then the node is refused, and its claims are neither
    accepted nor wiped."""

    epoch: int


Effect = SendReply | SendToNode | CloseSession | LogClusterEvent | SupersedeEpoch
