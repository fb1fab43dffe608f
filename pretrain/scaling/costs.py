"""What one run costs, exactly: parameters and training FLOPs of its configuration."""

from __future__ import annotations

from dataclasses import dataclass

from data_pipeline.errors import ConfigError
from pretrain.config import RunConfig


@dataclass(frozen=True, kw_only=True)
class RunCost:
    """Parameters, and FLOPs of training (forward and backward) per token."""

    parameters: int
    body_parameters: int  # without the embedding and output matrices
    flops_per_token: float
    tokens_per_step: int
    steps: int

    @property
    def tokens(self) -> int:
        return self.steps * self.tokens_per_step

    @property
    def flops(self) -> float:
        return self.flops_per_token * self.tokens


def cost_of(run: RunConfig) -> RunCost:
    """The cost of a run of one rank; ConfigError when the vocabulary is not known."""
    model = run.model
    if not model.vocab_size:
        raise ConfigError("model.vocab_size is not set; set it, or build the corpus so that it can be read from there")
    width = model.num_heads * model.head_width
    keys = run.data.segment_length + model.memory_length
    layer = 5 * model.d_model * width + 2 * model.d_model * model.inner_width + model.inner_width + 5 * model.d_model
    biases = 2 * width * (model.num_layers if model.untie_biases else 1)
    body = model.num_layers * layer + biases
    head = model.vocab_size * (model.d_model + 1)
    relative = keys / run.data.segment_length
    forward = (
        model.num_layers
        * (
            4 * model.d_model * width * (1 + relative)
            + 6 * width * keys
            + 4 * model.d_model * model.inner_width
            + 2 * model.d_model * width * relative / run.data.lanes
        )
        + 2 * model.d_model * model.vocab_size
    )
    saved = model.num_layers * 2 * model.d_model * width * relative / run.data.lanes
    return RunCost(
        parameters=body + head,
        body_parameters=body,
        flops_per_token=3 * forward - saved,
        tokens_per_step=run.tokens_per_step,
        steps=run.optim.steps,
    )
