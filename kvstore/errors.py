"""Every error that kvstore raises, in one tree.

    KVStoreError
    ├── UsageError                  you broke a rule; nothing was sent, nothing changed
    │   ├── InvalidArgumentError        a value outside its range
    │   ├── InvalidKeyError             empty, too long, not bytes or str
    │   ├── DuplicateKeyError           one key twice in one batch
    │   ├── BatchTooLargeError          more keys than one call may carry
    │   ├── ValueTooLargeError          larger than any segment of the pool
    │   ├── UnsupportedValueError       not a tensor, array or bytes that can be stored
    │   ├── BufferMismatchError         get_into: too small, wrong dtype, not contiguous
    │   ├── InvalidRangeError           a range that leaves its segment
    │   ├── ConfigError                 a setting that is unknown, unreadable or out of range
    │   └── ClosedError                 the client was closed
    ├── UnavailableError            a peer cannot be reached now; worth trying again
    │   ├── MasterUnreachableError
    │   ├── NotLeaderError              a master that stands by; ``fields["leader"]``: who leads
    │   ├── EtcdUnreachableError
    │   ├── NodeUnreachableError
    │   ├── SegmentGoneError            the segment was unmounted, or mounted anew
    │   ├── DeadlineExceededError
    │   └── BusyError                   a bound of the peer is reached
    ├── NoSpaceError                the pool is full and all of it is leased; worth trying again
    ├── PutRefusedError             the put's token is old: its deadline or its master passed
    ├── DrainedError                a node: it was drained, and is to leave
    ├── MemoryQuarantinedError      registered memory that a transfer may still write to: keep off
    ├── ReservationLostError        memory from allocate() is no longer ours: stop writing to it
    ├── StaleReadError              another object stands there now; refreshed and retried inside
    ├── CorruptObjectError          the bytes are not what the object's header says
    ├── ProtocolError               the peer sent what the protocol does not allow
    ├── PermissionDeniedError       no token, or the wrong one
    ├── StartupError                a process cannot start
    │   ├── AddressInUseError
    │   ├── NodeNameTakenError
    │   ├── ClusterMismatchError        a node, its memory or a client belongs to another cluster
    │   ├── LeftOverMemoryError         memory of that name was left, and is no use as it is
    │   ├── SharedMemoryTooSmallError
    │   ├── MemoryLimitError            a control group (a container) or ulimit -v allows less
    │   └── TransferEngineError         Mooncake's engine is missing, or cannot do what was asked
    ├── DeviceError                 the memory of a GPU cannot be copied: no driver, or it failed
    └── InternalError               a bug of ours, reported by the peer

A miss is no error: it is the value ``None`` (or 0, or False). Each class has a stable ``code``,
says by ``retriable`` whether the same call may succeed later, and carries ``fields`` (numbers and
names, for programs) and ``advice`` (one sentence, for people). The code and the fields travel over
both carriers unchanged (``kvstore.wire.status``).
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

FieldValue = str | int
_ErrorT = TypeVar("_ErrorT", bound=BaseException)


class KVStoreError(Exception):
    """Base of all. ``str(error)`` is the message followed by the advice.

    Attributes:
        code: stable name of the class, the same in every language and release.
        retriable: whether the same call may succeed later.
        message: what happened.
        advice: what to do about it; may be empty.
        fields: what a program may want to read; values are ``str`` or ``int``.
    """

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False

    def __init__(self, message: str, /, *, advice: str = "", **fields: FieldValue) -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice
        self.fields: dict[str, FieldValue] = fields

    def __str__(self) -> str:
        return f"{self.message}. {self.advice}" if self.advice else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.advice, self.fields)


def without_frames(error: _ErrorT) -> _ErrorT:
    """The error as a value, to be kept or to be raised elsewhere: without its traceback, its cause
    and its context. Their frames refer to what they worked with, and to the variables of all their
    callers, which would stay until a collection if one of these refers to the error."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _rebuild(
    kind: type[KVStoreError], message: str, advice: str, fields: dict[str, FieldValue]
) -> KVStoreError:
    return kind(message, advice=advice, **fields)


class UsageError(KVStoreError):
    code = "usage"


class InvalidArgumentError(UsageError):
    code = "invalid_argument"


class InvalidKeyError(UsageError):
    code = "invalid_key"


class DuplicateKeyError(UsageError):
    code = "duplicate_key"


class BatchTooLargeError(UsageError):
    code = "batch_too_large"


class ValueTooLargeError(UsageError):
    code = "value_too_large"


class UnsupportedValueError(UsageError):
    code = "unsupported_value"


class BufferMismatchError(UsageError):
    code = "buffer_mismatch"


class InvalidRangeError(UsageError):
    code = "invalid_range"


class ConfigError(UsageError):
    code = "config"


class ClosedError(UsageError):
    code = "closed"


class UnavailableError(KVStoreError):
    code = "unavailable"
    retriable = True


class MasterUnreachableError(UnavailableError):
    code = "master_unreachable"


class NotLeaderError(UnavailableError):
    """``fields["leader"]`` is the leader's address; empty where there is none now."""

    code = "not_leader"


class EtcdUnreachableError(UnavailableError):
    code = "etcd_unreachable"


class NodeUnreachableError(UnavailableError):
    code = "node_unreachable"


class SegmentGoneError(UnavailableError):
    code = "segment_gone"


class DeadlineExceededError(UnavailableError):
    code = "deadline_exceeded"


class BusyError(UnavailableError):
    code = "busy"


class NoSpaceError(KVStoreError):
    """The pool is full of leased objects. ``fields["missing_bytes"]``: how much was missing."""

    code = "no_space"
    retriable = True


class PutRefusedError(KVStoreError):
    code = "put_refused"
    retriable = True


class DrainedError(KVStoreError):
    code = "drained"


class MemoryQuarantinedError(KVStoreError):
    """A read into registered memory was given up, and may still land there for some seconds.
    Leave that memory alone until ``client.unregister`` of it has returned."""

    code = "memory_quarantined"


class ReservationLostError(KVStoreError):
    code = "reservation_lost"


class StaleReadError(KVStoreError):
    code = "stale_read"
    retriable = True


class CorruptObjectError(KVStoreError):
    code = "corrupt_object"


class ProtocolError(KVStoreError):
    code = "protocol"


class PermissionDeniedError(KVStoreError):
    code = "permission_denied"


class StartupError(KVStoreError):
    code = "startup"


class AddressInUseError(StartupError):
    code = "address_in_use"


class NodeNameTakenError(StartupError):
    code = "node_name_taken"


class ClusterMismatchError(StartupError):
    """A peer, or memory that was left, belongs to another cluster; nothing was changed there."""

    code = "cluster_mismatch"


class LeftOverMemoryError(StartupError):
    code = "left_over_memory"


class SharedMemoryTooSmallError(StartupError):
    code = "shared_memory_too_small"


class MemoryLimitError(StartupError):
    code = "memory_limit"


class TransferEngineError(StartupError):
    code = "transfer_engine"


class DeviceError(KVStoreError):
    code = "device"


class InternalError(KVStoreError):
    code = "internal"


def _tree(kind: type[KVStoreError]) -> list[type[KVStoreError]]:
    return [kind] + [below for child in kind.__subclasses__() for below in _tree(child)]


BY_CODE: dict[str, type[KVStoreError]] = {kind.code: kind for kind in _tree(KVStoreError)}
"""Every class of the tree by its code: how a reply's error becomes an exception again."""
