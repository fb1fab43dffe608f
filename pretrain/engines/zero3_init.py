"""A model whose parameters are spread over the ranks one by one, as they come into being: it never exists whole."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pretrain.distributed.world import World
from pretrain.model.transformer_xl import TransformerXL


def build_sharded(
    build: Callable[[], TransformerXL],
    partition: Callable[[nn.Parameter], None],
    dtype: torch.dtype,
    world: World,
) -> tuple[TransformerXL, dict[str, Tensor]]:
    """The model that `build` makes, and this rank's part of what was drawn for each parameter, by name.

    Each parameter is drawn whole, on every rank alike, rounded to `dtype` and handed to `partition` before the next one
    is drawn. The parts, unrounded and on the CPU, are none where nothing was rounded. A part is the rank-th of as many
    runs as there are ranks, equal in length but for the last ones, as ZeRO-3 cuts parameters.
    """
    parts: dict[nn.Parameter, Tensor] = {}
    partitioned: set[nn.Parameter] = set()

    def take_over(_module: nn.Module, _name: str, parameter: nn.Parameter) -> None:
        if parameter in partitioned:
            return  # tied to one that a module took up before
        partitioned.add(parameter)
        if parameter.dtype != dtype:
            length = -(-parameter.numel() // world.world_size)
            part = parameter.detach().view(-1)[world.rank * length : (world.rank + 1) * length]
            parts[parameter] = part.clone()
            parameter.data = parameter.data.to(dtype)
        partition(parameter)

    handle = register_module_parameter_registration_hook(take_over)
    try:
        module = build()
    finally:
        handle.remove()
    return module, {
        name: parts[parameter]
        for name, parameter in module.named_parameters()
        if parameter in parts
    }
