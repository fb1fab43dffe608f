"""Tiny models of transformers with random weights, of families that carry state."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pretrain.model.transformers_modules import library

SHAPE: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_chunk_size": 16, "mamba_expand": 2,
}  # fmt: skip
HYBRID_BLOCKS = ["mamba", "hybrid", "mamba", "hybrid"]
# model_type -> its settings.
RIGHT: dict[str, dict[str, Any]] = {
    "qwen3_next": {**SHAPE, **DELTA, **EXPERTS},
    "qwen3_5_text": {**SHAPE, **DELTA},
    "olmo_hybrid": {**SHAPE, **DELTA, "num_key_value_heads": 4, "linear_num_key_heads": 4},
    "mamba2": {
        **SHAPE, "num_hidden_layers": 3, "state_size": 8, "num_heads": 8, "n_groups": 2,
        "expand": 2, "chunk_size": 16,
    },
    "falcon_h1": {**SHAPE, **MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4},
    "granitemoehybrid": {
        **SHAPE, **MAMBA, "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
        "shared_intermediate_size": 48, "position_embedding_type": "rope",
    },
    "nemotron_h": {
        **SHAPE, "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8,
        "chunk_size": 16, "expand": 2,
    },
    "zamba2": {
        **SHAPE, "num_key_value_heads": 4, "layers_block_type": HYBRID_BLOCKS,
        "mamba_d_state": 8, "mamba_headdim": 8, "n_mamba_heads": 8, "mamba_ngroups": 1,
        "mamba_expand": 2, "chunk_size": 16, "num_mem_blocks": 1, "use_mem_rope": True,
    },
    "kimi_linear": {
        **SHAPE, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "linear_head_dim": 8, "linear_num_heads": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] * 4,
    },
    "bamba": {**SHAPE, **MAMBA, "attn_layer_indices": [1, 3]},
    "lfm2": {**SHAPE, "layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "qwen3_5_moe_text": {**SHAPE, **DELTA, **EXPERTS},
    **dict.fromkeys(("llama", "qwen3", "mistral"), SHAPE),
    "gemma3_text": {**SHAPE, "sliding_window": 16},
}  # fmt: skip
OF_MAMBA_1: dict[str, Any] = {**SHAPE, "state_size": 8, "mamba_d_state": 8, "mamba_dt_rank": 4}
# model_type -> its settings, and the check that it fails.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": (OF_MAMBA_1, "segments"),
    "falcon_mamba": (OF_MAMBA_1, "segments"),
    "jamba": (
        {**OF_MAMBA_1, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1}, "segments",
    ),
    "recurrent_gemma": (
        {
            **SHAPE, "lru_width": 32, "attention_window_size": 16,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        "segments",
    ),
    "gpt2": (
        {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 2048},
        "positions",
    ),
}  # fmt: skip


@contextlib.contextmanager
def random_model(kind: str, settings: dict[str, Any], scale: float = 0.1) -> Iterator[Any]:
    """Yield a model whose weights are large enough for every part to matter."""
    with library() as transformers:
        config = transformers.CONFIG_MAPPING[kind](**settings)
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(scale * (parameter.dim() > 1) * torch.randn(parameter.shape))
        yield model.eval()


def save_random(directory: Path, kind: str, settings: dict[str, Any]) -> Path:
    """Write such a model, with a tokenizer of bytes, as a checkpoint of Hugging Face."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    with random_model(kind, settings) as model:
        model.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {name: number for number, name in enumerate(["<|end|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(names, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    return directory
