"""The errors of kvstore, in one tree.

    KVStoreError
    ├── UsageError          you broke a rule; nothing was sent, nothing changed
    ├── UnavailableError    a peer cannot be reached now; worth trying again
    ├── StartupError        a process cannot start; it leaves memory as it is
    └── what the store refuses, or has lost

A miss is the value ``None`` (or 0, or False), not an error. Both protocols transfer code and fields
unchanged (``kvstore.wire.status``). docs/errors.md is generated from the docstrings of the classes.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

FieldValue = str | int
_ErrorT = TypeVar("_ErrorT", bound=BaseException)


class KVStoreError(Exception):
    """The base class of all errors. ``str(error)`` is the message followed by the advice.

    Attributes:
        code: stable name of the class.
        retriable: whether the same call may succeed later.
        message: what happened.
        advice: the remedy, one sentence; may be empty.
        fields: values for programs, ``str`` or ``int``.
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
    """Remove the traceback, cause and context of an error that is kept or raised elsewhere, and
    return it. The frames refer to variables of all callers; if one of these refers to the error, a
    cycle keeps them in memory until the next garbage collection."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _rebuild(
    kind: type[KVStoreError], message: str, advice: str, fields: dict[str, FieldValue]
) -> KVStoreError:
    return kind(message, advice=advice, **fields)


class UsageError(KVStoreError):
    """A wrong use without a class of its own. Nothing was sent or changed. Do: read the message."""

    code = "usage"


class InvalidArgumentError(UsageError):
    """A value is outside its range. Do: see docs/limits.md."""

    code = "invalid_argument"


class InvalidKeyError(UsageError):
    """A key is empty, longer than 256 bytes, or neither bytes nor text. Do: use a hash of it."""

    code = "invalid_key"


class DuplicateKeyError(UsageError):
    """One key occurs twice in one batch; ``fields["key"]`` in hexadecimal. Do: put each key
    once."""

    code = "duplicate_key"


class BatchTooLargeError(UsageError):
    """More keys than one call takes; ``fields["keys_max"]``. Do: split the batch."""

    code = "batch_too_large"


class ValueTooLargeError(UsageError):
    """The value is larger than every segment of the pool. Do: store it in parts, or give nodes more
    memory."""

    code = "value_too_large"


class UnsupportedValueError(UsageError):
    """The value is not a tensor, array or bytes (sparse, quantized, objects), or is a subclass of
    them (a masked array); or torch or the dtype is missing here. Do: convert it; or get it with
    ``kind="bytes"``."""

    code = "unsupported_value"


class BufferMismatchError(UsageError):
    """A buffer of ``get_into`` is too small, not contiguous, or of another dtype. Do: give a buffer
    that fits; ``uint8`` takes every dtype."""

    code = "buffer_mismatch"


class InvalidRangeError(UsageError):
    """A peer named a range outside its segment: a bug. Do: report it."""

    code = "invalid_range"


class ConfigError(UsageError):
    """A setting is unknown, unreadable or out of range; ``fields["key"]``, ``fields["origin"]``.
    Do: correct it at its origin."""

    code = "config"


class ClosedError(UsageError):
    """The client was closed. Do: make another client."""

    code = "closed"


class UnavailableError(KVStoreError):
    """A temporary state, named in the message, such as no node that could record a removal. Do: try
    again; start a node."""

    code = "unavailable"
    retriable = True


class MasterUnreachableError(UnavailableError):
    """No master answers at the address. Do: start it; check ``--master`` and port 50001; ``kvstore
    doctor --master ADDRESS``."""

    code = "master_unreachable"


class NotLeaderError(UnavailableError):
    """The master is a standby; ``fields["leader"]`` is the address of the leader, or empty. Do:
    nothing: ``Client`` follows the leader."""

    code = "not_leader"


class EtcdUnreachableError(UnavailableError):
    """No member of etcd answers. Do: check etcd, and its certificates:
    docs/high-availability.md."""

    code = "etcd_unreachable"


class NodeUnreachableError(UnavailableError):
    """A node accepts no data; or ``allocate`` finds no node on this host. Do: open its port 50003
    and up; start a node here."""

    code = "node_unreachable"


class SegmentUnmountedError(UnavailableError):
    """The node has left, or its memory was mounted again, during the call. Do: try again: the
    object may be on another node."""

    code = "segment_unmounted"


class CapabilityRefusedError(UnavailableError):
    """A node rejected a client's capability: it has expired, or is for other memory or another
    client. Do: nothing: the client requests a new one."""

    code = "capability_refused"


class DeadlineExceededError(UnavailableError):
    """The timeout of the call (``timeout_ms``) has passed. Do: raise it; check the node or master
    in the message."""

    code = "deadline_exceeded"


class BusyError(UnavailableError):
    """A peer has reached a limit: connections, pending puts. Do: try again, or use fewer
    clients."""

    code = "busy"


class NoSpaceError(KVStoreError):
    """All memory is leased, pinned or being written; ``fields["missing_bytes"]``. Do: wait for
    leases (10 s); add memory: docs/runbook.md#kvstoreputsrefused."""

    code = "no_space"
    retriable = True


class PutRefusedError(KVStoreError):
    """The deadline of the put (30 s) or the term of its master ended before the put. Do: put
    again."""

    code = "put_refused"
    retriable = True


class DrainedError(KVStoreError):
    """A node was drained, and shuts down. Do: nothing; start it again to use it again."""

    code = "drained"


class MemoryQuarantinedError(KVStoreError):
    """A read into registered memory was abandoned, and may still write there for some seconds. Do:
    do not use that memory until ``client.unregister`` of it has returned."""

    code = "memory_quarantined"


class ReservationLostError(KVStoreError):
    """Memory from ``allocate`` was granted to another client. Do: stop writing to it, allocate
    again."""

    code = "reservation_lost"


class StaleReadError(KVStoreError):
    """The location holds another object now. Do: nothing: the client looks it up again."""

    code = "stale_read"
    retriable = True


class CorruptObjectError(KVStoreError):
    """The descriptor of an object (dtype, shape) is invalid or does not fit its bytes;
    ``fields["key"]``. A wrong checksum raises nothing: the client reads another replica, or misses
    (docs/runbook.md#kvstorecorruptmemory). Do: get it with ``kind="bytes"``, or remove it:
    docs/verification.md#values-that-cannot-be-decoded."""

    code = "corrupt_object"


class ProtocolError(KVStoreError):
    """The peer uses another protocol or version. Do: install the same release:
    docs/compatibility.md."""

    code = "protocol"


class PermissionDeniedError(KVStoreError):
    """The identity lacks a permission (role, namespace), is revoked or has expired; a peer has no
    identity; a connection to the lane has no valid lane token. Do: check the permissions with
    kvstore auth show FILE, and issue a certificate with the missing one. Without authentication:
    check what connects to port 50002; connect again if the master was restarted."""

    code = "permission_denied"


class StartupError(KVStoreError):
    """A process cannot start for the reason in the message. Do: follow the message."""

    code = "startup"


class AddressInUseError(StartupError):
    """The port is in use. Do: stop the other process, or choose another ``--port``."""

    code = "address_in_use"


class NodeNameTakenError(StartupError):
    """A running process, or another user, uses the memory of that name. Do: choose another
    ``--name``."""

    code = "node_name_taken"


class ClusterMismatchError(StartupError):
    """Node, client or memory belong to another cluster; nothing was changed. Do: give the right
    ``--master`` or ``--cluster``; ``--adopt`` takes over the memory."""

    code = "cluster_mismatch"


class LeftOverMemoryError(StartupError):
    """Existing memory of that name is unusable: another size or format, truncated. Do:
    ``kvstore-node --discard``, or ``kvstore clean``."""

    code = "left_over_memory"


class SharedMemoryTooSmallError(StartupError):
    """``/dev/shm`` has less free space than ``--memory``. Do: mount a larger one (``docker run
    --shm-size``), or give less."""

    code = "shared_memory_too_small"


class MemoryLimitError(StartupError):
    """A control group (a container) or ``ulimit -v`` allows less memory. Do: raise the limit, or
    give less ``--memory``."""

    code = "memory_limit"


class TransferEngineError(StartupError):
    """Mooncake's engine is missing, or does not support the request. Do: see
    docs/transports.md#mooncake."""

    code = "transfer_engine"


class DeviceError(KVStoreError):
    """The memory of a GPU cannot be copied: no driver, no such device, or a copy failed. Do: check
    the kernel's log; restart the process if copies did not end."""

    code = "device"


class ArchiveError(KVStoreError):
    """The object store of an archive fails, or is too slow; or an archive object is missing,
    truncated or corrupt; ``fields["object"]``. Do: run the command again; restore that object, or
    export again: docs/archive.md."""

    code = "archive"


class InternalError(KVStoreError):
    """A bug, reported by the peer. Do: report it with the log of the process."""

    code = "internal"


def _tree(kind: type[KVStoreError]) -> list[type[KVStoreError]]:
    return [kind] + [below for child in kind.__subclasses__() for below in _tree(child)]


BY_CODE: dict[str, type[KVStoreError]] = {kind.code: kind for kind in _tree(KVStoreError)}
"""All classes of the tree by code, to decode errors of replies."""
