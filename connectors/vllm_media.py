"""Client names of images, sounds and videos in vLLM's requests, as opposed to hashes.

A client may name an item (``multi_modal_uuids``, ``uuid`` in the chat API, all names in
``/inference/v1/generate``), and vLLM uses the name as the hash. It may mean another item in another
engine, or be the hash of another client's item. In the processes that take requests, vLLM's plug-in
therefore prefixes these names before any cache lookup.
"""

from __future__ import annotations

import re
from functools import wraps
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

NAMED: Final = "0x"
"""A prefix that no hash has. A hexadecimal name stays a number, as LMCache expects."""

_HASH: Final = re.compile("[0-9a-f]{64}|[0-9a-f]{128}")
"""The results of vLLM's hash functions. Other programs may send vLLM names without the prefix."""


class ContentHash(str):
    """A hash that this process has computed of an item's content."""


def mark_names() -> None:
    """Patch vLLM to prefix names. Idempotent."""
    from vllm.multimodal.hasher import MultiModalHasher
    from vllm.multimodal.processing.inputs import ProcessorInputs
    from vllm.v1.engine.input_processor import InputProcessor

    make, find = MultiModalHasher.hash_kwargs, ProcessorInputs.get_mm_hashes
    process = InputProcessor.process_inputs
    if hasattr(find, "__wrapped__"):
        return

    def hash_kwargs(algorithm: Any, /, **factors: Any) -> str:
        """Prefix the hash of a name, which vLLM hashes together with options of the request."""
        made = make(algorithm, **factors)
        values = [value for name, value in factors.items() if name != "model_id"]
        has_name = any(isinstance(each, str) and type(each) is not ContentHash for each in values)
        return NAMED + made if has_name else ContentHash(made)

    @wraps(find)
    def get_mm_hashes(inputs: Any, *arguments: Any) -> dict[str, list[str]]:
        found = find(inputs, *arguments)
        return {modality: [_marked(name) for name in names] for modality, names in found.items()}

    def process_inputs(processor: Any, *arguments: Any, **options: Any) -> Any:
        """Prefix names of items that vLLM did not render itself."""
        request = process(processor, *arguments, **options)
        for item in request.mm_features or ():
            name = _marked(item.mm_hash)
            if type(name) is not ContentHash:
                item.identifier = _marked(item.identifier)
            if "address" not in (item.data or ()):  # vLLM has signed the address for that name
                item.mm_hash = name
            item.identifier, item.mm_hash = str(item.identifier), str(item.mm_hash)
        return request

    MultiModalHasher.hash_kwargs = staticmethod(hash_kwargs)
    ProcessorInputs.get_mm_hashes = get_mm_hashes
    InputProcessor.process_inputs = process_inputs


def are_names_marked() -> bool:
    """Return whether the processes that take this engine's requests prefix names."""
    from vllm import envs
    from vllm.multimodal.processing.inputs import ProcessorInputs

    is_python = not getattr(envs, "VLLM_USE_RUST_FRONTEND", False)
    return is_python and hasattr(ProcessorInputs.get_mm_hashes, "__wrapped__")


def is_shared(
    request: Request, *, trusts_names: bool = False, are_names_marked: bool = True
) -> bool:
    """Return whether the request's hashes cover everything on which its blocks depend.

    Args:
        trusts_names: whether clients give equal names only to equal items.
    """
    # vLLM 0.32 does not hash which positions of a mixed prompt are embeddings.
    if request.prompt_embeds is not None and request.prompt_is_token_ids is not None:
        return False
    if trusts_names or not request.mm_features:
        return True
    return are_names_marked and not any(map(_is_named, request.mm_features))


def _is_named(item: MultiModalFeatureSpec) -> bool:
    is_hash = _HASH.fullmatch(item.mm_hash or item.identifier)
    return item.identifier.startswith(NAMED) or not is_hash


def _marked(name: str) -> str:
    return name if type(name) is ContentHash else NAMED + str(name).removeprefix(NAMED)
