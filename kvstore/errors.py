"""Every error that kvstore raises, in one tree.

    KVStoreError
    ├── UsageError          you broke a rule; nothing was sent, nothing changed
    ├── UnavailableError    a peer cannot be reached now; worth trying again
    ├── StartupError        a process cannot start; it leaves memory as it is
    └── what the store refuses, or has lost

A miss is no error: it is the value ``None`` (or 0, or False). Each class has a stable ``code``,
says by ``retriable`` whether the same call may succeed later, and carries ``fields`` (numbers and
names, for programs) and ``advice`` (one sentence, for people). The code and the fields travel over
both carriers unchanged (``kvstore.wire.status``). The docstring of a class says what it means and
what to do; docs/errors.md is made of these.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

FieldValue = str | int
_ErrorT = TypeVar("_ErrorT", bound=BaseException)


class KVStoreError(Exception):
    """The base class of all errors. ``str(error)`` is the message followed by the advice.

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
    """Returns the error without its traceback, cause and context, to be kept or raised elsewhere.
    Their frames refer to the variables of all callers. If one of these refers to the error, all of
    them would stay in memory until the next garbage collection."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def _rebuild(
    kind: type[KVStoreError], message: str, advice: str, fields: dict[str, FieldValue]
) -> KVStoreError:
    return kind(message, advice=advice, **fields)


class UsageError(KVStoreError):
    """A wrong use that has no class of its own. Nothing was sent, and nothing has changed. Do: read
    the message."""

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
    """The value is larger than any segment of the pool. Do: store it in parts, or give nodes more
    memory."""

    code = "value_too_large"


class UnsupportedValueError(UsageError):
    """The value is no tensor, array or bytes (sparse, quantized, objects), or is more than those (a
    masked array, a subclass of arrays or tensors); or torch or the dtype is missing here. Do:
    convert it; or get it with ``kind="bytes"``."""

    code = "unsupported_value"


class BufferMismatchError(UsageError):
    """A buffer of ``get_into`` is too small, not contiguous, or of another dtype. Do: give a buffer
    that fits; ``uint8`` takes every dtype."""

    code = "buffer_mismatch"


class InvalidRangeError(UsageError):
    """A peer named a range outside of its segment: a bug. Do: report it."""

    code = "invalid_range"


class ConfigError(UsageError):
    """A setting is unknown, unreadable or out of range; ``fields["key"]``, ``fields["origin"]``.
    Do: correct it at that place."""

    code = "config"


class ClosedError(UsageError):
    """The client was closed. Do: make another client."""

    code = "closed"


class UnavailableError(KVStoreError):
    """A state that ends soon, which the message names: no node is left that could record a removal.
    Do: try again; start a node."""

    code = "unavailable"
    retriable = True


class MasterUnreachableError(UnavailableError):
    """No master answers at the address. Do: start it; check ``--master`` and port 50001; ``kvstore
    doctor --master ADDRESS``."""

    code = "master_unreachable"


class NotLeaderError(UnavailableError):
    """The master stands by; ``fields["leader"]`` is the address of the leader, or empty. Do:
    nothing: ``Client`` follows the leader."""

    code = "not_leader"


class EtcdUnreachableError(UnavailableError):
    """No member of the etcd answers. Do: check etcd, and its certificates:
    docs/high-availability.md."""

    code = "etcd_unreachable"


class NodeUnreachableError(UnavailableError):
    """A node accepts no data; or ``allocate`` finds no node on this host. Do: open its port 50003
    and up; start a node here."""

    code = "node_unreachable"


class SegmentGoneError(UnavailableError):
    """The node has left, or its memory was mounted anew, during the call. Do: try again: the object
    may be elsewhere."""

    code = "segment_gone"


class CapabilityRefusedError(UnavailableError):
    """A node refused a client's capability for a piece of its memory: it has expired, or is for
    another piece or client. Do: nothing: the client asks the master for another one."""

    code = "capability_refused"


class DeadlineExceededError(UnavailableError):
    """The time of the call is over (``timeout_ms``). Do: give it more time; look for the node or
    master that the message names."""

    code = "deadline_exceeded"


class BusyError(UnavailableError):
    """A peer has reached a bound: connections, pending puts. Do: try again, or use fewer
    clients."""

    code = "busy"


class NoSpaceError(KVStoreError):
    """All of the memory is leased, pinned or being written; ``fields["missing_bytes"]``. Do: wait
    for leases (10 s); add memory: docs/runbook.md#kvstoreputsrefused."""

    code = "no_space"
    retriable = True


class PutRefusedError(KVStoreError):
    """The put's deadline (30 s) or its master passed before it ended. Do: put again."""

    code = "put_refused"
    retriable = True


class DrainedError(KVStoreError):
    """A node was drained, and ends. Do: nothing; start it again to use it again."""

    code = "drained"


class MemoryQuarantinedError(KVStoreError):
    """A read into registered memory was given up, and may still land there for some seconds. Do:
    leave that memory alone until ``client.unregister`` of it has returned."""

    code = "memory_quarantined"


class ReservationLostError(KVStoreError):
    """Memory from ``allocate`` belongs to others now. Do: stop writing to it, allocate again."""

    code = "reservation_lost"


class StaleReadError(KVStoreError):
    """Another object stands at that place now. Do: nothing: the client asks again by itself."""

    code = "stale_read"
    retriable = True


class CorruptObjectError(KVStoreError):
    """What its writer says of an object (dtype, shape) is nonsense or does not fit its bytes;
    ``fields["key"]``. Bytes and checksum that differ raise nothing: the client reads another
    replica, or misses (docs/runbook.md#kvstorecorruptmemory). Do: get it with ``kind="bytes"``, or
    remove it: docs/verification.md#values-that-cannot-be-made."""

    code = "corrupt_object"


class ProtocolError(KVStoreError):
    """The peer speaks another version, or another protocol. Do: install the same release:
    docs/compatibility.md."""

    code = "protocol"


class PermissionDeniedError(KVStoreError):
    """An identity without the right (role, namespace), or a revoked one; a peer without any; a
    connection to the lane without its token. Do: kvstore auth show FILE says what an identity may
    do; issue one with the right. Without identities: see what connects to port 50002; connect
    again, if the master was started anew."""

    code = "permission_denied"


class StartupError(KVStoreError):
    """A process cannot start, for another reason, which the message names. Do: do what it says."""

    code = "startup"


class AddressInUseError(StartupError):
    """The port is taken. Do: stop the other process, or choose another ``--port``."""

    code = "address_in_use"


class NodeNameTakenError(StartupError):
    """A running process, or another user, has the memory of that name. Do: choose another
    ``--name``."""

    code = "node_name_taken"


class ClusterMismatchError(StartupError):
    """Node, client or memory belong to another cluster; nothing was changed there. Do: give the
    right ``--master`` or ``--cluster``; ``--adopt`` takes memory over."""

    code = "cluster_mismatch"


class LeftOverMemoryError(StartupError):
    """Memory of that name is there and cannot be used: another size or format, truncated. Do:
    ``kvstore-node --discard``, or ``kvstore clean``."""

    code = "left_over_memory"


class SharedMemoryTooSmallError(StartupError):
    """``/dev/shm`` has less free memory than ``--memory``. Do: mount a larger one (``docker run
    --shm-size``), or give less."""

    code = "shared_memory_too_small"


class MemoryLimitError(StartupError):
    """A control group (a container) or ``ulimit -v`` allows less memory. Do: raise the limit, or
    give less ``--memory``."""

    code = "memory_limit"


class TransferEngineError(StartupError):
    """Mooncake's engine is missing, or cannot do what was asked. Do: see
    docs/transports.md#mooncake."""

    code = "transfer_engine"


class DeviceError(KVStoreError):
    """The memory of a GPU cannot be copied: no driver, no such device, or a copy failed. Do: look
    at the kernel's log; start the process anew, if copies did not end."""

    code = "device"


class InternalError(KVStoreError):
    """A bug, reported by the peer. Do: report it with the log of the process."""

    code = "internal"


def _tree(kind: type[KVStoreError]) -> list[type[KVStoreError]]:
    return [kind] + [below for child in kind.__subclasses__() for below in _tree(child)]


BY_CODE: dict[str, type[KVStoreError]] = {kind.code: kind for kind in _tree(KVStoreError)}
"""Every class of the tree by its code: how a reply's error becomes an exception again."""
