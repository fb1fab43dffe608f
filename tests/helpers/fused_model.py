"""The model with interpreted fused kernels against plain operations; prints JSON.

A separate process, started with TRITON_INTERPRET=1: the model then takes the fused path on the CPU.
"""

import json

import torch
from torch import Tensor

from pretrain.config.model import AttentionKernel
from pretrain.config.run import ModelConfig
from pretrain.model.dropout import DropoutStream
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import random_starts, random_tokens, stream_nll
from tests.helpers.triton_interpreter import prepare_interpreter

LANES, LENGTH, SEGMENTS = 2, 9, 2
SMALL = {"vocab_size": 50, "num_layers": 2, "d_model": 32, "num_heads": 2, "memory_length": 7}
SCALED = {"softmax_scaling": "log_length", "isolate_documents": True}
VARIANTS = {
    "as in the paper": {},
    "untied biases, clamped": {"untie_biases": True, "clamp_length": 7, "norm_position": "pre"},
    "same length, isolated": {"same_length": True, "isolate_documents": True},
    "rope": {"positions": "rope", "num_key_heads": 1, "query_key_norm": True},
    "alibi": {"positions": "alibi", "num_key_heads": 1},
    "t5": {"positions": "t5", "isolate_documents": True},
    "compressive": {"compressed_length": 5, "compression_rate": 2},
    "sinks, scaled": {**SCALED, "positions": "rope", "attention_sinks": True},
}


def trained_once(
    model: ModelConfig, kernel: AttentionKernel, lanes: list[int] | None = None
) -> list[Tensor]:
    """Return the last segment's NLL and all gradients; with dropout if `lanes` are given."""
    torch.manual_seed(1)
    module = TransformerXL(model, attention_kernel=kernel)
    rows, length = [0, 1] if lanes is None else lanes, SEGMENTS * LENGTH + 1
    stream_BT, starts_BT = random_tokens(LANES, length)[rows], random_starts(LANES, length)[rows]
    dropout = None if lanes is None else DropoutStream(5, 0, lanes)
    nll_BT, _ = stream_nll(module, stream_BT, [LENGTH] * SEGMENTS, starts_BT, dropout)
    nll_BL = nll_BT[:, -LENGTH:]
    nll_BL.sum().backward()
    return [nll_BL.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


def largest_error(model: ModelConfig) -> float:
    pairs = zip(trained_once(model, "auto"), trained_once(model, "plain"), strict=True)
    return max(float((a - b).norm() / b.norm().clamp_min(1e-6)) for a, b in pairs)


def dropout_depends_on(model: ModelConfig) -> dict[str, bool]:
    """Whether a lane's loss depends on other lanes (it must not) and dropout (it must)."""
    both, alone = trained_once(model, "auto", [0, 1])[0], trained_once(model, "auto", [1])[0]
    undropped = trained_once(model, "auto")[0]
    return {
        "neighbors": not torch.allclose(both[1], alone[0], atol=1e-5),
        "dropout": not torch.allclose(both, undropped, atol=1e-3),
    }


if __name__ == "__main__":
    prepare_interpreter()
    models = {name: ModelConfig(**{**SMALL, **VARIANTS[name]}) for name in VARIANTS}
    result = {name: largest_error(models[name]) for name in models}
    dropped = ModelConfig(**SMALL, attention_dropout=0.3, init_std=0.1)
    print(json.dumps({"errors": result, "depends_on": dropout_depends_on(dropped)}))
