"""Every verb, end to end: what is put comes back, whatever carries it."""

from __future__ import annotations

from typing import Any

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
from kvstore.runtime.formatting import key_text
from tests.support.wait import until

torch = pytest.importorskip("torch")

STORED, FOUND = PutOutcome.STORED, PutOutcome.FOUND

DTYPES = sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str)


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


# --- values of strangers -------------------------------------------------------------------------


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


# --- memory that is given twice ------------------------------------------------------------------


def test_memory_of_two_values_is_refused_and_not_touched(verbs: Any) -> None:
    verbs.put_many([("a", b"a" * 100), ("b", b"b" * 100)])
    area = np.zeros(150, np.uint8)
    for buffers in (
        [area[:100], area[:100]], [area[:100], area[50:]], [area[50:], area[:100]],
        [[area[:60], area[40:]], bytearray(100)], [area[:100], memoryview(area.data)[99:]],
    ):  # fmt: skip
        with pytest.raises(InvalidArgumentError, match="overlap: the bytes"):
            verbs.get_into(["a", "b"], buffers)
    ranges = [(0, area[:10]), (50, area[5:20])]
    for keys, wanted in (("a", ranges), (["a", "b"], [ranges[:1], ranges[1:]])):
        with pytest.raises(InvalidArgumentError, match="overlap: the bytes"):
            verbs.get_ranges(keys, wanted)
    assert not area.any()
    assert verbs.get_into(["a", "b"], [bytearray(100), bytearray(100)]) == [100, 100]
    assert verbs.get_into("a", [area[:50], area[50:]]) == [100]
    assert verbs.get_into(["b", "none"], [area, bytearray(5)]) == [100, None]


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
    matches = verbs.matches(keys, namespaces=["default", "elsewhere"])
    assert [match[:2] for match in matches] == [(40, 0), (0, 0)]
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


def test_an_object_is_gone_after_its_time_to_live_and_kept_while_it_is_pinned(verbs: Any) -> None:
    verbs.put("brief", b"x", ttl=0.2)
    verbs.put("lasting", b"x", ttl=600)
    assert verbs.pin(["lasting", "absent"], 600) == [True, False]
    assert [row.pinned_objects for row in verbs.status().namespaces] == [1]
    assert verbs.unpin(["lasting"]) == [True]
    until(lambda: not verbs.exists("brief"))
    assert verbs.get_many(["brief", "lasting"]) == [None, b"x"]
