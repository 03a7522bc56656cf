"""What engines rely on in ``mooncake.store``, asked of Mooncake's own and of this store in its
place.

Where the two differ on purpose, a test of its own says what this one does, and why.
"""

from __future__ import annotations

import importlib
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstore.connectors.mooncake_shim
from bench import mooncake
from kvstore.bench.processes import Children
from kvstore.connectors.mooncake import (
    ExistOptions,
    MooncakeDistributedStore,
    MooncakeHostMemAllocator,
)
from kvstore.connectors.mooncake.mooncake_types import Code, code_of
from kvstore.connectors.mooncake.put_sessions import PutSessions
from kvstore.connectors.mooncake.store import _size
from kvstore.errors import (
    ClosedError,
    CorruptObjectError,
    InvalidKeyError,
    KVStoreError,
    MasterUnreachableError,
    NoSpaceError,
    PutRefusedError,
    UnavailableError,
)
from kvstore.runtime.child_process import start_master
from tests.support import leaks
from tests.support.certificates import Identities
from tests.support.cluster import Cluster
from tests.support.processes import run_python
from tests.support.programs import need_engine

MIB = 1 << 20
POOL_BYTES = 64 * MIB
MEMORY_BYTES = 4 * MIB
DTYPES = (
    "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64",
    "bool", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip
INVALID, MISS, FULL, DOWN = -600, -704, -200, -900

pytestmark = pytest.mark.timeout(120)


class Place:
    """A store that is set up, and memory that is registered with it."""

    def __init__(self, store: Any, config: Any, address: str) -> None:
        self.store = store
        self.config = config
        self.address = address
        self.memory = np.arange(MEMORY_BYTES, dtype=np.uint32).astype(np.uint8)
        self.start = int(self.memory.ctypes.data)
        assert self.setup() == 0
        assert store.register_buffer(self.start, MEMORY_BYTES) == 0

    @property
    def is_ours(self) -> bool:
        return isinstance(self.store, MooncakeDistributedStore)

    def setup(self) -> int:
        code: int = self.store.setup(
            "127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", self.address
        )
        return code

    def bytes_at(self, offset: int, size: int) -> bytes:
        return self.memory[offset : offset + size].tobytes()


@pytest.fixture(scope="module")
def there_is_mooncake() -> None:
    need_engine()


@pytest.fixture(scope="module")
def their_place(there_is_mooncake: None) -> Iterator[Place]:
    with Children(dict(os.environ)) as children:
        servers = mooncake.start(children, POOL_BYTES)
        module: Any = importlib.import_module("mooncake.store")
        place = Place(module.MooncakeDistributedStore(), module.ReplicateConfig, servers.address())
        while place.store.put("is there room", b"1") != 0:  # its memory joins after it listens
            pass
        yield place
        place.store.close()


@pytest.fixture(scope="module")
def our_place() -> Iterator[Place]:
    master = start_master(memory=POOL_BYTES)
    place = Place(
        MooncakeDistributedStore(),
        importlib.import_module("kvstore.connectors.mooncake").ReplicateConfig,
        f"127.0.0.1:{master.said['port']}",
    )
    assert place.store.put("first", b"1") == 0  # connects, maps the segment
    assert place.store.get("first") == b"1"  # starts the thread that releases leases
    assert place.store.remove_all() == 1
    yield place
    place.store.close()
    master.stop()


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """As for all tests, but for those of Mooncake's client, which keeps connections of its own."""
    before = leaks.snapshot()
    yield
    names = request.fixturenames
    if "theirs" not in names and (
        "either" not in names or request.getfixturevalue("either").is_ours
    ):
        found = leaks.leaked(before)
        assert not found, found


@pytest.fixture(
    scope="module",
    params=[pytest.param("their_place", marks=pytest.mark.slow), "our_place"],
    ids=["theirs", "ours"],
)
def either(request: pytest.FixtureRequest) -> Place:
    place: Place = request.getfixturevalue(request.param)
    return place


def cleared(place: Place) -> Place:
    """Tests run in any order: each begins with an empty store."""
    assert place.store.remove_all(True) >= 0
    return place


@pytest.fixture
def place(either: Place) -> Place:
    return cleared(either)


@pytest.fixture
def theirs(their_place: Place) -> Place:
    return cleared(their_place)


@pytest.fixture
def ours(our_place: Place) -> Place:
    return cleared(our_place)


# --- both -----------------------------------------------------------------------------------------


def test_values(place: Place) -> None:
    store = place.store
    assert store.health_check() == 0
    assert store.put("a", b"hello") == 0
    assert store.put("a", b"other") == 0  # keys name content: the first one stays
    assert store.get("a") == b"hello"
    assert store.get("missing") == b""
    assert store.put("", b"x") == INVALID
    assert store.put_parts("parts", b"ab", bytearray(b"cd")) == 0
    assert store.put_batch(["b", "c"], [b"1", b"22"]) == 0
    assert store.put_batch(["d", "e"], [b"1"]) == INVALID
    assert store.get_batch(["b", "missing", "c", "parts"]) == [b"1", b"", b"22", b"abcd"]
    long = "x" * 300
    assert store.put(long, b"long") == 0
    assert store.get(long) == b"long"
    assert store.get(long[:-1] + "y") == b""
    for wrong in (7, None):
        with pytest.raises(TypeError):
            store.put("a", wrong)


def test_asking(place: Place) -> None:
    store = place.store
    assert store.put("a", b"hello") == 0
    assert (store.is_exist("a"), store.is_exist("missing"), store.is_exist("")) == (1, 0, 0)
    assert store.batch_is_exist(["a", "missing"]) == [1, 0]
    assert store.batch_is_exist([]) == []
    assert (store.get_size("a"), store.get_size("missing")) == (5, MISS)
    assert list(store.batch_get_replica_desc(["a", "missing"])) == ["a"]
    [replica] = store.get_replica_desc("a")
    assert replica.is_memory_replica()
    assert not replica.is_disk_replica()
    assert replica.status.name == "COMPLETE"
    assert replica.get_memory_descriptor().buffer_descriptor.size == 5
    assert store.get_replica_desc("missing") == []


def test_buffers(place: Place) -> None:
    store = place.store
    assert store.put("a", b"hello") == 0
    handle = store.get_buffer("a")
    assert handle
    assert handle.size() == len(handle) == 5
    assert handle.ptr()
    view = memoryview(handle)
    assert not view.readonly
    assert bytes(view) == b"hello"
    assert store.get_buffer("missing") is None
    found, missing = store.batch_get_buffer(["a", "missing"])
    assert missing is None
    assert bytes(memoryview(found)) == b"hello"


def test_addresses(place: Place) -> None:
    store, start = place.store, place.start
    assert store.register_buffer(start, MEMORY_BYTES) == INVALID  # it is already
    assert store.register_buffer(start + 100, 10) == INVALID
    assert store.register_buffer(start, 0) == INVALID
    assert store.register_buffer(0, 10) == INVALID
    assert store.put_from("f", start, 1000) == 0
    assert store.get_into("f", start + MIB, 1000) == 1000
    assert place.bytes_at(MIB, 1000) == place.bytes_at(0, 1000)
    assert store.get_into("f", start + MIB, 5000) == 1000
    assert store.get_into("f", start + MIB, 500) == INVALID
    assert store.get_into("missing", start, 10) == MISS
    assert store.batch_put_from(["g", "h", "g"], [start, start + 100, start + 200], [100] * 3) == [
        0, 0, 0,
    ]  # fmt: skip
    assert store.get("h") == place.bytes_at(100, 100)
    into = [start + MIB, start + MIB + 100, start + MIB + 200]
    read = store.batch_get_into(["g", "missing", "h"], into, [100, 100, 50])
    assert read == [100, MISS, INVALID]
    assert store.batch_put_from(["i", "j"], [start], [100]) == [INVALID, INVALID]
    assert store.batch_get_into(["g"], [start], []) == [INVALID]
    assert store.batch_get_into([], [], []) == []
    assert store.put_from_with_metadata("w", start + 500, start, 10, 20) == 0
    assert store.get("w") == place.bytes_at(0, 20) + place.bytes_at(500, 10)


def test_several_buffers_of_one_value(place: Place) -> None:
    store, start = place.store, place.start
    pointers, sizes = [[start, start + 100], [start + 200]], [[10, 20], [30]]
    assert store.batch_put_from_multi_buffers(["m", "n"], pointers, sizes) == [0, 0]
    assert store.batch_put_from_multi_buffers(["o"], pointers[:1], sizes[:1], place.config()) == [0]
    assert store.get("m") == place.bytes_at(0, 10) + place.bytes_at(100, 20)
    into = [[start + MIB, start + MIB + 50], [start + MIB + 100], [start]]
    read = store.batch_get_into_multi_buffers(["m", "n", "missing"], into, [[10, 20], [30], [1]])
    assert read == [30, 30, MISS]
    assert place.bytes_at(MIB + 50, 20) == place.bytes_at(100, 20)
    assert store.batch_get_into_multi_buffers(["m"], into[:1], [[10, 10]]) == [INVALID]
    assert store.batch_put_from_multi_buffers(["p", "q"], pointers[:1], sizes[:1]) == [INVALID] * 2
    assert store.batch_put_from_multi_buffers(["p"], pointers[:1], [[10]]) == [INVALID]


def test_ranges(place: Place) -> None:
    store, start = place.store, place.start
    assert store.put_from("f", start, 1000) == 0
    assert store.put("a", b"hello") == 0
    read = store.get_into_ranges(
        [start + MIB], [["f", "a"]], [[[0, 10], [20]]], [[[5, 0], [1]]], [[[3, 2], [2]]]
    )
    assert read == [[[3, 2], [2]]]
    assert place.bytes_at(MIB, 3) == place.bytes_at(5, 3)
    assert place.bytes_at(MIB + 20, 2) == b"el"
    assert store.get_into_ranges([start + MIB], [["no"]], [[[0]]], [[[5]]], [[[3]]]) == [[[MISS]]]
    behind = store.get_into_ranges([start + MIB], [["f"]], [[[0]]], [[[990]]], [[[30]]])
    assert behind == [[[INVALID]]]


def test_memory_that_is_given_twice(ours: Place) -> None:
    store, start = ours.store, ours.start
    assert store.put_batch(["a", "b"], [b"a" * 100, b"b" * 100]) == 0
    for second in (start, start + 50, start + 99):
        assert store.batch_get_into(["a", "b"], [start, second], [100, 100]) == [INVALID] * 2
    into = [[start, start + 50], [start + 99]]
    sizes = [[50, 50], [100]]
    assert store.batch_get_into_multi_buffers(["a", "b"], into, sizes) == [INVALID] * 2
    assert store.batch_get_into_multi_buffers(["a"], [[start, start + 49]], [[50, 50]]) == [INVALID]
    ranges = store.get_into_ranges
    assert ranges([start], [["a"]], [[[0, 3]]], [[[0, 9]]], [[[4, 4]]]) == [[[INVALID] * 2]]
    assert ranges([start], [["a", "b"]], [[[0], [3]]], [[[0], [0]]], [[[4], [4]]]) == [
        [[INVALID]] * 2
    ]
    assert store.batch_get_session_start(["a", "b"]) == [0, 0]
    get = store.batch_get_into_multi_buffer_ranges
    assert get(["a", "b"], [[start], [start + 3]], [[4], [4]], [[0], [0]]) == [INVALID] * 2
    assert get(["a", "b"], [[start], [start + 4]], [[4], [4]], [[0], [0]]) == [4, 4]
    assert store.batch_get_session_end(["a", "b"]) == 0
    assert store.batch_get_into(["a", "b"], [start, start + 100], [100, 100]) == [100, 100]
    assert ours.bytes_at(0, 200) == b"a" * 100 + b"b" * 100


def test_buffers_that_are_more_than_bytes(ours: Place) -> None:
    masked: Any = np.ma.masked_array
    for value in (masked([1.0, 2.0], mask=[True, False]), np.array([None]), np.array([None]).data):
        assert ours.store.put("p", value) == INVALID
        assert ours.store.put_parts("p", b"head", value) == INVALID
    assert ours.store.is_exist("p") == 0


def test_get_sessions(place: Place) -> None:
    store, start = place.store, place.start
    assert store.batch_put_from(["f", "g"], [start, start], [1000, 100]) == [0, 0]
    assert store.batch_get_session_start(["f", "missing"]) == [0, MISS]
    pointers, sizes = [[start + MIB, start + MIB + 50]], [[10, 20]]
    read = store.batch_get_into_multi_buffer_ranges(["f"], pointers, sizes, [[0, 10]])
    assert read == [30]
    assert place.bytes_at(MIB + 50, 20) == place.bytes_at(10, 20)
    get = store.batch_get_into_multi_buffer_ranges
    assert get(["f"], [[start + MIB]], [[30]], [[990]]) == [INVALID]
    assert get(["g"], [[start + MIB]], [[30]], [[0]]) == [INVALID]  # not of the session
    assert store.batch_get_session_end(["f", "never started"]) == 0
    assert get(["f"], pointers, sizes, [[0, 10]]) == [INVALID]


def test_put_sessions(place: Place) -> None:
    store, start = place.store, place.start
    assert store.put("a", b"hello") == 0
    assert store.batch_put_session_start(["s", "t", "a"], [100, 50, 5]) == [0, 0, -705]
    assert store.batch_put_session_start(["s"], [100]) == [INVALID]
    assert store.batch_put_session_start(["u", "v"], [1]) == [INVALID] * 2
    write = store.batch_put_from_multi_buffer_ranges
    assert write(["s"], [[start, start + 200]], [[50, 50]], [[50, 0]]) == [100]
    assert write(["s"], [[start]], [[50]], [[80]]) == [INVALID]
    assert write(["never started"], [[start]], [[50]], [[0]]) == [INVALID]
    assert store.is_exist("s") == 0
    assert store.batch_put_session_end(["s"]) == [0]
    assert store.get("s") == place.bytes_at(200, 50) + place.bytes_at(0, 50)
    assert store.batch_put_session_revoke(["t", "never started"]) == [0, INVALID]
    assert store.is_exist("t") == 0
    assert store.batch_put_session_end(["t"]) == [INVALID]


def test_a_put_session_may_leave_bytes_out(place: Place) -> None:
    """An engine's padding, for example. Mooncake stores the object; here the rest is zero."""
    store, start = place.store, place.start
    assert store.batch_put_session_start(["part"], [100]) == [0]
    assert store.batch_put_from_multi_buffer_ranges(["part"], [[start]], [[10]], [[0]]) == [10]
    assert store.batch_put_session_end(["part"]) == [0]
    assert store.get("part")[:10] == place.bytes_at(0, 10)
    assert len(store.get("part")) == 100


def test_replacing(place: Place) -> None:
    store, start = place.store, place.start
    assert store.put("a", b"hello") == 0
    assert store.upsert("a", b"newer") == 0
    assert store.get("a") == b"newer"
    assert store.upsert_parts("a", b"1", b"2") == 0
    assert store.get("a") == b"12"
    assert store.upsert_batch(["a", "b"], [b"3", b"4"]) == 0
    assert store.upsert_from("a", start, 10) == 0
    assert store.batch_upsert_from(["a", "b"], [start, start], [5, 6]) == [0, 0]
    assert (store.get_size("a"), store.get_size("b")) == (5, 6)


def test_tensors(place: Place) -> None:
    torch = pytest.importorskip("torch")
    store, tensor = place.store, torch.arange(6, dtype=torch.float32).reshape(2, 3)
    assert store.put_tensor("t", tensor) == 0
    assert store.batch_put_tensor(["u", "v"], [tensor + 1, tensor + 2]) == [0, 0]
    assert torch.equal(store.get_tensor("t"), tensor)
    second, missing = store.batch_get_tensor(["v", "missing"])
    assert torch.equal(second, tensor + 2)
    assert missing is None
    assert store.put("a", b"no tensor") == 0
    assert store.get_tensor("a") is None
    assert store.put_tensor("w", "no tensor") == INVALID
    assert store.batch_put_tensor(["w", "x"], [tensor, None]) == [0, INVALID]
    assert store.batch_put_tensor(["y", "z"], [tensor]) == [INVALID] * 2
    assert store.pub_tensor("t", tensor + 1, place.config()) == 0  # it is there, and stays
    assert torch.equal(store.get_tensor("t"), tensor)
    assert store.upsert_tensor("t", tensor + 3) == 0
    assert torch.equal(store.get_tensor("t"), tensor + 3)
    assert store.batch_upsert_pub_tensor(["t"], [tensor.t()], place.config()) == [0]
    assert torch.equal(store.get_tensor("t"), tensor.t())
    assert store.get_tensor("t").is_contiguous()


@pytest.mark.slow
def test_tensors_are_the_same_bytes(theirs: Place, ours: Place) -> None:
    torch = pytest.importorskip("torch")
    for number, dtype in enumerate(DTYPES):
        for shape in ((2, 3), (0, 4), (1, 2, 1, 2, 1, 2, 1, 2)):
            key, tensor = f"{dtype} {shape}", torch.ones(shape, dtype=getattr(torch, dtype))
            for place in (theirs, ours):
                assert place.store.put_tensor(key, tensor) == 0
                got = place.store.get_tensor(key)
                assert (got.dtype, got.shape) == (tensor.dtype, tensor.shape)
                assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))
            data = ours.store.get(key)
            assert data == theirs.store.get(key)
            assert data[8] == number
    for place in (theirs, ours):
        assert place.store.put_tensor("nine", torch.ones((1,) * 9)) == INVALID
        assert place.store.put_tensor("complex", torch.ones(1, dtype=torch.complex64)) == INVALID


def test_tensors_in_registered_memory(place: Place) -> None:
    torch = pytest.importorskip("torch")
    store, start, tensor = place.store, place.start, torch.arange(6).reshape(2, 3)
    assert store.put_tensor("t", tensor) == 0
    size = store.get_size("t")
    assert size == 304 + tensor.nbytes
    assert torch.equal(store.get_tensor_into("t", start, 4096), tensor)
    assert store.get_tensor_into("t", start, 10) is None
    assert store.get_tensor_into("missing", start, 4096) is None
    first, missing = store.batch_get_tensor_into(["t", "missing"], [start, start + 1024], [512] * 2)
    assert torch.equal(first, tensor)
    assert missing is None
    assert store.batch_get_tensor_into(["t", "missing"], [start], [512]) == [INVALID] * 2
    assert store.put_tensor_from("u", start, size) == 0
    assert torch.equal(store.get_tensor("u"), tensor)
    assert store.put_tensor_from("v", start, 4096) == INVALID  # more than the tensor has
    assert store.batch_put_tensor_from(["v", "w"], [start], [size]) == [INVALID] * 2
    place.memory[:4096] = 0
    assert store.upsert_tensor_from("u", start, 400) == INVALID
    assert torch.equal(store.get_tensor("u"), tensor)


def test_slices_of_tensors(place: Place) -> None:
    torch = pytest.importorskip("torch")
    store, tensor = place.store, torch.arange(24).reshape(4, 6)
    assert store.put_tensor_with_tp("t", tensor, tp_size=2, split_dim=1) == 0
    assert [store.is_exist(key) for key in ("t", "t_tp_0", "t_tp_1")] == [0, 1, 1]
    assert torch.equal(store.get_tensor_with_tp("t", 1, 2), tensor[:, 3:])
    assert torch.equal(store.get_tensor("t_tp_0"), tensor[:, :3])
    assert store.get_tensor_with_tp("t", 2, 2) is None
    assert store.get_tensor_with_tp("t") is None
    for size, dim in ((3, 0), (2, 2), (2, -1)):  # not in equal parts, or no such dimension
        assert store.put_tensor_with_tp("u", tensor, 0, size, dim) == INVALID
    assert store.batch_put_tensor_with_tp(["v", "w"], [tensor, None], 0, 2) == [0, INVALID]
    assert store.batch_put_tensor_with_tp(["v"], [tensor, tensor], 0, 2) == [INVALID]
    assert store.pub_tensor_with_tp("x", tensor, place.config()) == 0
    assert torch.equal(store.get_tensor("x"), tensor)
    read = store.batch_get_tensor_with_tp(["v", "missing"], 1, 2)
    assert torch.equal(read[0], tensor[2:])
    assert read[1] is None
    assert store.get_tensor_into("x", place.start, 4096) is not None
    size = store.get_size("x")
    assert store.put_tensor_with_tp_from("y", place.start, size, 0, 2, 0) == 0
    into = store.get_tensor_with_tp_into("y", place.start + 4096, 4096, 1, 2)
    assert torch.equal(into, tensor[2:])


def test_removing(place: Place) -> None:
    store = place.store
    assert store.put_batch(["m1", "m2", "n1", "o"], [b"1"] * 4) == 0
    assert store.remove("missing") == MISS
    assert store.remove("o", True) == 0
    assert store.remove("o", force=True) == MISS
    assert store.remove_by_regex("^m.$", True) == 2
    assert store.remove_by_regex("[", True) == INVALID
    assert store.batch_is_exist(["m1", "m2", "n1"]) == [0, 0, 1]
    assert store.batch_remove(["n1", "missing"], True) == [0, MISS]
    assert store.put("last", b"1") == 0
    assert store.remove_all(True) == 1


def test_the_same_key_again_in_one_call(place: Place) -> None:
    store, start = place.store, place.start
    assert store.put_batch(["a", "a"], [b"1", b"2"]) == 0
    assert store.get_batch(["a", "a", ""]) == [b"1", b"1", b""]
    assert store.batch_is_exist(("a", "a", "no")) == [1, 1, 0]
    assert store.batch_is_exist(["", "a"]) == [0, 1]
    assert store.batch_get_into(["a", "a"], [start, start + 10], [1, 1]) == [1, 1]
    assert store.batch_put_session_start(["s", "s"], [10, 10]) == [0, -705]
    assert store.batch_put_session_revoke(["s"]) == [0]
    assert store.batch_remove(["a", "a", ""], True) == [0, MISS, MISS]


def test_the_last_value_of_a_key_replaces(ours: Place) -> None:
    assert ours.store.upsert_batch(["u", "v", "u"], [b"1", b"2", b"3"]) == 0
    assert ours.store.get_batch(["u", "v"]) == [b"3", b"2"]


def test_ranges_that_do_not_fit(place: Place) -> None:
    store, start = place.store, place.start
    assert store.put("a", bytes(24)) == 0
    get = store.get_into_ranges
    assert get([start], [["a"]], [[[0, 5]]], [[[0, 23]]], [[[4, 4]]]) == [[[4, INVALID]]]
    assert get([start], [["a"]], [[[0]]], [[[0]]], []) == [[[INVALID]]]
    assert get([start, start], [["a"]], [[[0]]], [[[0]]], [[[1]]]) == [[[INVALID]]] * 2
    assert get([start], [["a", "b"]], [[[0]]], [[[0]]], [[[1]]]) == [[[INVALID], [INVALID]]]
    assert get([start], [["a"]], [[[0, 1]]], [[[0]]], [[[1]]]) == [[[INVALID, INVALID]]]
    assert get([start], [["a"]], [[[0]]], [[[0]]], [[[1, 2]]]) == [[[INVALID]]]
    assert get([start], [["a"]], [[[0]]], [[[0]]], [[[0]]]) == [[[0]]]
    assert get([], [], [], [], []) == []
    assert store.batch_get_session_start(["a"]) == [0]
    get = store.batch_get_into_multi_buffer_ranges
    assert get(["a"], [[start]], [[4]], [[0, 1]]) == [INVALID]
    assert get(["a", "b"], [[start]], [[4]], [[0]]) == [INVALID] * 2
    assert store.batch_get_session_end(["a"]) == 0
    assert store.batch_put_session_start(["s"], [10]) == [0]
    put = store.batch_put_from_multi_buffer_ranges
    assert put(["s"], [[start]], [[4]], []) == [INVALID]
    assert put(["s"], [[start]], [[4]], [[0, 1]]) == [INVALID]
    assert store.batch_put_session_revoke(["s"]) == [0]


@pytest.mark.parametrize("key", [None, 7, ["a"], "\ud800"])
def test_a_key_that_is_no_text(place: Place, key: Any) -> None:
    store = place.store
    for call in (store.get, store.is_exist, store.get_size, store.get_buffer, store.remove):
        with pytest.raises(TypeError):
            call(key)
    with pytest.raises(TypeError):
        store.put(key, b"1")
    with pytest.raises(TypeError):
        store.batch_is_exist([key])


def test_keys_of_any_bytes(place: Place) -> None:
    store = place.store
    keys = [b"bytes", "a\0b", "\u00fc", "k" * 256, "k" * 257, "k" * 100_000, "/", " ", "\n"]
    for key in keys:
        assert store.put(key, b"1") == 0
    assert store.batch_is_exist(keys) == [1] * len(keys)
    assert store.remove_all(True) == len(keys)
    with pytest.raises(TypeError):
        store.batch_is_exist("one key for several")


def test_numbers_of_replicas(place: Place) -> None:
    """More than there are nodes are as many as there are nodes."""
    config = place.config()
    for number in (2, 100):
        config.replica_num = number
        assert place.store.put(f"{number}", b"1", config) == 0
    config.replica_num = 0
    assert place.store.put("none", b"1", config) == INVALID


def test_unregistering(place: Place) -> None:
    other = np.zeros(MIB, np.uint8)
    address = int(other.ctypes.data)
    assert place.store.register_buffer(address, MIB) == 0
    assert place.store.unregister_buffer(address + 10) == INVALID  # it does not begin there
    assert place.store.put_from("f", address, 10) == 0
    assert place.store.unregister_buffer(address) == 0
    assert place.store.unregister_buffer(address) == INVALID


# --- where this one promises more -----------------------------------------------------------------


def test_memory_that_is_not_registered_is_refused(ours: Place) -> None:
    """Mooncake's copies it over TCP, and needs it registered for RDMA."""
    other = np.zeros(100, np.uint8)
    address = int(other.ctypes.data)
    assert ours.store.put_from("f", address, 100) == INVALID
    assert ours.store.put_from("f", ours.start + MEMORY_BYTES - 10, 100) == INVALID
    pointers = [address, ours.start]
    assert ours.store.batch_put_from(["f", "g"], pointers, [100, 100]) == [INVALID, 0]
    assert ours.store.batch_get_into(["g", "g"], pointers, [100, 100]) == [INVALID, 100]
    assert ours.store.register_buffer(16, 10) == INVALID  # Mooncake's takes it, and crashes later


def test_a_shape_of_negative_lengths_is_no_tensor(ours: Place) -> None:
    """Although their product is right."""
    torch = pytest.importorskip("torch")
    assert ours.store.put_tensor("shape", torch.ones(2, 3)) == 0
    data = bytearray(ours.store.get("shape"))
    assert struct.unpack_from("<2q", data, 40) == (2, 3)
    struct.pack_into("<2q", data, 40, -2, -3)
    assert ours.store.put("negative", data) == 0
    assert ours.store.get_tensor("negative") is None


def test_no_bytes_are_a_value(ours: Place) -> None:
    assert ours.store.put("empty", b"") == 0
    assert (ours.store.is_exist("empty"), ours.store.get_size("empty")) == (1, 0)
    assert ours.store.get("empty") == b""
    assert ours.store.get_buffer("empty"), "it is there"


def test_what_is_leased_is_removed_at_once(ours: Place) -> None:
    """Its readers keep its bytes until their lease ends; Mooncake's says -706 until then."""
    store = ours.store
    assert store.put_batch(["a", "b"], [b"1", b"2"]) == 0
    assert store.batch_is_exist(["a", "b"]) == [1, 1]
    assert store.remove("a") == 0
    assert store.batch_replica_clear(["a", "b"]) == ["b"]
    assert store.batch_is_exist(["a", "b"]) == [0, 0]


def test_replicas_are_cleared_by_node(ours: Place) -> None:
    store = ours.store
    assert store.put("a", b"1") == 0
    [replica] = store.get_replica_desc("a")
    node = replica.get_memory_descriptor().buffer_descriptor.transport_endpoint
    assert store.batch_replica_clear(["a"], "another node") == []
    assert store.batch_replica_clear(["a"], node) == ["a"]


def test_a_full_pool_stores_what_fits(ours: Place) -> None:
    """What is leased cannot be evicted; each key has a code of its own."""
    store, size = ours.store, MEMORY_BYTES
    count = POOL_BYTES // size + 4
    keys = [f"full-{index}" for index in range(count)]
    codes: list[int] = []
    for key in keys:
        codes += store.batch_put_from([key], [ours.start], [size])
        assert store.is_exist(key) == (codes[-1] == 0)
    assert codes.count(0) >= POOL_BYTES // size - 2
    assert set(codes[codes.index(FULL) :]) == {FULL}
    more = store.batch_put_from(["small", "large"], [ours.start] * 2, [100, size])
    assert more == [0, FULL]


def test_a_value_that_no_segment_holds_spares_the_others(ours: Place) -> None:
    store = ours.store
    assert store.put("larger than the pool", bytes(POOL_BYTES + 1)) == INVALID
    assert store.put_batch(["large", "small"], [bytes(POOL_BYTES + 1), b"1"]) == INVALID
    assert store.get("small") == b"1"


# --- without a store ------------------------------------------------------------------------------


def test_every_call_has_an_answer_without_a_store() -> None:
    """Mooncake's crashes."""
    store = MooncakeDistributedStore()
    assert store.health_check() == 1
    assert store.is_exist("a") == 0  # any other number is a hit to some callers
    assert store.batch_is_exist(["a"]) == [-1]
    assert store.put("a", b"1") == INVALID
    assert store.get("a") == b""
    assert store.get_size("a") == INVALID
    assert store.batch_get_buffer(["a"]) == [None]
    assert store.batch_get_into(["a"], [1], [1]) == [INVALID]
    assert store.get_tensor("a") is None
    assert store.remove("a") == INVALID
    assert store.remove_all() == INVALID
    assert store.register_buffer(1 << 20, 1) == INVALID
    assert store.close() == 0


def test_a_dead_master_is_a_code_within_the_deadline(caplog: pytest.LogCaptureFixture) -> None:
    master = start_master(memory=POOL_BYTES)
    place = Place(MooncakeDistributedStore(), None, f"127.0.0.1:{master.said['port']}")
    store = place.store
    try:
        assert store.put("a", b"1") == 0
        os.kill(master.pid, signal.SIGKILL)
        master.wait()
        codes = [store.put(f"key {index}", b"1") for index in range(5)]
        assert codes == [DOWN] * 5
        assert store.is_exist("b") == 0
        assert store.batch_is_exist(["b"]) == [-1]
        assert store.health_check() == 2
        assert store.close() == 0
        assert place.setup() == DOWN
        assert "setup failed" in caplog.text
    finally:
        store.close()
        master.stop()


# What 0.3.14 has beside 0.3.13. Written from its own tests and documents: the package that these
# tests use has no such release, so Mooncake's client is not asked.


def test_asking_without_a_lease(ours: Place) -> None:
    store = ours.store
    options = ExistOptions()
    options.prefetch_to_memory = True
    for key in "abc":
        assert store.put(key, b"x") == 0
    assert (store.is_exist("a", options), store.is_exist("no", options=options)) == (1, 0)
    assert store.batch_is_exist(["a", "no"], options) == [1, 0]
    assert (store.probe_key("a"), store.probe_key("no")) == (1, 0)
    assert store.batch_probe_key(["a", "b", "c", "no"]) == [1, 1, 1, 0]
    assert store.batch_probe_key(["a"], candidate_size=0) == [1]
    assert store.batch_probe_key([]) == []


@pytest.mark.parametrize(
    ("keys", "size", "mask"),
    [
        (["a", "b", "c", "no"], 2, [1, 1, 0, 0]),
        (["a", "no", "b", "c"], 2, [0, 0, 1, 1]),
        (["a", "no"], 2, [0, 0]),
        (["a", "b", "a", "a"], 2, [0, 0, 1, 1]),
        (["a", "b"], 1, [0, 1]),
        ([], 0, []),
    ],
)
def test_the_last_complete_candidate(
    ours: Place, keys: list[str], size: int, mask: list[int]
) -> None:
    for key in "abc":
        assert ours.store.put(key, b"x") == 0
    assert ours.store.batch_probe_key(keys, "LastHitOnly", size) == mask


def test_wrong_candidates_are_refused(ours: Place) -> None:
    for size in (0, 3):
        with pytest.raises(ValueError, match="candidates"):
            ours.store.batch_probe_key(["a", "b"], "LastHitOnly", size)
    with pytest.raises(ValueError, match="policy"):
        ours.store.batch_probe_key(["a"], "unknown")
    with pytest.raises(TypeError):
        ours.store.batch_probe_key(["a"], "LastHitOnly", -1)
    store = MooncakeDistributedStore()
    for policy in ("none", "LastHitOnly"):
        assert store.batch_probe_key(["a", "b"], policy, 2) == [-1, -1]
    assert store.probe_key("a") == -1


def test_setup_takes_a_dictionary_of_strings(ours: Place) -> None:
    settings = {"local_hostname": "here", "master_server_address": ours.address, "device_name": ""}
    store = MooncakeDistributedStore()
    assert store.setup({**settings, "global_segment_size": "0", "tenant_id": "a-tenant"}) == 0
    assert store.get_hostname() == "here"
    assert store.put("a", b"1") == 0
    assert ours.store.is_exist("a") == 0  # tenants are namespaces
    assert store.remove_all() == 1
    store.close()


@pytest.mark.parametrize("text", ["16MB", "16 mb", " 16M ", str(16 * MIB), "16MiB"])
def test_units_of_sizes_are_binary(ours: Place, text: str) -> None:
    assert _size(text) == 16 * MIB
    assert (_size("0"), _size(5), _size("0.5GB")) == (0, 5, 512 * MIB)
    settings = {"local_hostname": "here", "master_server_addr": ours.address}
    for wrong in ("50%", "x", "-1", "", -1):
        store = MooncakeDistributedStore()
        assert store.setup({**settings, "global_segment_size": wrong}) == INVALID


def test_a_store_is_set_up_once(ours: Place, caplog: pytest.LogCaptureFixture) -> None:
    """Its memory stays registered. One whose setup has failed can be set up again."""
    assert ours.setup() == INVALID
    assert "close() first" in caplog.text
    assert ours.store.setup_dummy(1, 1, ours.address) == INVALID
    assert ours.store.put_from("still registered", ours.start, 10) == 0
    store = MooncakeDistributedStore()
    for master, code in (("no address at all:x", INVALID), (ours.address, 0)):
        assert store.setup("here", "", 0, 0, "tcp", "", master) == code
    assert store.close() == 0
    assert store.setup("here", "", 0, 0, "tcp", "", ours.address) == 0
    assert store.remove_all() >= 1
    store.close()


def test_memory_of_the_store_is_registered_like_any_other(ours: Place) -> None:
    address = ours.store.alloc_from_mem_pool(MIB)
    assert ours.store.put_from("f", address, 10) == INVALID
    assert ours.store.register_buffer(address, MIB) == 0
    assert ours.store.put_from("f", address, 10) == 0
    assert ours.store.get("f") == bytes(10)
    assert ours.store.unregister_buffer(address) == 0
    assert ours.store.alloc_from_mem_pool(0) == 0


# --- parts ----------------------------------------------------------------------------------------


def test_sessions_are_bounded() -> None:
    sessions = PutSessions(bytes_max=100)
    assert sessions.start(b"a", 60) == Code.OK
    assert sessions.start(b"b", 60) == Code.NO_AVAILABLE_HANDLE
    assert sessions.start(b"c", 0) == Code.INVALID_PARAMS
    assert sessions.end(b"a") is not None
    assert sessions.start(b"b", 100) == Code.OK
    for offset, size in ((-1, 1), (100, 1), (0, 101)):
        assert sessions.write(b"b", [(offset, memoryview(bytes(size)))]) == Code.INVALID_PARAMS
    assert sessions.write(b"b", [(99, memoryview(b"x"))]) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoSpaceError, FULL), (ClosedError, INVALID), (InvalidKeyError, INVALID),
        (PutRefusedError, -800), (UnavailableError, DOWN), (MasterUnreachableError, DOWN),
        (CorruptObjectError, -1),
    ],
)  # fmt: skip
def test_each_error_has_the_code_of_mooncake(error: type[KVStoreError], code: int) -> None:
    assert code_of(error("said")) == code


def test_allocator() -> None:
    allocator = MooncakeHostMemAllocator()
    address = allocator.alloc(MIB)
    assert address
    assert allocator.free(address) == 0
    assert allocator.free(address) == INVALID
    assert allocator.alloc(0) == 0


# --- with authentication required ----------------------------------------------------------------


@pytest.fixture(scope="module")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Identities:
    return Identities(tmp_path_factory.mktemp("identities"))


@pytest.fixture(scope="module")
def required(tmp_path_factory: pytest.TempPathFactory, identities: Identities) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("required"), identities=identities) as cluster:
        cluster.start()
        yield cluster


def as_engine(required: Cluster, **given: Any) -> tuple[int, MooncakeDistributedStore]:
    store = MooncakeDistributedStore()
    return store.setup({"master_server_addr": required.address, **given}), store


def test_with_an_identity_it_has_the_namespace_of_its_tenant(
    required: Cluster, identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tenant in ("default", "ours"):
        auth = identities.file(tenant, "engine", reads=[tenant], writes=[tenant])
        monkeypatch.setenv("KVSTORE_AUTH", auth)
        for _ in range(2):  # the second client finds what the first has put
            code, store = as_engine(required, tenant_id=tenant)
            assert code == 0
            assert store.put("a", b"of " + tenant.encode()) == 0
            assert store.get("a") == b"of " + tenant.encode()
            assert store.is_exist("a") == 1
            assert store.health_check() == 0
            store.close()
    names = {each.name for each in required.status().namespaces}
    assert names == {"default", "ours"}


# --- which mooncake.store is found ----------------------------------------------------------------

WHOSE = "import mooncake.store as s; print(s.MooncakeDistributedStore.__module__)"


def python(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_python("-c", code, variables=environ)


def test_a_command_finds_this_store() -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "as-mooncake", "--"]
    done = run_python("-c", WHOSE, prefix=command)
    assert (done.returncode, done.stdout.strip()) == (0, "kvstore.connectors.mooncake.store")
    assert done.stderr.splitlines()[1].startswith("mooncake.store is kvstore ")


def test_a_command_that_does_not_find_it_is_told() -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "as-mooncake", "--"]
    done = run_python("-I", "-c", WHOSE, prefix=command)
    assert done.stdout.strip() != "kvstore.connectors.mooncake.store"
    assert "python -I" in done.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("there_is_mooncake")
def test_only_store_is_replaced() -> None:
    path = kvstore.connectors.mooncake_shim.python_path({})
    code = "import mooncake.engine as e, mooncake.store; print(e.__file__)"
    done = python(code, PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert "as_mooncake" not in done.stdout


def test_env_prints_what_a_shell_evaluates() -> None:
    command = [sys.executable, "-m", "kvstore.cli.main", "as-mooncake", "--env"]
    rest = {**os.environ, "PYTHONPATH": "/with a space"}
    done = subprocess.run(command, env=rest, capture_output=True, text=True, check=True, timeout=60)
    script = f'{done.stdout}\nprintf %s "$PYTHONPATH"'
    shell = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert shell.stdout == f"{kvstore.connectors.mooncake_shim.DIRECTORY}:/with a space"


def test_install_in_a_program() -> None:
    again = f"import kvstore.connectors.mooncake_shim as m; m.install(); m.install(); {WHOSE}"
    done = python(again)
    assert done.stdout.strip() == "kvstore.connectors.mooncake.store", done.stderr
    children = "import os; assert os.environ['PYTHONPATH'].count('as_mooncake') == 1"
    assert python(f"{again}; {children}").returncode == 0


@pytest.mark.slow
@pytest.mark.usefixtures("there_is_mooncake")
def test_install_comes_first() -> None:
    shim = "from kvstore.connectors import mooncake_shim; mooncake_shim.install()"
    late = f"import mooncake.store; {shim}"
    done = python(late)
    assert "UsageError" in done.stderr
    assert "before anything imports" in done.stderr
