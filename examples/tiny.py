"""A random model on disk, created locally, that vLLM serves like any other.

``python -m examples.tiny DIRECTORY [--kind KIND] [--seed N] [--hidden N] [--layers N]`` makes one.
"""

# mypy: allow-untyped-calls
# transformers annotates its models only in some of its releases.

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
TEXT_TOKENS = range(2, 258)
"""Tokens that stand for one byte each."""
BLOCK_TOKENS = 128
"""vLLM's block size on a CPU."""
HEAD_DIM = 64
POSITIONS_MAX = 4096
HIDDEN = 512
LAYERS = 8
"""Sizes for examples and benchmarks: computing a prompt takes longer than fetching it."""
SPREAD = 1.92
"""Standard deviation of the weights times the square root of the hidden size. It is large: with a
small one the model repeats one token whatever the KV cache holds, which would hide every
mistake."""


def make_model(
    directory: Path, *, seed: int = 0, hidden: int = 256, layers: int = 4, kind: str = "plain"
) -> Path:
    """Create a decoder with random weights and a byte-level tokenizer; equal arguments give equal
    files.

    It is a Llama; of kind ``recurrent`` a Qwen3-Next that alternates gated delta nets and
    attention, which vLLM for CPUs serves in bfloat16 only. Two query heads share a key/value head.

    Args:
        directory: where to create the model; created if needed, and returned.
        hidden: hidden size, a multiple of 128; the feed-forward part is twice as wide.
        layers: an even number.
    """
    import transformers

    shape = shape_of(seed, hidden, layers)
    if kind == "recurrent":
        heads = hidden // HEAD_DIM
        config = transformers.Qwen3NextConfig(
            **shape, layer_types=["linear_attention", "full_attention"] * (layers // 2),
            linear_num_value_heads=heads, linear_num_key_heads=heads // 2,
            linear_key_head_dim=HEAD_DIM, linear_value_head_dim=HEAD_DIM,
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128,
            shared_expert_intermediate_size=128,
        )  # fmt: skip
        return save(transformers.Qwen3NextForCausalLM(config), directory)
    return save(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)), directory)


def shape_of(seed: int, hidden: int, layers: int) -> dict[str, Any]:
    """Return the arguments of a model's configuration. Seeds the weights.

    Raises:
        ValueError: ``hidden`` is not a multiple of 128, or ``layers`` is odd.
    """
    if hidden < 128 or hidden % 128 or layers < 2 or layers % 2:
        raise ValueError(f"hidden must be a multiple of 128, layers of 2: {hidden}, {layers}")
    import torch

    torch.manual_seed(seed)
    heads = hidden // HEAD_DIM
    return {
        "vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "head_dim": HEAD_DIM,
        "max_position_embeddings": POSITIONS_MAX, "initializer_range": SPREAD / hidden**0.5,
        "dtype": torch.float32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
        "tie_word_embeddings": False,
    }  # fmt: skip


def save(model: Any, directory: Path) -> Path:
    """Write a model with its tokenizer, whose tokens are two special ones and the bytes."""
    model.save_pretrained(directory, safe_serialization=True)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet, "<image>"]
    words += [f"<unused{number}>" for number in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "model_max_length": POSITIONS_MAX,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def kv_bytes_per_token(hidden: int, layers: int) -> int:
    """Return the bytes of the float32 keys and values of one token, in all layers of the Llama."""
    return layers * 2 * (hidden // 2) * 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--kind", choices=("plain", "recurrent"), default="plain")
    for name, value in (("--seed", 0), ("--hidden", 256), ("--layers", 4)):
        parser.add_argument(name, type=int, default=value)
    make_model(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
