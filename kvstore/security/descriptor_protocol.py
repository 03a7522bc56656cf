"""Passing of a file descriptor of a segment's memory from a node to a client on its host.

They use a Unix socket in ``/dev/shm`` (SOCK_SEQPACKET: a message is a datagram), which is also
visible in other containers that share the directory:

    node                                                  client
    greeting magic, version, status, nonce            ->
                                                      <-  hello   magic, version, uuid, generation,
                                                                  holder, rights, nonce; proof
    answer   magic, version, status, proof            ->
             with the descriptor (SCM_RIGHTS)

Any status except OK is the last message. The kernel allows the node's user, root and the members of
``--shm-group`` to connect.

The master sends the client the rights of its identity (``MapRight``) and a key for exactly these
rights (``map_key``), derived from the segment's token, which only master and node know. A valid
proof therefore certifies the rights, and the node's settings decide which descriptor it passes.

Each end proves that it has the key, for the other's nonce. A client does not check the user of the
other process: with ``--shm-group`` it is another one.
"""

from __future__ import annotations

import enum
import hmac
import struct
from typing import Final, NamedTuple

from kvstore.calls import MapRight

VERSION: Final = 1
NONCE_BYTES: Final = 16
PROOF_BYTES: Final = 16

_MAGIC: Final = b"KVsh"
_HEAD: Final = struct.Struct("<4sII16s")
_HELLO: Final = struct.Struct("<4sI16sQQQ16s")
_TAG: Final = b"map"
_BY_CLIENT: Final = b"client"
_BY_NODE: Final = b"node"

HEAD_BYTES: Final = _HEAD.size
"""Bytes of a greeting or an answer."""
HELLO_BYTES: Final = _HELLO.size + PROOF_BYTES


class DescriptorStatus(enum.IntEnum):
    OK = 0
    BAD_REQUEST = 1
    """Not this protocol or version."""
    OTHER_USER = 2
    DENIED = 3
    """A wrong proof."""
    UNMOUNTED = 4
    """Another segment, or mounted again since."""
    NO_RIGHT = 5
    """The identity cannot read any namespace."""
    NOT_ALL = 6
    """The node requires permission to read all namespaces."""


WHY: Final = {
    DescriptorStatus.BAD_REQUEST: "its node speaks another version of descriptor passing",
    DescriptorStatus.OTHER_USER: "its node runs as another user; kvstore-node --shm-group lets a "
    "group in",
    DescriptorStatus.DENIED: "its node does not accept the proof of this client",
    DescriptorStatus.UNMOUNTED: "its node has mounted it anew",
    DescriptorStatus.NO_RIGHT: "this identity may read in no namespace",
    DescriptorStatus.NOT_ALL: "this identity may not read all namespaces, which its node asks for "
    "(--shm-clients)",
}
"""Reasons for a missing file descriptor, as the end of a sentence about a segment."""


class DescriptorHello(NamedTuple):
    uuid: bytes
    generation: int
    holder: int
    rights: int
    nonce: bytes


def map_key(token: bytes, uuid: bytes, generation: int, holder: int, rights: int) -> bytes:
    """Return the key with which a holder proves that its identity has these rights."""
    said = _TAG + uuid + struct.pack("<3Q", generation, holder, rights)
    return hmac.digest(token, said, "sha256")[:PROOF_BYTES]


def pack_greeting(status: DescriptorStatus, nonce: bytes) -> bytes:
    return _HEAD.pack(_MAGIC, VERSION, status, nonce)


def pack_hello(hello: DescriptorHello, key: bytes, nonce: bytes) -> bytes:
    """Pack a hello. ``nonce``: of the greeting."""
    raw = _HELLO.pack(_MAGIC, VERSION, *hello)
    return raw + _proof(key, _BY_CLIENT, nonce, raw)


def unpack_hello(raw: bytes) -> DescriptorHello | None:
    """Parse a hello; return None if it is not this protocol."""
    if len(raw) != HELLO_BYTES:
        return None
    magic, version, *fields = _HELLO.unpack_from(raw)
    return DescriptorHello(*fields) if (magic, version) == (_MAGIC, VERSION) else None


def is_proven(raw: bytes, key: bytes, nonce: bytes) -> bool:
    """Return whether the sender of this hello has the key."""
    said, proof = raw[: _HELLO.size], raw[_HELLO.size :]
    return hmac.compare_digest(proof, _proof(key, _BY_CLIENT, nonce, said))


def pack_answer(status: DescriptorStatus, key: bytes = b"", raw: bytes = b"") -> bytes:
    """Pack an answer. ``key``, ``raw``: of the answered hello, if the status is OK."""
    proof = _proof(key, _BY_NODE, b"", raw) if key else bytes(PROOF_BYTES)
    return _HEAD.pack(_MAGIC, VERSION, status, proof)


def is_of_node(proof: bytes, key: bytes, raw: bytes) -> bool:
    """Return whether the peer that answered this hello has the key."""
    return hmac.compare_digest(proof, _proof(key, _BY_NODE, b"", raw))


def unpack_head(raw: bytes) -> tuple[DescriptorStatus, bytes] | None:
    """Parse status, and nonce or proof, of a greeting or an answer; return None if it is not this
    protocol."""
    if len(raw) != HEAD_BYTES:
        return None
    magic, version, status, rest = _HEAD.unpack(raw)
    if magic != _MAGIC or version != VERSION or status not in set(DescriptorStatus):
        return None
    return DescriptorStatus(status), rest


def _proof(key: bytes, by: bytes, nonce: bytes, said: bytes) -> bytes:
    return hmac.digest(key, by + nonce + said, "sha256")[:PROOF_BYTES]


def access(rights: int, *, needs_all: bool) -> tuple[DescriptorStatus, bool]:
    """Return the status for a client with these rights, and whether it may write.

    Args:
        rights: ``MapRight``.
        needs_all: whether the rights must include every namespace, as a mapping does.
    """
    if not rights & MapRight.READ:
        return DescriptorStatus.NO_RIGHT, False
    if not needs_all:
        return DescriptorStatus.OK, bool(rights & MapRight.WRITE)
    if not rights & MapRight.READ_ALL:
        return DescriptorStatus.NOT_ALL, False
    return DescriptorStatus.OK, bool(rights & MapRight.WRITE_ALL)
