"""Errors on the wire: ``KVStoreError`` to gRPC status or lane error frame, and back.

Both protocols transfer the same ``ErrorDetail``, so that callers test classes and fields, never
text. An error class of a newer peer becomes the nearest known one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, cast

import grpc
from google.protobuf.message import DecodeError

from kvstore.errors import (
    BY_CODE,
    BusyError,
    DeadlineExceededError,
    DrainedError,
    FieldValue,
    InternalError,
    KVStoreError,
    NodeNameTakenError,
    NoSpaceError,
    PermissionDeniedError,
    ProtocolError,
    StartupError,
    UnavailableError,
    UsageError,
)
from kvstore.v1 import common_pb2

METADATA_KEY = "kvstore-error-bin"
"""Trailing metadata with the ``ErrorDetail`` (``-bin``: gRPC encodes the bytes)."""

TEXT_CHARS_MAX = 512
FIELDS_MAX = 16
"""Fields of one error. gRPC peers reject more than 8 KiB of metadata, which would hide the
error."""

_INT64 = range(-(1 << 63), 1 << 63)

GRPC_CODE: dict[type[KVStoreError], grpc.StatusCode] = {
    KVStoreError: grpc.StatusCode.UNKNOWN,
    UsageError: grpc.StatusCode.INVALID_ARGUMENT,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    DeadlineExceededError: grpc.StatusCode.DEADLINE_EXCEEDED,
    BusyError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NoSpaceError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    DrainedError: grpc.StatusCode.FAILED_PRECONDITION,
    ProtocolError: grpc.StatusCode.INVALID_ARGUMENT,
    PermissionDeniedError: grpc.StatusCode.PERMISSION_DENIED,
    StartupError: grpc.StatusCode.FAILED_PRECONDITION,
    NodeNameTakenError: grpc.StatusCode.ALREADY_EXISTS,
    InternalError: grpc.StatusCode.INTERNAL,
}
"""The status of each class that a master sends; other classes have that of their nearest base."""

_WITHOUT_DETAIL: dict[grpc.StatusCode, type[KVStoreError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: UsageError,
    grpc.StatusCode.OUT_OF_RANGE: UsageError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: BusyError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.UNAUTHENTICATED: PermissionDeniedError,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.CANCELLED: UnavailableError,
    grpc.StatusCode.INTERNAL: InternalError,
    grpc.StatusCode.UNKNOWN: InternalError,
}
"""The error for a status of gRPC itself, or of a proxy."""


def grpc_code(error: KVStoreError) -> grpc.StatusCode:
    """Return the gRPC status of an error."""
    for kind in type(error).__mro__:
        if kind in GRPC_CODE:
            return GRPC_CODE[kind]
    return grpc.StatusCode.UNKNOWN


def encode_error(error: KVStoreError) -> bytes:
    """Encode an error as an ``ErrorDetail``. Long texts are truncated."""
    kinds = [kind.code for kind in type(error).__mro__[1:] if issubclass(kind, KVStoreError)]
    detail = common_pb2.ErrorDetail(
        code=error.code,
        message=_printable(error.message),
        advice=_printable(error.advice),
        kinds=kinds,
        retriable=error.retriable,
    )
    for name, value in list(error.fields.items())[:FIELDS_MAX]:
        if isinstance(value, int) and value in _INT64:
            detail.fields[name].number = value
        else:
            detail.fields[name].text = _printable(str(value))[:128]
    return detail.SerializeToString()


def decode_error(data: bytes) -> KVStoreError:
    """Decode a peer's error; a ``ProtocolError`` if it is unreadable."""
    try:
        detail = common_pb2.ErrorDetail.FromString(data)
    except DecodeError:
        return ProtocolError("the peer reported an error that cannot be read")
    known = [BY_CODE[code] for code in (detail.code, *detail.kinds) if code in BY_CODE]
    fields: dict[str, FieldValue] = {}
    for name, value in detail.fields.items():
        fields[name] = value.number if value.WhichOneof("value") == "number" else value.text
    error = (known[0] if known else KVStoreError)(detail.message, advice=detail.advice)
    error.fields.update(fields)
    return error


def from_grpc(code: grpc.StatusCode, details: str | None, detail: bytes | None) -> KVStoreError:
    """Return the error behind a failed gRPC call. ``detail``: the metadata at ``METADATA_KEY``, if
    any."""
    if detail is not None:
        return decode_error(detail)
    kind = _WITHOUT_DETAIL.get(code, KVStoreError)
    return kind(f"{code.name.lower()}: {_printable(details or 'no details')}")


def detail_of(error: grpc.RpcError) -> bytes | None:
    """Return the encoded ``ErrorDetail`` of a failed call; None: gRPC's own failure."""
    metadata = cast("Iterable[tuple[str, str | bytes]] | None", error.trailing_metadata())
    for key, value in metadata or ():
        if key == METADATA_KEY and isinstance(value, bytes):
            return value
    return None


NO_TLS: Final = "it does not speak TLS"
CLOSED: Final = "it closed the connection"
CLOSED_REASONS: Final = (CLOSED, "connection reset by peer")
"""Of a peer that may reject our certificate."""

_MEANINGS: Final = (
    ("Socket closed", CLOSED),
    ("WRONG_VERSION_NUMBER", NO_TLS),
    ("Hostname Verification", "its certificate is not that of a master"),
    ("EXPIRED", "its certificate has expired by the clock of this host"),
    ("NOT_YET_VALID", "its certificate is not valid yet by the clock of this host"),
    ("has expired", "its certificate has expired by the clock of this host"),
    ("is not yet valid", "its certificate is not valid yet by the clock of this host"),
    ("SSL_ERROR_SSL", "its certificate is not of our authority"),
)
"""Meanings of gRPC's texts about connections that fail or end."""


def short_reason(details: str | None) -> str:
    """Return the end of gRPC's long explanations: ``connection refused``."""
    said = (details or "no details").partition("\n")[0]  # a binary address may follow
    for sign, meaning in _MEANINGS:
        if sign in said:
            return meaning
    return _printable(said.rpartition(": ")[2]).partition(" (")[0].lower()


def unexpected(error: BaseException, where: str, logger: logging.Logger) -> InternalError:
    """Log an internal bug with its traceback; return the error for the peer."""
    logger.error("unexpected error where=%s", where, exc_info=error)
    return InternalError(
        f"{where}: unexpected {type(error).__name__}",
        advice="The master's log has the traceback; please report it.",
    )


def _printable(text: str) -> str:
    """Truncate to ``TEXT_CHARS_MAX`` characters, and remove lone surrogates, which protobuf
    rejects."""
    return text[:TEXT_CHARS_MAX].encode(errors="replace").decode()
