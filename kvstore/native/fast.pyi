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
def xxh3_64(data: bytes | memoryview, seed: int = 0, /) -> int: ...
