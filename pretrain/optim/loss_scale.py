"""Dynamic loss scaling (Micikevicius et al. 2018): gradients that are too small for fp16 are computed larger."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pretrain.distributed.world import any_rank

SMALLEST_SCALE = 1.0


class LossScaler:
    """By how much the loss is multiplied before its backward pass, the same on every rank.

    Halved whenever gradients overflow, doubled after `window` updates without; a power of two, so that scaling rounds
    nothing. The engines use this one instead of DeepSpeed's, which counts in another way in every ZeRO stage.
    """

    def __init__(self, initial_scale: float, window: int) -> None:
        self.scale = initial_scale
        self._window = window
        self._updates = 0  # since the scale last changed
        self._losses: list[Tensor] = []

    def observe(self, loss: Tensor) -> None:
        """Take an unscaled loss whose gradients belong to the coming update, without waiting for it."""
        self._losses.append(loss.detach())

    def adapt(self, grad_norm: Tensor | float, applied: bool) -> bool:
        """Set the scale for the next step, all ranks together; whether the gradients of this one overflowed.

        That is when they are no numbers although every rank's losses are, and a smaller scale is left to try. All else
        that keeps an update from being applied is no matter of the scale, which then stays.
        """
        losses, self._losses = self._losses, []
        if math.isfinite(float(grad_norm)):
            self._updates += applied
            if (
                self._updates >= self._window
            ):  # more of them if the window has been made shorter since
                self._change_to(self.scale * 2.0)
            return False
        spoilt = not bool(torch.stack(losses).isfinite().all())
        if any_rank(spoilt) or self.scale <= SMALLEST_SCALE:
            return False
        self._change_to(self.scale / 2.0)
        return True

    def to_tree(self) -> dict[str, Any]:
        """What a checkpoint says of it."""
        return {"scale": self.scale, "updates": self._updates}

    def restore(self, tree: dict[str, Any]) -> None:
        """Go on from what `to_tree` said."""
        self.scale, self._updates = float(tree["scale"]), int(tree["updates"])

    def _change_to(self, scale: float) -> None:
        self.scale, self._updates = scale, 0
