"""Fingerprints of everything that the bytes of a block depend on, such as a model's weights.

Connectors describe the meaning of their blocks as plain JSON values: the weights, and every setting
that changes bytes or keys. The digest of this description, the *fingerprint*, is part of the
namespaces, so engines with different descriptions never share blocks. No engine is imported here.

    description = {"format": 1, "weights": weights_of("/models/llama"), "dtype": "bfloat16"}
    namespace = f"my-engine/{fingerprint(description)}"
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from kvstore.connectors.common.weight_digests import (
    DigestCache,
    cache_folder,
    digest_files,
    file_state,
)
from kvstore.errors import ConfigError

WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors")
"""Suffixes of weight files. An additional file only keeps engines apart."""

OF_TRAINING: Final = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pt|pth)"
)
"""Files next to weights that no engine loads."""

NOT_LOADED: Final = re.compile(r"original|checkpoint-\d+|global_step\d+")
"""Folders in a model's folder that engines ignore: other formats or states of the model."""

LOADED: Final = "kvstore_loaded"
"""Attribute of a model in an engine's memory: the ``LoadedFiles`` from which it was loaded."""


def fingerprint(description: Mapping[str, object]) -> str:
    """Return 32 hexadecimal digits, equal for equal descriptions in any order of keys."""
    return digest(description)[:32]


def digest(value: object) -> str:
    """Return the SHA-256 of plain values: 64 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def weights_of(model: str, *, revision: str | None = None) -> str:
    """Identify the weights of a model's name or path: for files by a digest of their content,
    otherwise by name and commit. Reads the files completely (see ``contents`` for the duration)
    unless this host has their digests.

    For engines whose live weights a connector cannot read. Does not detect weights that are
    replaced in place.

    Args:
        model: a file or directory, or a name on the Hugging Face hub. If the hub's local cache has
            a model of that name, its files count.
        revision: the revision of a hub name; None: the default branch.

    Raises:
        ConfigError: a folder without weights, or a URL: the loaded weights are unknown.
        OSError: a file cannot be read.
    """
    # Unlike Path.exists, this is False for invalid paths.
    found = Path(model) if os.path.exists(model) else _snapshot(model, revision)
    if found is not None:
        return f"files {files_digest(weight_files(found))[:32]}"
    if "://" in model:
        raise unidentified(f"the weights at {model} may change, and are not files of this host")
    return f"{model}@{revision or 'main'}"


def config_of(model: str, *, revision: str | None = None) -> str:
    """Return the digest of the ``meaningful`` part of the ``config.json`` in a model's directory,
    or in its directory in the hub's local cache; "" if there is no such file.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    found = Path(model) if os.path.exists(model) else _snapshot(model, revision)
    file = None if found is None else found / "config.json"
    if file is None or not file.is_file():
        return ""
    return digest(meaningful(json.loads(file.read_bytes())))[:32]


def weight_files(path: Path) -> list[Path]:
    """Return the weight files in a model's folder and its subfolders; of a file: itself.

    Raises:
        ConfigError: there are none.
    """
    if not path.is_dir():
        return [path]
    below = [file for file in sorted(path.rglob("*")) if file.suffix in WEIGHTS]
    files = [file for file in below if not OF_TRAINING.fullmatch(file.name)]
    if not files:
        raise unidentified(f"no file in {path} or below it has weights (*{', *'.join(WEIGHTS)})")
    loaded = [
        file for file in files
        if not any(NOT_LOADED.fullmatch(folder) for folder in file.relative_to(path).parts[:-1])
    ]  # fmt: skip
    return loaded or files


def files_digest(files: Sequence[Path]) -> str:
    """Return the digest of weight files, independent of their paths: of tensors their names,
    dtypes, shapes and bytes, but not their distribution over safetensors files; of other files
    their names and bytes. See ``contents`` for the duration.

    Raises:
        OSError: a file cannot be read.
    """
    contents = digest_files(files, DigestCache(cache_folder(os.environ)))
    top = os.path.commonpath([file.parent for file in files])
    times = Counter(name for content in contents for name in content.tensors)
    total, others = 0, []
    for file, content in zip(files, contents, strict=True):
        # The loaded one of several tensors with one name may depend on their files.
        if content.tensors and all(times[name] == 1 for name in content.tensors):
            total += int(content.digest, 16)
        else:
            name = os.path.relpath(file, top) if len(files) > 1 else file.suffix
            others.append([name, content.size, content.digest])
    return digest([total % (1 << 128), sorted(others)])


class LoadedFiles:
    """The files that an engine is about to load, as they are now."""

    def __init__(self, files: Sequence[str]) -> None:
        """
        Args:
            files: paths; for weights that are not on this host, also URLs.
        """
        self._files = files
        self._states = [file_state(file) for file in files]
        self._digest = ""

    def digest(self) -> str:
        """Return the digest of the loaded files; after the first call, even if they change.

        Raises:
            ConfigError: the files changed before that, or are not on this host.
            OSError: a file cannot be read.
        """
        if not self._digest:
            self._check()
            found = files_digest([Path(file) for file in self._files])
            self._check()  # they may have changed while they were read
            self._digest = found
        return self._digest

    def _check(self) -> None:
        for file, state in zip(self._files, self._states, strict=True):
            if not state or file_state(file) != state:
                raise unidentified(f"{file} has changed since its load, or is not on this host")


def unidentified(reason: str) -> ConfigError:
    """Return the error for weights that cannot be identified."""
    advice = 'Name them yourself with the setting "model_id": equal names for equal weights only.'
    return ConfigError(reason, advice=advice, key="model_id")


def meaningful(config: Mapping[str, object]) -> dict[str, object]:
    """Return a model's ``config.json`` without its path and the version that wrote it, also in
    nested configurations."""
    return {
        key: meaningful(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in ("_name_or_path", "transformers_version", "_commit_hash")
    }


def _snapshot(model: str, revision: str | None) -> Path | None:
    """Return the directory of a model in the hub's local cache, or None. A branch may move; the
    files that were loaded from it do not change."""
    try:
        from huggingface_hub import try_to_load_from_cache  # comes with engines, not with kvstore
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, "config.json", revision=revision)
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None
