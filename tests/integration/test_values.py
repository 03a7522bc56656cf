"""Every verb, end to end: what is put comes back, whatever carries it."""

from __future__ import annotations

import ctypes
import mmap
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kvstore import PutOutcome
from kvstore.client import values as client_values
from kvstore.errors import (
    BufferMismatchError,
    CorruptObjectError,
    InvalidArgumentError,
    UnsupportedValueError,
)
from kvstore.texts import key_text

torch = pytest.importorskip("torch")

STORED, FOUND = PutOutcome.STORED, PutOutcome.FOUND

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)
QUANTIZED = [each for each in DTYPES if str(each).removeprefix("torch.q")[:4] in ("int8", "int3")]
"""Types of torch.quantize_per_tensor. A tensor of them that carries a scale cannot be stored (its
bytes mean nothing without it, and torch has no way to build one from bytes and a descriptor that
other languages read); a plain tensor over the same bytes, which is all that the other dtypes of
this kind (quint4x2, bits8, uint1 to int7) can be in torch, is stored like any other."""

ML_DTYPES = [
    "bfloat16", "float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float6_e2m3fn",
    "float6_e3m2fn", "float4_e2m1fn", "int2", "int4", "uint2", "uint4",
]  # fmt: skip


def some_bytes(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def tensor_of(dtype: Any, shape: tuple[int, ...], seed: int = 0) -> Any:
    """Any bit pattern, but for bool, which has two."""
    count = int(np.prod(shape, dtype=int))
    pattern = some_bytes(count * dtype.itemsize, seed)
    if dtype is torch.bool:
        pattern &= 1
    flat = torch.from_numpy(pattern) if count else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def raw(value: Any) -> bytes:
    """The bytes of a tensor or array, in the order of its elements."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if not value.numel():
        return b""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy().tobytes())


def same(found: Any, put: Any) -> bool:
    return (
        type(found) is type(put)
        and found.dtype == put.dtype
        and tuple(found.shape) == tuple(put.shape)
        and raw(found) == raw(put)
    )


# --- torch -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_every_dtype_that_torch_has(verbs: Any) -> None:
    values = {
        f"{dtype} {shape}": tensor_of(dtype, shape, seed)
        for seed, dtype in enumerate(DTYPES)
        for shape in ((), (0,), (3, 0, 2), (3, 5), (1024,))
    }
    assert len(DTYPES) > 20
    outcomes = verbs.put_many(values.items())
    assert outcomes == [STORED] * len(values)
    found = verbs.get_many(list(values))
    for name, value, back in zip(values, values.values(), found, strict=True):
        assert same(back, value), name
    for name in list(values)[::5]:
        assert same(verbs.get(name), values[name]), name


def test_the_shapes_that_tensors_come_in(verbs: Any) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    complexes = torch.complex(base, -base)
    values = {
        "transposed": base.t(),
        "every second": base[:, ::2],
        "expanded": base[0].expand(5, 6),
        "offset": base[1:, 1:],
        "channels last": torch.zeros(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
        "needs a gradient": base.clone().requires_grad_(),
        "of a gradient": base.clone().requires_grad_() * 2,
        "conjugated": complexes.conj(),
        "conjugated, transposed": complexes.t().conj(),
        "negative view": complexes.conj().imag,
        "parameter": torch.nn.Parameter(base.clone()),
        "many dimensions": base.reshape(4, 1, 1, 1, 1, 1, 1, 6),
    }
    for name, value in values.items():
        assert verbs.put(name, value) is STORED
        back = verbs.get(name)
        expected = value.detach().resolve_conj().resolve_neg()
        assert back.dtype == expected.dtype, name
        assert back.shape == expected.shape, name
        assert torch.equal(back, expected), name
        assert back.is_contiguous(), name
        assert not back.requires_grad, name
        assert not back.is_conj(), name


def test_tensors_without_plain_bytes_are_refused(verbs: Any) -> None:
    assert {str(each) for each in QUANTIZED} == {"torch.qint8", "torch.qint32"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)
    refused = {
        "quantized": quantized,
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "an object": object(),
        "a list": [1, 2],
        "None": None,
        "numpy objects": np.array([object()]),
        "numpy records": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
        "numpy strings of any length": np.array(["a", "bc"], dtype=np.dtypes.StringDType()),
        "too many dimensions": torch.zeros((1,) * 200),
    }
    for name, value in refused.items():
        with pytest.raises(UnsupportedValueError) as caught:
            verbs.put(name, value)
        assert caught.value.advice, name
        assert not verbs.exists(name)
    assert verbs.put("quantized", torch.int_repr(quantized)) is STORED


# --- numpy -------------------------------------------------------------------------------------


def test_every_kind_of_array(verbs: Any) -> None:
    letters = "?bBhHiIlLqQefdgFDG"
    values: dict[str, np.ndarray[Any, Any]] = {
        f"{np.dtype(letter).name} {letter}": some_bytes(np.dtype(letter).itemsize * 6, at)
        .view("u1" if letter == "?" else letter)
        .astype(letter)
        .reshape(2, 3)
        for at, letter in enumerate(letters)
        if letter != "?"
    }
    values |= {
        "bool": np.array([True, False, True]),
        "big-endian integers": np.arange(6, dtype=">i4"),
        "big-endian floats": np.arange(6, dtype=">f8").reshape(3, 2),
        "big-endian complex": np.arange(3, dtype=">c16"),
        "dates": np.array(["2026-01-01", "NaT"], dtype="M8[D]"),
        "times": np.array([1, -1], dtype="M8[25us]"),
        "big-endian times": np.array([1, 2], dtype=">M8[ns]"),
        "durations": np.array([1, 2], dtype="m8[s]"),
        "strings": np.array(["", "ä", "日本"]),
        "big-endian strings": np.array(["ab"], dtype=">U2"),
        "byte strings": np.array([b"a", b"bcd"]),
        "void": np.array([b"abcd", b"efgh"], dtype="V4"),
        "0-d": np.array(2.5),
        "0-d time": np.array("2026-01-01T00", dtype="M8[h]"),
        "empty": np.empty((0, 3), np.int16),
        "empty strings": np.array([], dtype="U5"),
        "Fortran order": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "reversed": np.arange(6)[::-1],
        "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
        "read-only": np.frombuffer(b"abcdefgh", np.uint32),
    }
    for name in ML_DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name))
        values[f"ml_dtypes {name}"] = np.arange(3).astype(np.float32).astype(dtype)
        values[f"ml_dtypes {name} 0-d"] = np.array(1, np.float32).astype(dtype)
    assert verbs.put_many(values.items()) == [STORED] * len(values)
    for name, value, back in zip(
        values, values.values(), verbs.get_many(list(values)), strict=True
    ):
        assert same(back, value), (name, back, value)
        assert back.flags.writeable, name


def test_numpy_scalars_come_back_as_arrays_without_dimensions(verbs: Any) -> None:
    verbs.put("scalar", np.float32(2.5))
    assert same(verbs.get("scalar"), np.array(2.5, np.float32))


# --- bytes -------------------------------------------------------------------------------------


def test_everything_that_holds_bytes(verbs: Any) -> None:
    array = np.arange(12, dtype=np.int16).reshape(3, 4)
    values = {
        "bytes": b"abc",
        "bytearray": bytearray(b"abc"),
        "memoryview": memoryview(b"abc"),
        "memoryview of numbers": array.data,
        "memoryview with gaps": array.data[::2],
        "memoryview of big-endian numbers": np.arange(3, dtype=">i4").data,
        "memoryview without dimensions": np.array(7, np.int32).data,
        "nothing": b"",
        "nothing, as a view": memoryview(b""),
        "a megabyte": some_bytes(1 << 20).tobytes(),
    }
    for name, value in values.items():
        expected = bytes(value) if not isinstance(value, memoryview) else value.tobytes()
        assert verbs.put(name, value) is STORED, name
        assert verbs.get(name) == expected, name
        assert type(verbs.get(name)) is bytes, name
        assert bytes(verbs.get(name, copy=False)) == expected, name


def test_a_value_of_no_bytes_is_a_value(verbs: Any) -> None:
    assert verbs.get("nothing") is None
    assert verbs.put("nothing", b"") is STORED
    assert verbs.exists("nothing")
    assert verbs.get("nothing") == b""
    assert verbs.get_into("nothing", bytearray(b"xy")) == [0]
    assert verbs.stat("nothing").detail.row.size == 0
    assert verbs.remove("nothing")
    assert verbs.get("nothing") is None


def test_one_kind_as_another(verbs: Any) -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    verbs.put("array", array)
    verbs.put("tensor", torch.arange(6, dtype=torch.bfloat16))
    verbs.put("bytes", b"abcd")
    verbs.put("dates", np.array(["2026-01-01"], dtype="M8[D]"))
    assert torch.equal(verbs.get("array", kind="torch"), torch.from_numpy(array))
    assert verbs.get("array", kind="bytes") == array.tobytes()
    assert verbs.get("tensor", kind="numpy").dtype == ml_dtypes.bfloat16
    assert verbs.get("bytes", kind="numpy").tolist() == [97, 98, 99, 100]
    assert verbs.get("bytes", kind="torch").tolist() == [97, 98, 99, 100]
    with pytest.raises(UnsupportedValueError, match="torch has no dtype"):
        verbs.get("dates", kind="torch")


# --- values of strangers -----------------------------------------------------------------------

LIES = {
    "pointers": '{"kind":"numpy","dtype":"O","shape":[8]}',
    "an unknown dtype": '{"kind":"torch","dtype":"load","shape":[64]}',
    "infinity": '{"kind":"numpy","dtype":"u1","shape":[Infinity]}',
    "another size": '{"kind":"numpy","dtype":"int64","shape":[9]}',
    "no JSON": '{"kind":',
}


@pytest.fixture
def lies(verbs: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Objects of 64 bytes whose writer says of them what is not true."""
    for name, descriptor in LIES.items():
        with monkeypatch.context() as patch:
            patch.setattr(client_values, "_describe", lambda *_, said=descriptor: said.encode())
            assert verbs.put(name, bytes(range(64))) is STORED
    return list(LIES)


@pytest.mark.parametrize("copy", [True, False])
def test_a_value_that_cannot_be_made_spoils_no_other(
    verbs: Any, lies: list[str], copy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    verbs.put("honest", np.arange(3))
    *none, honest = verbs.get_many([*lies, "honest"], copy=copy)
    assert none == [None] * len(lies)
    assert honest.tolist() == [0, 1, 2]
    assert verbs.stats().counters["unreadable_objects"] == len(lies)
    assert sum("unreadable_objects" in each.message for each in caplog.records) == 1
    for name in lies:
        with pytest.raises((CorruptObjectError, UnsupportedValueError)) as caught:
            verbs.get(name, copy=copy)
        assert caught.value.fields["key"] == name.encode().hex()
        assert key_text(name.encode()) in str(caught.value)
    assert verbs.stats().views <= 1, "only the honest one is leased"


def test_what_cannot_be_made_is_still_its_bytes(verbs: Any, lies: list[str]) -> None:
    content = bytes(range(64))
    for name in lies:
        assert bytes(verbs.get(name, kind="bytes")) == content
        assert bytes(verbs.get(name, kind="bytes", copy=False)) == content
        buffer = bytearray(64)
        assert verbs.get_into(name, buffer) == [64]
        assert bytes(buffer) == content
        with pytest.raises(BufferMismatchError):
            verbs.get_into(name, np.zeros(16, np.int32))
        assert verbs.exists(name), "nothing was reported as corrupt"


def test_a_mask_is_not_lost(verbs: Any) -> None:
    masked: Any = np.ma.masked_array
    with pytest.raises(UnsupportedValueError, match="MaskedArray"):
        verbs.put("masked", masked([1.0, 2.0], mask=[True, False]))
    assert not verbs.exists("masked")


# --- memory that is given twice ------------------------------------------------------------------


def test_memory_of_two_values_is_refused_and_not_touched(verbs: Any) -> None:
    verbs.put_many([("a", b"a" * 100), ("b", b"b" * 100)])
    area = np.zeros(150, np.uint8)
    for buffers in (
        [area[:100], area[:100]], [area[:100], area[50:]], [area[50:], area[:100]],
        [[area[:60], area[40:]], bytearray(100)], [area[:100], memoryview(area.data)[99:]],
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="share memory"):
            verbs.get_into(["a", "b"], buffers)
    ranges = [(0, area[:10]), (50, area[5:20])]
    for keys, wanted in (("a", ranges), (["a", "b"], [ranges[:1], ranges[1:]])):
        with pytest.raises(InvalidArgumentError, match="share memory"):
            verbs.get_ranges(keys, wanted)
    assert not area.any()
    assert verbs.get_into(["a", "b"], [bytearray(100), bytearray(100)]) == [100, 100]
    assert verbs.get_into("a", [area[:50], area[50:]]) == [100]
    assert verbs.get_into(["b", "none"], [area, bytearray(5)]) == [100, None]


def test_views_of_the_pool_are_not_filled(verbs: Any) -> None:
    verbs.put_many([("a", torch.ones(25)), ("b", torch.zeros(25))])
    view = verbs.get("a", copy=False)
    if verbs.lease(view) is None:
        pytest.skip("a copy, over tcp")
    for target in (view, view[3:], view.numpy(), view.numpy().data):
        with pytest.raises(BufferMismatchError, match="read-only"):
            verbs.get_into("b", target)
        with pytest.raises(BufferMismatchError, match="read-only"):
            verbs.get_ranges("b", [(0, target)])
    assert torch.equal(verbs.get("a"), torch.ones(25))


def test_ranges_and_buffers_that_are_none(verbs: Any) -> None:
    verbs.put("a", b"abc")
    ranges: list[Any] = [None, 5, [5], [(0.5, bytearray(1))], [("0", bytearray(1))],
                         [(None, bytearray(1))], [(0,)], [(0, bytearray(1), 2)]]  # fmt: skip
    for wanted in ranges:
        with pytest.raises(InvalidArgumentError):
            verbs.get_ranges("a", wanted)
    for given in (None, 5, [], [bytearray(3)] * 2):
        with pytest.raises(InvalidArgumentError):
            verbs.get_into(["a"], given)
        with pytest.raises(InvalidArgumentError):
            verbs.get_ranges(["a"], given)


def test_memory_that_is_mapped_read_only(verbs: Any) -> None:
    verbs.put("a", bytes(range(100)))
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:3] = b"xyz"
    libc = ctypes.CDLL(None)
    assert not libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, mmap.PROT_READ)
    verbs.register(np.uint64(address), np.int64(mmap.PAGESIZE))
    with pytest.raises(BufferMismatchError, match="writable"):
        verbs.get_into("a", verbs.memory_at(address, 100))
    assert verbs.put("b", verbs.memory_at(address, 3)) is STORED
    assert verbs.get("b") == b"xyz"
    verbs.unregister(address)
    for size in (None, 0, -1, 1.5, "5"):
        with pytest.raises(InvalidArgumentError):
            verbs.register(address, size)
    with pytest.raises(InvalidArgumentError):
        verbs.register(bytearray(5), 5)


# --- the other verbs ---------------------------------------------------------------------------


def test_put_says_what_became_of_it(verbs: Any) -> None:
    assert verbs.put("k", b"one") is STORED
    assert verbs.put("k", b"two") is FOUND
    assert verbs.get("k") == b"one"
    assert verbs.put("k", b"three", overwrite=True) is STORED
    assert verbs.get("k") == b"three"
    assert verbs.put_many([("k", b""), ("l", b"x")]) == [FOUND, STORED]


def test_a_dict_is_put_as_its_pairs(verbs: Any) -> None:
    assert verbs.put_many({"ab": b"1", "c": b"2"}) == [STORED, STORED]
    assert verbs.put_many({b"ab": b"3", b"d": b"4"}) == [FOUND, STORED]
    assert verbs.get_many(["ab", "c", "d"]) == [b"1", b"2", b"4"]
    for bad in (["abc"], [5], [("a", b"1", 2)]):
        with pytest.raises(InvalidArgumentError, match="pairs of a key and a value"):
            verbs.put_many(bad)


def test_chains(verbs: Any) -> None:
    keys = [f"block-{number}" for number in range(40)]
    values = [np.full(100, number) for number in range(40)]
    assert verbs.put_chain(keys[:30], values[:30]) == [STORED] * 30
    assert verbs.match_prefix(keys) == 30
    assert verbs.put_chain(keys[20:], values[20:], parent=keys[19]) == [FOUND] * 10 + [STORED] * 10
    assert verbs.match_prefix(keys) == 40
    assert verbs.match_prefix(keys, namespace="elsewhere") == 0
    assert verbs.match_prefixes(keys, namespaces=["default", "elsewhere"]) == [40, 0]
    assert verbs.match_prefix([]) == 0
    verbs.put_many([(keys[number], b"state") for number in (4, 19, 39)], namespace="states")
    spaces = {"namespaces": ["default"], "states": ["states"]}
    assert verbs.match_all(keys, **spaces)[:3] == (40, False, 40)
    assert verbs.match_all([*keys[:30], "other"], **spaces)[:3] == (30, False, 20)
    assert verbs.match_all(keys[:3], **spaces)[:3] == (3, False, 0)
    assert verbs.match_all(keys, namespaces=["default", "states"])[:3] == (0, False, 0)
    found = verbs.stat(keys[35])
    assert found.detail.parent == keys[34].encode()
    assert found.header.parent == keys[34].encode()
    assert found.detail.row.depth == 35
    assert verbs.remove(keys[10])
    assert verbs.match_prefix(keys) == 10
    assert verbs.put(keys[10], values[10], parent=keys[9]) is STORED
    assert verbs.match_prefix(keys) == 40


def test_get_into_fills_what_it_is_given(verbs: Any) -> None:
    array = np.arange(12, dtype=np.float32)
    verbs.put_many([("array", array), ("bytes", b"0123456789")])
    into = np.zeros((3, 4), np.float32)
    assert verbs.get_into("array", into) == [48]
    assert (into.reshape(-1) == array).all()
    tensor = torch.zeros(12)
    left, right = bytearray(4), bytearray(b"........")
    assert verbs.get_into(["array", "none", "bytes"], [tensor, bytearray(1), [left, right]]) == [
        48, None, 10,
    ]  # fmt: skip
    assert torch.equal(tensor, torch.from_numpy(array))
    assert (bytes(left), bytes(right)) == (b"0123", b"456789..")
    pieces = [torch.zeros(5), torch.zeros(0), torch.zeros(7)]
    assert verbs.get_into(["array"], [pieces]) == [48]
    assert torch.equal(torch.cat(pieces), torch.from_numpy(array))
    anything = np.zeros(48, np.uint8)
    assert verbs.get_into(["array"], [anything]) == [48]
    assert anything.tobytes() == array.tobytes()
    with pytest.raises(BufferMismatchError):
        verbs.get_into(["array"], [np.zeros(12, np.int32)])
    assert same(verbs.get("array"), array)


def test_raw_addresses_of_registered_memory(verbs: Any) -> None:
    memory = torch.arange(40_000, dtype=torch.uint8)
    start = memory.data_ptr()
    with pytest.raises(InvalidArgumentError, match="not within memory that was registered"):
        verbs.memory_at(start, 10)
    verbs.register(start, 40_000)
    verbs.put_many([
        ("one", verbs.memory_at(start + 7, 30_000)),
        ("two", [verbs.memory_at(start, 5), verbs.memory_at(start + 10, 5)]),
    ])  # fmt: skip
    assert verbs.get("one") == memory.numpy()[7:30_007].tobytes()
    assert verbs.get("two") == bytes([0, 1, 2, 3, 4, 10, 11, 12, 13, 14])
    into = [verbs.memory_at(start + 30_010, 4), verbs.memory_at(start + 39_994, 6)]
    assert verbs.get_into(["two", "none"], [into, verbs.memory_at(start, 1)]) == [10, None]
    assert memory[30_010:30_014].tolist() == [0, 1, 2, 3]
    assert memory[-6:].tolist() == [4, 10, 11, 12, 13, 14]
    with pytest.raises(InvalidArgumentError, match="registered already"):
        verbs.register(memory)
    verbs.unregister(start)
    with pytest.raises(InvalidArgumentError, match="not within memory that was registered"):
        verbs.memory_at(start, 10)
    verbs.register(memory)
    assert len(verbs.memory_at(start, 40_000)) == 40_000
    verbs.unregister(memory)
    verbs.unregister(memory)
    with pytest.raises(InvalidArgumentError, match="the processor cannot read"):
        verbs.register(4096, 4096)
    with pytest.raises(InvalidArgumentError, match="needs the size"):
        verbs.register(start)
    with pytest.raises(InvalidArgumentError, match="takes no size"):
        verbs.register(memory, 5)


def test_ranges_are_parts_of_a_value(verbs: Any) -> None:
    whole = bytes(range(200)) * 20_000  # larger than one piece of a transport
    verbs.put_many([("whole", whole), ("array", np.arange(8, dtype=np.int32))])
    front, middle, end = bytearray(3), np.zeros(1_000_000, np.uint8), memoryview(bytearray(5))
    ranges = [(0, front), (1_999_999, middle), (len(whole) - 5, end)]
    assert verbs.get_ranges("whole", ranges) == [len(whole)]
    assert (bytes(front), bytes(end)) == (whole[:3], whole[-5:])
    assert middle.tobytes() == whole[1_999_999:2_999_999]
    two = torch.zeros(2, dtype=torch.int32)
    assert verbs.get_ranges(["none", "array", "whole"], [[(0, front)], [(8, two)], []]) == [
        None, 32, len(whole),
    ]  # fmt: skip
    assert two.tolist() == [2, 3]
    several = [bytearray(3), bytearray(0), bytearray(2)]
    assert verbs.get_ranges("whole", [(7, several)]) == [len(whole)]
    assert b"".join(several) == whole[7:12], "one after the other"
    assert verbs.get_ranges([], []) == []


def test_a_range_outside_of_its_value_is_refused(verbs: Any) -> None:
    verbs.put("ten", b"0123456789")
    buffer = bytearray(4)
    with pytest.raises(BufferMismatchError, match="10 bytes, a range ends at 11"):
        verbs.get_ranges("ten", [(7, buffer)])
    with pytest.raises(InvalidArgumentError, match="an offset is 0 to"):
        verbs.get_ranges("ten", [(-1, buffer)])
    with pytest.raises(InvalidArgumentError, match="1 keys and 2 lists"):
        verbs.get_ranges(["ten"], [[(0, buffer)], []])
    with pytest.raises(BufferMismatchError, match="writable"):
        verbs.get_ranges("ten", [(0, b"read-only")])
    assert bytes(buffer) == bytes(4), "nothing was read"


def test_lookup_says_sizes_and_leases_what_it_finds(verbs: Any) -> None:
    verbs.put_many([("nothing", b""), ("ten", b"0123456789")])
    assert verbs.lookup(["ten", "none", "nothing", "ten"]) == [10, None, 0, 10]
    assert verbs.lookup(["ten"], namespace="elsewhere") == [None]
    assert verbs.lookup([]) == []
    assert verbs.stat("ten").detail.row.leased_ms > 0
    assert verbs.stats().placements >= 2, "a get now makes no call to the master"


def test_a_large_batch_of_small_things_and_a_few_large_ones(verbs: Any) -> None:
    small = {f"small-{number}": number.to_bytes(4, "big") * 25 for number in range(2_000)}
    large = {f"large-{number}": some_bytes((1 << 20) + number, number) for number in range(6)}
    assert set(verbs.put_many(small.items())) == {STORED}
    assert set(verbs.put_many(large.items())) == {STORED}
    assert verbs.get_many([*small, "none"]) == [*small.values(), None]
    for (_, value), back in zip(large.items(), verbs.get_many(list(large)), strict=True):
        assert same(back, value)
    assert verbs.exists_many(["small-7", "none", "large-1"]) == [True, False, True]
    assert verbs.get_many(["small-7", "small-7"]) == [small["small-7"]] * 2


def test_asking_and_removing(verbs: Any) -> None:
    verbs.put_many([("a", b"1"), ("b", b"22")])
    verbs.put("a", b"elsewhere", namespace="other")
    assert verbs.get("a", namespace="other") == b"elsewhere"
    rows = verbs.list_objects()
    assert sorted((row.namespace, bytes(row.key), row.size) for row in rows) == [
        ("default", b"a", 1), ("default", b"b", 2), ("other", b"a", 9),
    ]  # fmt: skip
    assert [row.key for row in verbs.list_objects(namespace="default", prefix=b"b")] == [b"b"]
    spaces = {each.name: (each.objects, each.size) for each in verbs.status().namespaces}
    assert spaces["default"] == (2, 3)
    assert verbs.stat("none") is None
    assert verbs.remove_many(["a", "none"]) == [True, False]
    assert verbs.get_many(["a", "b"]) == [None, b"22"]
    assert verbs.clear("other") == 1
    seen: list[tuple[int, int]] = []
    assert verbs.clear(progress=lambda *numbers: seen.append(numbers)) == 1
    assert seen[-1] == (1, 0)
    assert list(verbs.list_objects()) == []
    assert verbs.stats().epoch > 0


def test_empty_batches_are_no_calls(verbs: Any) -> None:
    assert verbs.put_many([]) == []
    assert verbs.get_many([]) == []
    assert verbs.get_many([], copy=False) == []
    assert verbs.get_into([], []) == []
    assert verbs.exists_many([]) == []
    assert verbs.remove_many([]) == []
    assert verbs.put_chain([], []) == []


def test_a_namespace_that_nobody_wrote_is_a_miss(verbs: Any) -> None:
    verbs.put("k", b"x")
    assert verbs.get("k", namespace="nobody") is None
    assert verbs.get("k", namespace="nobody", copy=False) is None
    assert not verbs.exists("k", namespace="nobody")
    assert verbs.stat("k", namespace="nobody") is None
    assert not verbs.remove("k", namespace="nobody")
    assert verbs.clear("nobody") == 0
    assert list(verbs.list_objects(namespace="nobody")) == []
