"""A model of two layers whose weights are set by hand so that it repeats what it has seen.

The first layer's first head copies the previous token's vector, by its bias for distance 1; the
second layer's second head finds keys whose previous token is the query's token, and reads theirs
(the induction heads of Olsson et al. 2022). It recalls what its memory holds, and nothing else.
"""

import torch

from pretrain.config.run import ModelConfig
from pretrain.model.transformer_xl import TransformerXL

SHARP = 60.0  # a score that leaves nothing to other keys


def induction_model(vocab_size: int, memory_length: int) -> TransformerXL:
    """Return the model in float64; channels are [token | previous token | found token]."""
    V = vocab_size + vocab_size % 2
    config = ModelConfig(
        vocab_size=vocab_size, num_layers=2, d_model=3 * V, num_heads=2, d_head=V, d_inner=2,
        memory_length=memory_length, positions="t5",
        norm="rmsnorm", norm_position="pre", tie_embeddings=False,
    )  # fmt: skip
    model = TransformerXL(config).double().eval()
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if not name.endswith("gain"):
                weight.zero_()
        one_hot_VD = torch.eye(vocab_size, 3 * V, dtype=torch.float64)
        weights["embedding.bins.0.weight"].copy_(one_hot_VD / (3 * V) ** 0.5)
        weights["head.bins.0.weight"].copy_(SHARP * one_hot_VD.roll(2 * V, 1))
        weights["distance_bias.bucket_bias"][1, 0] = SHARP
        token, previous, found = (slice(part * V, (part + 1) * V) for part in range(3))
        first_head, second_head = slice(V), slice(V, 2 * V)
        eye = torch.eye(V, dtype=torch.float64)
        keys, values = slice(2 * V), slice(2 * V, 4 * V)
        for layer, head, written in ((0, first_head, previous), (1, second_head, found)):
            name = f"layers.{layer}.attention"
            weights[f"{name}.key_value_weight"][values][head, token] = eye
            weights[f"{name}.output_weight"][written, head] = eye
        sharp = SHARP**0.5 * eye
        weights["layers.1.attention.query_weight"][second_head, token] = sharp
        weights["layers.1.attention.key_value_weight"][keys][second_head, previous] = sharp
    return model
