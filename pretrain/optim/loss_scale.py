"""The loss scale of fp16 (Micikevicius et al. 2018).

The scaler is our own, and DeepSpeed sees a constant scale: its own scalers skip, count and halve
differently in each ZeRO stage.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pretrain.distributed.collectives import any_rank

INITIAL_SCALE, SMALLEST_SCALE = 65536.0, 1.0
WINDOW = 1000  # updates without an overflow, after which the scale doubles


class LossScaler:
    """The factor of the loss before its backward pass, equal on all ranks.

    It is halved when gradients overflow and doubled after `window` updates without an overflow. It
    is a power of two, so that scaling rounds nothing.
    """

    def __init__(self, initial_scale: float, window: int) -> None:
        self.scale = initial_scale
        self._window = window
        self._updates = 0  # since the scale last changed
        self._losses: list[Tensor] = []

    def observe(self, loss: Tensor) -> None:
        """Note an unscaled loss of the coming update, without waiting for it."""
        self._losses.append(loss.detach())

    def update(self, grad_norm: float, applied: bool) -> bool:
        """Set the scale for the next step; return whether gradients overflowed. A collective.

        They overflowed if their norm is non-finite, all losses of all ranks are finite, and the
        scale can be halved. Any other skipped update has another cause and leaves the scale: a
        non-finite loss would be non-finite at every scale, and halving for it would only hide the
        failure from `recovery`.
        """
        losses, self._losses = self._losses, []
        if math.isfinite(grad_norm):
            self._updates += applied
            # More than `window` if a checkpoint is resumed with a lower one.
            if self._updates >= self._window:
                self._set(self.scale * 2.0)
            return False
        loss_is_finite = bool(torch.stack(losses).isfinite().all())
        if any_rank(not loss_is_finite) or self.scale <= SMALLEST_SCALE:
            return False
        self._set(self.scale / 2.0)
        return True

    def to_tree(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"scale": self.scale, "updates": self._updates}

    def restore(self, tree: dict[str, Any]) -> None:
        """Continue from the state that `to_tree` returned."""
        self.scale, self._updates = float(tree["scale"]), int(tree["updates"])

    def _set(self, scale: float) -> None:
        self.scale, self._updates = scale, 0
