"""Models of more kinds than ``examples.tiny``: ``python -m tests.e2e.engines.models DIRECTORY``."""

# mypy: allow-untyped-calls
# transformers annotates its models only in some of its releases.

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from examples.tiny import HEAD_DIM, make_model, save, shape_of


def make(directory: Path, *, kind: str, sliding: bool, seed: int, hidden: int, layers: int) -> None:
    """``sliding``: a Gemma 3 that alternates sliding-window and full layers; ``longrope``: a Phi-3
    whose rotary factors depend on the longest prompt; ``latent``: a DeepSeek-V2 with latent
    attention; ``images``: a BLIP-2 around the Llama."""
    if kind in ("plain", "recurrent") and not sliding:
        make_model(directory, seed=seed, hidden=hidden, layers=layers, kind=kind)
        return
    import torch
    import transformers
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig

    shape = shape_of(seed, hidden, layers)
    heads = hidden // HEAD_DIM
    if sliding:
        types = ["sliding_attention", "full_attention"] * (layers // 2)
        config = Gemma3TextConfig(**shape, sliding_window=256, layer_types=types)
        model: Any = Gemma3ForCausalLM(config)
    elif kind == "longrope":
        factors = HEAD_DIM // 2
        rope = {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * factors,
            "long_factor": [4.0] * factors, "original_max_position_embeddings": 1024,
        }  # fmt: skip
        del shape["head_dim"]
        phi = transformers.Phi3Config(
            **shape, original_max_position_embeddings=1024, rope_parameters=rope
        )
        model = transformers.Phi3ForCausalLM(phi)
    elif kind == "latent":
        shape |= {
            "num_key_value_heads": heads, "kv_lora_rank": 512, "q_lora_rank": None,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
            "first_k_dense_replace": layers, "n_routed_experts": 4, "n_shared_experts": 1,
            "moe_intermediate_size": 128,
        }  # fmt: skip
        deepseek = transformers.DeepseekV2Config(**shape)
        model = transformers.DeepseekV2ForCausalLM(deepseek)
    else:
        tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                 "num_attention_heads": 2, "encoder_hidden_size": 64}  # fmt: skip
        blip = transformers.Blip2Config(
            vision_config=tower | {"image_size": 28, "patch_size": 14}, qformer_config=tower,
            text_config=LlamaConfig(**shape).to_dict(), num_query_tokens=16, dtype=torch.float32,
        )  # fmt: skip
        model = transformers.Blip2ForConditionalGeneration(blip)
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and not name.startswith("language_model"):
                torch.nn.init.normal_(weight, std=0.3)
    save(model, directory)
    if kind == "images":
        settings = {
            "image_processor_type": "BlipImageProcessor", "processor_class": "Blip2Processor",
            "size": {"height": 28, "width": 28},
        }  # fmt: skip
        (directory / "preprocessor_config.json").write_text(json.dumps(settings))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sliding", action="store_true")
    parser.add_argument(
        "--kind", choices=("plain", "longrope", "latent", "recurrent", "images"), default="plain"
    )
    for name, value in (("--seed", 0), ("--hidden", 256), ("--layers", 4)):
        parser.add_argument(name, type=int, default=value)
    make(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
