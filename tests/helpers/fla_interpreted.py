"""What flash-linear-attention's kernels compute in triton's interpreter, against token by token.

Prints the largest error of each output and gradient, over the largest value, by head width, and
how many configurations each kernel that ran had.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

from pretrain.kernels.flash_linear_attention import chunk_gated_delta_rule
from pretrain.mixers.deltanet.delta_rule import DeltaInputs, delta_rule_by_step, fla_delta_rule
from pretrain.mixers.deltanet.module import normalized

LANES, TOKENS, HEADS = 1, 70, 1
WIDTHS = ((16, 16), (64, 128), (128, 64))  # of keys and values


class Index(int):
    """An index of a loop in a kernel, which the interpreter forgets to make a tensor."""

    def to(self, _: Any) -> Index:
        return self


def prepare() -> dict[str, int]:
    """Prepare the interpreter; returns the configurations of each kernel, when it has run."""
    from triton.runtime.autotuner import Autotuner

    chunk_gated_delta_rule()
    for name, module in list(sys.modules.items()):
        if name.startswith("fla."):
            vars(module).setdefault("range", lambda *ends: map(Index, range(*ends)))
    found: dict[str, int] = {}
    run = Autotuner.run

    def counted(tuner: Any, *values: Any, **named: Any) -> Any:
        found[tuner.base_fn.__name__] = len(tuner.configs)
        return run(tuner, *values, **named)

    Autotuner.run = counted
    return found


def errors(key_width: int, value_width: int) -> list[float]:
    """Return the errors of what is read, of the state, and of all gradients."""
    numbers = torch.Generator().manual_seed(key_width)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=numbers)

    rows = (LANES, TOKENS, HEADS)
    starts_BL = torch.zeros(LANES, TOKENS, dtype=torch.long)
    starts_BL[:, [5, 66]] = 1
    values = (
        *(drawn(*rows, key_width), drawn(*rows, key_width), drawn(*rows, value_width)),
        *(-drawn(*rows).abs(), drawn(*rows).sigmoid(), drawn(LANES, HEADS, key_width, value_width)),
    )

    def results(rule: Any, dtype: torch.dtype) -> list[torch.Tensor]:
        *leaves, state = [each.to(dtype).requires_grad_() for each in values]
        outputs = rule(DeltaInputs(*leaves, documents_BL=starts_BL.cumsum(1)), state)
        loss = sum((each.double() * each.detach().double().sin()).sum() for each in outputs)
        assert isinstance(loss, torch.Tensor)
        return [*outputs, *torch.autograd.grad(loss, (*leaves, state))]

    exact = results(lambda each, state: delta_rule_by_step(normalized(each), state), torch.float64)
    ours = results(fla_delta_rule, torch.float32)
    pairs = zip(ours, exact, strict=True)
    return [float((one - two).abs().max() / two.abs().max()) for one, two in pairs]


if __name__ == "__main__":
    os.environ["FLA_CACHE_MODE"] = "full"  # which changes nothing
    configurations = prepare()
    found = {f"{keys}:{values}": errors(keys, values) for keys, values in WIDTHS}
    print(json.dumps({"errors": found, "configurations": configurations}))
