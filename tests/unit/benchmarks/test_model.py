"""The benchmarks of the model: baselines do the same work, and no promise is left out."""

import torch

from benchmarks.model.training import training_step
from pretrain.config.run import OptimConfig
from pretrain.model.parameters import load_parameters
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.original import original_to_ours
from tests.helpers.models import TINY, random_tokens
from tests.helpers.reference_training import ReferenceTransformerXL, original_state


def test_the_reference_step_computes_the_models_loss() -> None:
    """A baseline that did less or other work would make the ratios meaningless."""
    torch.manual_seed(0)
    sizes = (TINY.vocab_size, TINY.num_layers, TINY.num_heads, TINY.d_model, TINY.inner_width)
    reference = ReferenceTransformerXL(*sizes, dropout=0.0).double()
    model = TransformerXL(TINY).double()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(15.0)  # far from the linear regime of fresh weights
    load_parameters(model, original_to_ours(original_state(reference), TINY))
    memory, other = None, []
    stream_BT = random_tokens(3, 19)
    for first in (0, 6, 12):
        tokens_BL, targets_BL = stream_BT[:, first : first + 6], stream_BT[:, first + 1 : first + 7]
        nll_BL, memory = model(tokens_BL, targets_BL, memory)
        loss, other = reference(tokens_BL.t(), targets_BL.t(), other, TINY.memory_length)
        # The reference masks in float32.
        torch.testing.assert_close(loss, nll_BL.mean(), rtol=1e-5, atol=0)
        torch.testing.assert_close(other[1].transpose(0, 1), memory[1], rtol=1e-5, atol=1e-6)


def test_the_measured_training_step_trains() -> None:
    torch.manual_seed(0)
    step = training_step(TransformerXL(TINY), OptimConfig(learning_rate=1e-2))
    tokens_BT = random_tokens(3, 7)
    losses = [step(tokens_BT).item() for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1
