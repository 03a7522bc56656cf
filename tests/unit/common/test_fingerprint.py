"""Which weights a name or a path means, and the fingerprint of a description."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from random import Random
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.connectors.common.fingerprint import config_of, fingerprint, meaningful, weights_of
from kvstore.errors import ConfigError

TENSORS = {
    "model.embed": 100,
    "model.layers.0.attn": 4_000,
    "model.layers.0.mlp": 9_000,
    "model.norm": 1,
}
"""Names and bytes."""


def safetensors(
    changed: str = "", at: int = 0, by: int = 1, names: Collection[str] = TENSORS.keys(),
    **more: object,
) -> bytes:  # fmt: skip
    """A file of these tensors, of random bytes; one byte may be another.

    Args:
        more: what the header says instead of each tensor, or of the metadata.
    """
    header: dict[str, object] = {"__metadata__": more.pop("metadata", {"format": "pt"})}
    data = bytearray()
    for name in names:
        size, start = TENSORS[name], len(data)
        header[name] = {
            "dtype": "U8", "shape": [size], "data_offsets": [start, start + size], **more,
        }  # fmt: skip
        data += Random(name).randbytes(size)
        if name == changed:
            data[start + at] ^= by
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def model_directory(path: Path, weights: bytes | None = None, **more: bytes) -> Path:
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(safetensors() if weights is None else weights)
    for name, data in more.items():
        (path / name.replace("_", ".")).write_bytes(data)
    return path


def test_the_same_files_elsewhere_are_the_same_weights(tmp_path: Path) -> None:
    here = model_directory(tmp_path / "here" / "model")
    there = model_directory(tmp_path / "there" / "other", README_md=b"text", tokenizer_json=b"{}")
    assert weights_of(str(here)) == weights_of(str(there) + "/")


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("name", TENSORS)
def test_every_byte_of_every_tensor_counts(tmp_path: Path, name: str, data: st.DataObject) -> None:
    """The beginning, middle and end of a tensor do not tell what has changed between."""
    at = data.draw(st.integers(0, TENSORS[name] - 1))
    other = safetensors(name, at, by=data.draw(st.integers(1, 255)))
    file = tmp_path / "model.safetensors"
    digests = set()
    for weights in (safetensors(), other):
        file.write_bytes(weights)
        digests.add(weights_of(str(file)))
    assert len(digests) == 2


def test_of_sharded_weights_every_shard_counts_and_the_index_does_not(tmp_path: Path) -> None:
    def sharded(name: str, **files: bytes) -> str:
        for shard in ("1", "2", "3"):
            files.setdefault(f"model-0000{shard}-of-00003.safetensors", safetensors())
        (tmp_path / name).mkdir()
        for file, content in files.items():
            (tmp_path / name / file).write_bytes(content)
        return weights_of(str(tmp_path / name))

    first = sharded("a")
    assert sharded("b", **{"model.safetensors.index.json": b"{}"}) == first
    other = safetensors("model.norm")
    changed = [sharded(f"c{at}", **{f"model-0000{at}-of-00003.safetensors": other}) for at in "123"]
    assert len({first, *changed}) == 4


def test_tensors_count_in_whatever_files_they_lie(tmp_path: Path) -> None:
    first, *rest = TENSORS
    plain = weights_of(str(model_directory(tmp_path / "plain")))
    split = model_directory(
        tmp_path / "split", safetensors(names=[first]), optimizer_pt=b"1", scheduler_bin=b"1"
    )
    (split / "rng_state_0.pth").write_bytes(b"1")
    (split / "more.safetensors").write_bytes(safetensors(names=rest))
    backwards = model_directory(tmp_path / "other", safetensors(names=[*rest, first]))
    assert weights_of(str(split)) == weights_of(str(backwards)) == plain

    others = [
        safetensors(dtype="I8"), safetensors(shape=[1]), safetensors(names=rest),
        safetensors(metadata={"scales": "2"}), safetensors() + b"no tensor",
    ]  # fmt: skip
    folders = [model_directory(tmp_path / str(at), each) for at, each in enumerate(others)]
    assert len({plain, *map(weights_of, map(str, folders))}) == len(others) + 1


def test_of_two_tensors_of_one_name_their_files_count(tmp_path: Path) -> None:
    """Which of them is loaded depends on these, as with a file for each rank."""
    ranks = [safetensors(), safetensors("model.norm")]
    found = set()
    for at, order in enumerate((ranks, ranks[::-1])):
        folder = model_directory(tmp_path / str(at), order[0])
        (folder / "rank-1.safetensors").write_bytes(order[1])
        found.add(weights_of(str(folder)))
    assert len(found) == 2


@pytest.mark.parametrize(
    "name",
    ["consolidated.00.pth", "model.tensors", "original/model.safetensors", "tower/model.bin"],
)
def test_weights_of_any_format_and_folder_count(tmp_path: Path, name: str) -> None:
    found = set()
    for content in (b"A", b"B"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        found.add(weights_of(str(tmp_path)))
    assert len(found) == 2
    if name.startswith("original"):  # beside the format that is loaded
        (tmp_path / "model.bin").write_bytes(b"")
        with_it = weights_of(str(tmp_path))
        (tmp_path / name).unlink()
        assert weights_of(str(tmp_path)) == with_it


def test_what_nothing_tells_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")  # its weights are streamed from elsewhere
    (tmp_path / "training_args.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=f"no file in {tmp_path}.*safetensors.*model_id"):
        weights_of(str(tmp_path))
    with pytest.raises(ConfigError, match=r"s3://bucket/model .*model_id"):
        weights_of("s3://bucket/model")


def test_a_link_into_the_hubs_cache_is_its_target(tmp_path: Path) -> None:
    plain = model_directory(tmp_path / "plain")
    snapshot, blobs = tmp_path / "snapshots" / "0123abc", tmp_path / "blobs"
    for directory in (snapshot, blobs):
        directory.mkdir(parents=True)
    (blobs / "4d5e").write_bytes(safetensors())
    (snapshot / "model.safetensors").symlink_to("../../blobs/4d5e")
    assert weights_of(str(snapshot)) == weights_of(str(plain))


def test_sizes_and_names_of_files_count(tmp_path: Path) -> None:
    directories = [
        model_directory(tmp_path / "a"),
        model_directory(tmp_path / "b", safetensors() + b"more"),
        model_directory(tmp_path / "c", more_bin=b""),
        model_directory(tmp_path / "d", most_bin=b""),
    ]
    assert len({weights_of(str(each)) for each in directories}) == len(directories)


def test_a_file_of_any_format_counts_as_a_whole(tmp_path: Path) -> None:
    data = bytearray(3 << 20)
    (tmp_path / "a.gguf").write_bytes(data)
    first = weights_of(str(tmp_path / "a.gguf"))
    data[1_000_001] = 1
    (tmp_path / "a.gguf").write_bytes(data)
    assert weights_of(str(tmp_path / "a.gguf")) != first


def test_a_name_that_is_not_here_is_named_with_its_revision() -> None:
    assert weights_of("org/name-of-nothing") == "org/name-of-nothing@main"
    assert weights_of("org/name-of-nothing", revision="v1") == "org/name-of-nothing@v1"


def test_of_a_name_in_the_hubs_cache_the_files_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch moves; the snapshot that it means here does not."""
    snapshot = model_directory(tmp_path / "snapshots" / "0123abc")
    asked = []

    def cached(model: str, file: str, *, revision: str | None) -> object:
        asked.append((model, file, revision))
        return {"org/name": str(snapshot / file), "org/never": object()}.get(model)

    hub, errors = ModuleType("huggingface_hub"), ModuleType("huggingface_hub.errors")
    hub.try_to_load_from_cache = cached  # type: ignore[attr-defined]
    errors.HFValidationError = ValueError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    assert weights_of("org/name", revision="v1") == weights_of(str(snapshot))
    assert asked == [("org/name", "config.json", "v1")]
    assert weights_of("org/never") == "org/never@main"
    assert weights_of("org/unknown") == "org/unknown@main"


def test_without_the_hubs_library_a_name_is_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert weights_of("org/name") == "org/name@main"


@pytest.mark.parametrize("name", ["", "a b", "a/b/c", "\0", "-", "x" * 5000])
def test_names_of_no_model_are_names(name: str) -> None:
    assert weights_of(name or "?") == f"{name or '?'}@main"


def test_equal_descriptions_have_one_fingerprint() -> None:
    first = fingerprint({"a": 1, "b": ["x"]})
    assert (
        first == fingerprint({"b": ["x"], "a": 1}) == fingerprint(json.loads('{"b":["x"],"a":1}'))
    )
    assert len(first) == 32
    assert len({first, fingerprint({"a": 2, "b": ["x"]}), fingerprint({"a": 1})}) == 3


def test_where_a_model_lies_and_what_wrote_it_means_nothing() -> None:
    placed = {"layers": 2, "_name_or_path": "/x", "text": {"transformers_version": "5", "size": 3}}
    assert meaningful(placed) == {"layers": 2, "text": {"size": 3}}


def test_the_meaning_of_a_configuration_counts(tmp_path: Path) -> None:
    one, other, none = (tmp_path / name for name in ("one", "other", "none"))
    for directory, theta, written_by in ((one, 10_000, "4.57"), (other, 10_000, "5.0")):
        directory.mkdir()
        config = {"rope_theta": theta, "transformers_version": written_by}
        (directory / "config.json").write_text(json.dumps(config))
    assert config_of(str(one)) == config_of(str(other))
    (other / "config.json").write_text(json.dumps({"rope_theta": 500_000}))
    assert config_of(str(one)) != config_of(str(other))
    assert config_of(str(none)) == ""
    assert config_of(str(one / "config.json")) == ""
