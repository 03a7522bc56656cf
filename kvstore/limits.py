"""Limits of the protocol and the memory format, and checks of arguments against them.

They are not configurable, so a peer that exceeds one is faulty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, cast

from kvstore.errors import (
    BatchTooLargeError,
    ClusterMismatchError,
    DuplicateKeyError,
    InvalidArgumentError,
    InvalidKeyError,
    ProtocolError,
)

Key = NewType("Key", bytes)
"""1 to ``KEY_BYTES_MAX`` bytes, unique in a namespace."""

Namespace = NewType("Namespace", str)
"""The scope in which clients share objects; at most ``NAMESPACE_BYTES_MAX`` bytes of UTF-8."""

KEY_BYTES_MAX = 256
"""Bytes of a key, at least 1."""

NAMESPACE_BYTES_MAX = 128
"""Bytes of a namespace's name in UTF-8, at least 1."""

FLEET_NAMESPACE = Namespace("vllm-fleet")
"""Namespace of fleet records. Connectors with a tenant use one of their own (``of_tenant``)."""

ENGINES = frozenset({"vllm", "vllm-offloading", "sglang", "lmcache"})
"""First parts of the namespaces of connectors, after the tenant."""

TENANT_BYTES_MAX = 32
"""Bytes of a tenant's name in UTF-8, such that the longest namespaces of connectors, those of draft
pages, fit into ``NAMESPACE_BYTES_MAX``."""

DEFAULT_NAMESPACE = Namespace("default")

BATCH_KEYS_MAX = 16_384
"""Keys in one call of a program. Clients split it into several requests if one would be too
large."""

PUT_KEYS_MAX = 512
"""Objects of one put request, which occupies the master's loop for 1 to 2 ms and cannot be chunked,
because all of them are granted or none. Clients split larger batches."""

MATCH_KEYS_MAX = 1 << 20
"""Keys in one ``Client.match_prefix``, which may send several requests: 16 million tokens in blocks
of 16."""

NAMESPACES_MAX = 256
"""Namespaces in one ``match_prefix``: ranks and cache groups of one engine."""

CHAINS_MAX = 128
"""Chains in one reply to an operator."""

BLOCKS_MAX = 256
"""Blocks in one request of an operator."""

PIN_KEYS_MAX = 512
"""Objects of one pin request, which pins all stored ones or none: 1 to 2 ms. Clients split larger
batches."""

RETAIN_MS_MAX = 3_600_000
"""The longest time for which a hint retains a chain, in ms."""

PIN_MS_MAX = 86_400_000
"""The longest pin, in ms: a day. Pins can be renewed."""

TTL_MS_MAX = 604_800_000
"""The longest TTL of a put, in ms: a week."""

REPLICAS_MAX = 8
"""Replicas of an object, on distinct nodes."""

CONNECTIONS_CUT_MAX = 64
"""Connections to data servers in one revocation: each transfer has one."""

RELEASED_MAX = 256
"""Leases that one call releases; a client releases the rest with its next calls."""

AVOID_MAX = 64
"""Segments that placement is to avoid because the client failed to reach them recently."""

CLAIMS_PER_MESSAGE_MAX = 256
"""Objects in one inventory message: 172 KiB with the longest names."""

CLAIMS_UNANSWERED_MAX = 16
"""Unacknowledged inventory messages: a limit on the master's memory."""

NODE_SEGMENTS_MAX = 1_024
"""Segments in a message of a node; a master accepts 64 of one node."""

SIZE_BYTES_MAX = 1 << 48
"""Size in a message: 256 TiB, more than any real object, segment or sum of them. A value must also
fit into one segment."""

WAIT_MS_MAX = 3_600_000
"""Maximum time for which a call may defer its reply, in ms."""

REQUEST_BYTES_MAX = 320 << 10
"""Bytes of one request or message of a node: the memory that an idle lane connection may occupy in
the master."""

REQUEST_KEY_BYTES_MAX = 256 << 10
"""Bytes of keys in one request: 8,192 keys of 32 bytes."""

FRAME_BYTES_MAX = 16 << 20
"""Bytes of one reply or message of the master."""

EPOCH_MAX = 1 << 62
"""The highest epoch, whatever a clock shows. Epochs are near Unix time in milliseconds, which has
41 bits."""

EPOCH_AHEAD_MAX = 1 << 42
"""Maximum lead of a reported epoch over the clock of the master's host, in milliseconds: 139 years,
more than the lag of a host whose clock starts in 1970. Higher epochs are rejected as damage or
lies. The bound moves with the clock, so no report leads to an epoch that the next master would
reject."""

PROTOCOL_VERSION = 1
"""The version of the control protocol (gRPC and lane)."""

DATA_PROTOCOL_VERSION = 1
"""The version of the data protocol (``kvstore.runtime.tcp_protocol``)."""


def plausible_epoch_max(wall_clock_ms: int) -> int:
    """Return the highest plausible epoch for a host whose clock shows this Unix time."""
    return min(wall_clock_ms + EPOCH_AHEAD_MAX, EPOCH_MAX)


def check_protocol(version: int, who: str) -> None:
    """Check the version of the control protocol of a peer (``who``: "the node", for the error).

    Raises:
        ProtocolError: the version differs from ours.
    """
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"{who} speaks protocol {version}, this master {PROTOCOL_VERSION}",
            advice="Install the same release of kvstore on all hosts (kvstore --version shows it).",
            protocol=PROTOCOL_VERSION,
        )


def check_cluster(ours: str, theirs: str, who: str) -> None:
    """Check that a peer belongs to this master's cluster (``ours``; may be empty). A peer without a
    cluster name belongs to any.

    Raises:
        ClusterMismatchError: the peer names another one.
    """
    if theirs and theirs != ours:
        serves = f"serves the cluster {ours}" if ours else "serves a cluster without a name"
        raise ClusterMismatchError(
            f"{who} belongs to the cluster {theirs}, and this master {serves}",
            advice="Give the --master of the right cluster, or the same --cluster to both.",
            cluster=ours,
            wanted=theirs,
        )


def check_key(key: object) -> Key:
    """Return ``key`` as bytes; ``str`` is encoded as UTF-8.

    Raises:
        InvalidKeyError: empty, longer than ``KEY_BYTES_MAX``, not valid Unicode, or neither
            ``bytes`` nor ``str``.
    """
    if isinstance(key, str):
        try:
            key = str.encode(key)
        except UnicodeEncodeError as error:
            raise InvalidKeyError(
                f"a key of str must be valid Unicode: {error.reason}",
                advice="Pass bytes: key.encode(errors='surrogateescape') of a file's name.",
            ) from None
    elif isinstance(key, bytes):
        if type(key) is not bytes:  # a subclass, such as numpy's
            key = bytes.__getitem__(key, slice(None))
    else:
        raise InvalidKeyError(
            f"a key is bytes or str, not {type(key).__name__}",
            advice="Hash or encode it; a chain is named by its last key.",
        )
    if not 0 < len(key) <= KEY_BYTES_MAX:
        raise InvalidKeyError(
            f"a key has 1 to {KEY_BYTES_MAX} bytes, this one has {len(key)}",
            advice="Use a hash of it." if key else "Give it a name.",
            key_bytes=len(key),
        )
    return Key(key)


def check_count(count: int, most: int, what: str = "") -> None:
    """Raise BatchTooLargeError if one call has more than ``most`` keys, or ``what``."""
    if count > most:
        raise BatchTooLargeError(
            f"{what}: {count} in one call, at most {most} are allowed"
            if what
            else f"{count} keys in one call, at most {most} are allowed",
            advice="Split the batch.",
            keys=count,
            keys_max=most,
        )


def check_keys(
    keys: Sequence[object], *, distinct: bool, keys_max: int = BATCH_KEYS_MAX
) -> list[Key]:
    """Return checked keys: each valid, at most ``keys_max``, and no duplicates if ``distinct``.

    Raises:
        BatchTooLargeError: more than ``keys_max``.
        DuplicateKeyError: a key occurs twice; ``fields["key"]`` is its hex form.
    """
    check_count(len(keys), keys_max)
    checked = _complete_keys(keys) or [check_key(key) for key in keys]
    if distinct and len(set(checked)) != len(checked):
        seen: set[bytes] = set()
        for key in checked:
            if key in seen:
                raise DuplicateKeyError(
                    f"key {key!r} occurs twice in one batch",
                    advice="Put each key once; a key names one content.",
                    key=key.hex(),
                )
            seen.add(key)
    return checked


def _complete_keys(keys: Sequence[object]) -> list[Key]:
    """Return ``keys`` as bytes if all are valid, else []; without a Python step per key (0.1
    instead of 0.7 ms for 8,192)."""
    types = set(map(type, keys))
    if types == {bytes}:
        whole = list(cast("Sequence[Key]", keys))
    elif types == {str}:
        try:
            whole = cast("list[Key]", list(map(str.encode, cast("Sequence[str]", keys))))
        except UnicodeEncodeError:
            return []  # ``check_key`` reports it
    else:
        return []
    sizes = set(map(len, whole))
    return whole if 0 < min(sizes) and max(sizes) <= KEY_BYTES_MAX else []


def check_namespace(namespace: str) -> Namespace:
    """Raise InvalidArgumentError if it is empty, not text, or over ``NAMESPACE_BYTES_MAX``
    bytes."""
    if not isinstance(namespace, str):
        raise InvalidArgumentError(f"a namespace is str, not {type(namespace).__name__}")
    try:
        size = len(namespace.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(f"a namespace must be valid Unicode: {error.reason}") from error
    if not 0 < size <= NAMESPACE_BYTES_MAX:
        raise InvalidArgumentError(
            f"a namespace has 1 to {NAMESPACE_BYTES_MAX} bytes, this one has {size}",
            advice="Use a hash of a long description.",
            namespace_bytes=size,
        )
    return Namespace(namespace if type(namespace) is str else str.__str__(namespace))


def check_tenant(tenant: str) -> str:
    """Check a tenant's name, with which namespaces of connectors begin; empty: none.

    Raises:
        InvalidArgumentError: not a part of a namespace's name, over ``TENANT_BYTES_MAX`` bytes, or
            the name of an engine, whose namespaces it would collide with.
    """
    if not tenant:
        return ""
    tenant = check_namespace(tenant)
    if "/" in tenant or "*" in tenant:
        raise InvalidArgumentError(
            f"a tenant's name has no / and no *, this one is {tenant!r}",
            advice="Its namespaces are NAME/vllm/... and so on: give the name alone.",
        )
    if tenant in ENGINES:
        raise InvalidArgumentError(
            f"{tenant} is how namespaces of engines without a tenant begin",
            advice="Give the tenant another name.",
        )
    if len(tenant.encode()) > TENANT_BYTES_MAX:
        raise InvalidArgumentError(
            f"a tenant's name has at most {TENANT_BYTES_MAX} bytes, this one has "
            f"{len(tenant.encode())}"
        )
    return tenant


def of_tenant(tenant: str, namespace: str) -> Namespace:
    """Return the tenant's variant of a connector's namespace. ``tenant``: as returned by
    ``check_tenant``."""
    return Namespace(f"{tenant}/{namespace}" if tenant else namespace)


def tenant_of(namespace: str) -> str:
    """Return the tenant in a connector's namespace (``of_tenant``); empty: none."""
    tenant, _, rest = namespace.partition("/")
    is_of_one = rest == FLEET_NAMESPACE or rest.partition("/")[0] in ENGINES
    return tenant if is_of_one and tenant not in ENGINES else ""


def is_fleet(namespace: str) -> bool:
    """Return whether this is a namespace of fleet records."""
    return namespace == of_tenant(tenant_of(namespace), FLEET_NAMESPACE)
