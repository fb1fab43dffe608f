"""Parameters, drawn where they are declared, and the norms.

A parameter has its final value when the module's `__init__` returns: under ZeRO-3 DeepSpeed may
partition it at that moment, and a later initialization would be lost.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from foundation.settings import assert_never
from pretrain.config.model import ModelConfig, Precision
from pretrain.errors import CheckpointError

NORM_EPSILON = 1e-5


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the type of weights and activations."""
    match precision:
        case "fp32":
            return torch.float32
        case "bf16":
            return torch.bfloat16
        case "fp16":
            return torch.float16
        case _:
            assert_never(precision)


def normal(*shape: int, std: float, mean: float = 0.0) -> nn.Parameter:
    """Return a parameter drawn from a normal distribution with torch's default generator."""
    return nn.Parameter(torch.empty(shape).normal_(mean, std))


class WithoutDrawing(TorchFunctionMode):
    """Within it, parameters that would be drawn are zero, and the generator is not used.

    For weights that will be replaced: a normal number takes 3.6 ns of one core, so that 30 billion
    of them take two minutes.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.normal_, Tensor.uniform_):
            return args[0].zero_()
        return func(*args, **(kwargs or {}))


def uniform(*shape: int, low: float, high: float) -> Tensor:
    """Return values drawn uniformly with torch's default generator, to make a parameter of."""
    return torch.empty(shape).uniform_(low, high)


def zeros(*shape: int) -> nn.Parameter:
    """Return a parameter of zeros."""
    return nn.Parameter(torch.zeros(shape))


def constant(*shape: int, value: float) -> nn.Parameter:
    """Return a parameter whose entries are all `value`."""
    return nn.Parameter(torch.full(shape, value))


class LayerNorm(nn.Module):
    """Layer normalization; the gain is drawn from normal(1, std) as in the original code."""

    def __init__(self, width: int, std: float) -> None:
        super().__init__()
        self.gain = normal(width, mean=1.0, std=std)
        self.bias = zeros(width)

    def forward(self, values: Tensor, *, frozen: bool = False, apart: bool = False) -> Any:
        """Return the normalized values; `frozen` keeps gradients from gain and bias.

        With `apart`, return the values without gain and bias, and copies of these: ZeRO-3 frees
        parameters when `forward` returns.
        """
        if apart:
            rows = nn.functional.layer_norm(values, self.gain.shape, eps=NORM_EPSILON)
            return rows, self.gain.clone(), self.bias.clone()
        gain, bias = (self.gain.detach(), self.bias.detach()) if frozen else (self.gain, self.bias)
        return nn.functional.layer_norm(values, self.gain.shape, gain, bias, NORM_EPSILON)


class RMSNorm(nn.Module):
    """Root mean square normalization (Zhang and Sennrich 2019), without mean and bias."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, values: Tensor, *, frozen: bool = False, apart: bool = False) -> Any:
        """Return the normalized values as `LayerNorm` does; there is no bias."""
        if apart:
            rows = nn.functional.rms_norm(values, self.gain.shape, eps=NORM_EPSILON)
            return rows, self.gain.clone(), None
        gain = self.gain.detach() if frozen else self.gain
        return nn.functional.rms_norm(values, self.gain.shape, gain, NORM_EPSILON)


Norm = LayerNorm | RMSNorm


def new_norm(config: ModelConfig) -> Norm:
    """Return a norm over the model's width, of the configured kind."""
    match config.norm:
        case "layernorm":
            return LayerNorm(config.d_model, config.init_std)
        case "rmsnorm":
            return RMSNorm(config.d_model)
        case _:
            assert_never(config.norm)


def load_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy `tensors` into the parameters of the same names; tied parameters use their first name.

    Raises CheckpointError unless names and shapes agree exactly.
    """
    parameters = dict(module.named_parameters())
    missing = sorted(parameters.keys() - tensors.keys())
    unknown = sorted(tensors.keys() - parameters.keys())
    if missing or unknown:
        raise CheckpointError(
            f"the parameters do not fit the model: missing {missing[:3]}, unknown {unknown[:3]} "
            f"({len(missing)} and {len(unknown)} in all); use the configuration of their model"
        )
    for name, parameter in parameters.items():
        if parameter.shape != tensors[name].shape:
            raise CheckpointError(
                f"{name} has shape {list(tensors[name].shape)}, the model expects "
                f"{list(parameter.shape)}; use the configuration it was saved with"
            )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
