"""Building the model: under ZeRO-3 each parameter is sharded as soon as it is drawn.

So no rank ever has the whole model.

DeepSpeed's own `deepspeed.zero.Init` context is not entered. It draws in the rounded type, so a run
would start from other weights than in the other stages, and it shards module by module, so a whole
module must fit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pretrain.distributed.world import World
from pretrain.model.transformer_xl import TransformerXL

# Of a model in half precision: the weights as they were drawn, in fp32, by name.
InitialWeights = dict[str, Tensor]


def build_replicated(
    build: Callable[[], TransformerXL], dtype: torch.dtype
) -> tuple[TransformerXL, InitialWeights]:
    """Return the model, and its weights if DeepSpeed will round them to another `dtype`."""
    module = build()
    if dtype == torch.float32:
        return module, {}
    return module, {
        name: parameter.detach().clone() for name, parameter in module.named_parameters()
    }


def build_sharded(
    build: Callable[[], TransformerXL],
    partition: Callable[[nn.Parameter], None],
    dtype: torch.dtype,
    world: World,
) -> tuple[TransformerXL, InitialWeights]:
    """Return the model that `build` makes, sharded, and this rank's slice of each unrounded weight.

    Each parameter is drawn whole, equally on every rank, rounded to `dtype` and passed to
    `partition` before the next one is drawn. Slices are on the CPU, and cut as ZeRO-3 cuts
    parameters: into one per rank, equal in length except for the last ones. Without rounding there
    are none.
    """
    initial: dict[nn.Parameter, Tensor] = {}
    partitioned: set[nn.Parameter] = set()

    # torch calls this when a module registers a parameter. Modules register a parameter right after
    # drawing it, so that at most one whole parameter exists at any time.
    def on_registration(_module: nn.Module, _name: str, parameter: nn.Parameter) -> None:
        if parameter in partitioned:  # tied to a parameter of an earlier module
            return
        partitioned.add(parameter)
        if parameter.dtype != dtype:
            length = -(-parameter.numel() // world.world_size)
            own = parameter.detach().view(-1)[world.rank * length : (world.rank + 1) * length]
            initial[parameter] = own.clone()
            parameter.data = parameter.data.to(dtype)
        partition(parameter)

    handle = register_module_parameter_registration_hook(on_registration)
    try:
        module = build()
    finally:
        handle.remove()
    return module, {
        name: initial[parameter]
        for name, parameter in module.named_parameters()
        if parameter in initial
    }
