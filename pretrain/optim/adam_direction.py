"""Where Adam goes, from its moments (Kingma and Ba 2015)."""

# torch exports its _foreach functions without listing them.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.optim.fragments import Fragment


def adam_updates(
    fragments: Sequence[Fragment], group: Mapping[str, Any], num_updates: Tensor
) -> list[Tensor]:
    """m / (sqrt(v) + epsilon) for each fragment as new tensors; m and v corrected for bias after `num_updates`.

    `num_updates` may lie on the device: nothing here waits for it.
    """
    if not fragments:
        return []
    # 1 - 0.999 has half its digits left in float32, so the difference is taken in float64.
    corrections = [(1.0 - torch.pow(beta, num_updates.double())).float() for beta in group["betas"]]
    directions = list(
        torch._foreach_sqrt([fragment.values["exp_avg_sq"] for fragment in fragments])
    )
    torch._foreach_div_(directions, corrections[1].sqrt())
    torch._foreach_add_(directions, group["eps"])
    torch._foreach_reciprocal_(directions)
    torch._foreach_mul_(directions, [fragment.values["exp_avg"] for fragment in fragments])
    torch._foreach_div_(directions, corrections[0])
    return directions
