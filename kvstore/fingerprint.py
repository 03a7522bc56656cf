"""Computes the fingerprint of all that the bytes of a block depend on, such as a model's weights.

Adapters of engines describe what their blocks mean, as plain JSON values: the weights, and every
setting that changes bytes or keys. The digest of such a description, the *fingerprint*, is part of
the namespaces that the engine uses. So engines whose descriptions differ never see each other's
blocks. No engine is imported here.

    description = {"format": 1, "weights": weights_of("/models/llama"), "dtype": "bfloat16"}
    namespace = f"my-engine/{fingerprint(description)}"
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from kvstore.contents import Remembered, cache_folder, contents_of

WEIGHTS: Final = ("*.safetensors", "*.bin", "*.pt", "*.gguf", "*.npz")


def fingerprint(description: Mapping[str, object]) -> str:
    """32 hexadecimal digits, equal for equal descriptions; the order of keys does not count."""
    return digest(description)[:32]


def digest(value: object) -> str:
    """SHA-256 of plain values: 64 hexadecimal digits."""
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def weights_of(model: str, *, revision: str | None = None) -> str:
    """Says which weights a model's name or path means: for files a digest of their content,
    wherever they are; otherwise name and commit. Reads the files whole (``contents`` says how long
    that takes) unless this host remembers them.

    Use it if the engine does not let an adapter read the live weights. It does not see weights that
    are replaced in place.

    Args:
        model: a file or directory, or a name on the Hugging Face hub. If the hub's local cache has
            a model of that name, its files count.
        revision: the revision of a hub name; None: the default branch.

    Raises:
        OSError: a file cannot be read.
    """
    # Unlike Path.exists, this is False for names that no path can have.
    found = Path(model) if os.path.exists(model) else _snapshot(model, revision)
    if found is None:
        return f"{model}@{revision or 'main'}"
    return f"files {files_digest(found)[:32]}"


def config_of(model: str, *, revision: str | None = None) -> str:
    """The digest of the ``meaningful`` part of the ``config.json`` in a model's directory, or in
    its directory in the hub's local cache; "": this host has no such file.

    Raises:
        OSError, ValueError: the file cannot be read.
    """
    found = Path(model) if os.path.exists(model) else _snapshot(model, revision)
    file = None if found is None else found / "config.json"
    if file is None or not file.is_file():
        return ""
    return digest(meaningful(json.loads(file.read_bytes())))[:32]


def files_digest(path: Path, remembered: Remembered | None = None) -> str:
    """The digest of a file of weights, or of the files in a directory: their names and every byte.
    How long that takes, says ``contents``.

    Args:
        remembered: what is known of files that have not changed; None: what this user's cache has.

    Raises:
        OSError: a file cannot be read.
    """
    files, names = [path], [""]
    if path.is_dir():
        files = sorted({file for pattern in WEIGHTS for file in path.glob(pattern)})
        names = [file.name for file in files]
    contents = contents_of(files, remembered or Remembered(cache_folder(os.environ)))
    return digest(list(zip(names, contents, strict=True)))


def meaningful(config: Mapping[str, object]) -> dict[str, object]:
    """A model's configuration (of ``config.json``) without its path and the version that wrote it;
    nested configurations as well."""
    return {
        key: meaningful(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in ("_name_or_path", "transformers_version", "_commit_hash")
    }


def _snapshot(model: str, revision: str | None) -> Path | None:
    """The directory of a model in the hub's local cache; None: there is none. A branch may move;
    the files that were loaded from it do not change."""
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
