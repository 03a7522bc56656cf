"""Headers of a row's object in Python; ``rows.h`` does the same."""

from __future__ import annotations

from kvstore.limits import Key, Namespace
from kvstore.memory.header import Header, pack_into, unpack, write_header_mac
from kvstore.native.interface import CAPABILITY_BYTES, ReadRow, WriteRow


def header_of(
    head: memoryview | bytearray, seed: int, namespace: str, row: ReadRow
) -> Header | None:
    """Return the header of exactly the row's object; None: another object, or none, is there."""
    offset, size, epoch, counter, key, _, _ = row
    header = unpack(head, seed, offset)
    if header is None or (
        header.key != key
        or header.counter != counter
        or header.epoch != epoch
        or header.payload_size != size
        or header.namespace != namespace
    ):
        return None
    return header


def write_header(
    head: memoryview | bytearray, seed: int, namespace: str, row: WriteRow, checksum: int
) -> None:
    """Write the row's header and, if the row has one, the header MAC to ``head``."""
    offset, size, epoch, counter, key, _, parent, descriptor, capability = row
    header = Header(
        Namespace(namespace), Key(key), Key(parent) if parent else None, size, epoch, counter,
        checksum, descriptor,
    )  # fmt: skip
    end = pack_into(head, header, seed, offset)
    write_header_mac(head, end, capability[CAPABILITY_BYTES:])
