# What each function does: kvstore.native.kinds.Fast.

from collections.abc import Sequence

from kvstore.native.kinds import BatchEnd, ReadRow, WriteRow

def read_objects(
    memory: memoryview,
    generation: int,
    seed: int,
    namespace: str,
    rows: list[ReadRow],
    verify: bool,
    deadline: float,
    threads: int,
    /,
) -> list[bytes | int] | BatchEnd: ...
def write_objects(
    memory: memoryview,
    generation: int,
    seed: int,
    namespace: str,
    rows: list[WriteRow],
    deadline: float,
    threads: int,
    /,
) -> BatchEnd: ...
def pack_keys(keys: Sequence[object], /) -> tuple[bytes, int] | None: ...
def presence(
    shards: list[dict[bytes, object]],
    mask: int,
    data: bytes,
    stride: int,
    record: type,
    segment: type,
    /,
) -> bytes: ...
def exchange(
    fd: int,
    request: bytes,
    call_id: int,
    spin_s: float,
    deadline: float,
    length_max: int,
    /,
) -> tuple[int, int, int, bytes | None]: ...
def tcp_read(
    fd: int,
    size: int,
    seed: int,
    namespace: str,
    rows: list[ReadRow],
    verify: bool,
    deadline: float,
    spin_s: float,
    /,
) -> tuple[int, int, int, list[bytes | int] | None]: ...
def tcp_write(
    fd: int,
    size: int,
    seed: int,
    namespace: str,
    rows: list[WriteRow],
    deadline: float,
    spin_s: float,
    /,
) -> tuple[int, int, int, None]: ...
def serve(
    fd: int,
    file: int,
    memory: memoryview,
    generation: int,
    cut: bytearray,
    counts: bytearray,
    stall_s: float,
    idle_s: float,
    /,
) -> tuple[int, int]: ...
def xxh3_64(data: bytes | memoryview, seed: int = 0, /) -> int: ...
