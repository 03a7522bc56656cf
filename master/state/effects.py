"""Effects: small values by which the state requests actions of the shell."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.calls import MasterMessage, Reply
from kvstore.errors import KVStoreError


@dataclass(frozen=True, slots=True)
class DeferredReply:
    """Returned instead of a reply; a ``SendReply`` with this reply id follows."""

    reply_id: int


@dataclass(frozen=True, slots=True)
class SendReply:
    reply_id: int
    result: Reply | KVStoreError


@dataclass(frozen=True, slots=True)
class SendToNode:
    """Send a message to the node of this session."""

    session: int
    message: MasterMessage


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End this session's stream: its node opened another one, died or was dismissed."""

    session: int
    error: KVStoreError


@dataclass(frozen=True, slots=True)
class LogClusterEvent:
    event: str
    fields: dict[str, str | int]


@dataclass(frozen=True, slots=True)
class SupersedeEpoch:
    """A node knows a master of this higher epoch: end this term and start one above that epoch.
    Until then the node is rejected, and its claims are neither accepted nor wiped."""

    epoch: int


Effect = SendReply | SendToNode | CloseSession | LogClusterEvent | SupersedeEpoch
