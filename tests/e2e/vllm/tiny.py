"""A tiny random model on disk, made on the spot, that vLLM serves like any other.

``python -m tests.e2e.vllm.tiny DIRECTORY [--sliding] [--seed N]`` makes one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

VOCABULARY = 512
BLOCK_TOKENS = 128
"""vLLM's on a CPU."""


def make_model(directory: Path, *, seed: int = 0, sliding: bool = False, mla: bool = False) -> Path:
    """A decoder with random weights and a byte-level tokenizer; equal seeds give equal files.

    Weights are drawn wide: narrow ones repeat one token whatever stands in the KV cache, and would
    hide every mistake. Without ``sliding`` it is a Llama; with it, a Gemma 3 with one full and one
    sliding-window layer in turn.
    """
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "max_position_embeddings": 4096, "initializer_range": 0.12, "dtype": torch.float32,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    if sliding:
        layers = ["sliding_attention", "full_attention"] * 2
        config = Gemma3TextConfig(**shape, sliding_window=256, layer_types=layers)
        model: Any = Gemma3ForCausalLM(config)
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model.save_pretrained(directory, safe_serialization=True)
    _tokenizer(directory)
    return directory


def _tokenizer(directory: Path) -> None:
    """Bytes as tokens, after two special ones; nothing to download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet]
    words += [f"<unused{number}>" for number in range(VOCABULARY - len(words))]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
        "model_max_length": 4096,
        "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}",
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sliding", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    print(make_model(given.directory, seed=given.seed, sliding=given.sliding))
