"""Per-layer gradient norms and update ratios, measured inside the optimizer's step.

    grad_norm/LAYER       norm of the gradient before clipping; squares add up to the global norm's
    update_ratio/LAYER    norm of the update that was applied / norm of the weights after it

LAYER is `embedding` (with tied weights also the output matrix), `layer.0` and so on, `output`, or
`shared` for what all layers use: u, v, a table of distances. Sums of squares stay on the device
until metrics are written; they are then summed over ranks in the same vector as all other metrics,
so they cost no collective of their own.

K = kinds of norms, F = fragments of parameters, G = layers
"""

# torch exports its _foreach functions without listing them.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.optim.fragments import Fragment

NUM_KINDS = 3  # gradient, update, weight
CLIP_EPSILON = 1e-6  # torch and all stages of DeepSpeed add it to the norm when they clip


def layer_of(parameter_name: str) -> str:
    """Return the layer that a parameter is counted in."""
    if found := re.match(r"(?:layers|compressions)\.(\d+)\.", parameter_name):
        return f"layer.{found[1]}"
    return {"embedding": "embedding", "head": "output"}.get(parameter_name.split(".")[0], "shared")


@dataclass(frozen=True)
class LayerSquares:
    """Sums of squares of clipped gradients, updates and weights over the elements this rank owns.

    The layers' `names` are equal on all ranks, so `squares_KG` can be summed over ranks.
    """

    names: tuple[str, ...]
    squares_KG: Tensor  # float64


class LayerMeter:
    """Collects what an optimizer applies, in the steps it is asked to."""

    def __init__(self, parameter_names: Sequence[str]) -> None:
        self._layers = tuple(dict.fromkeys(layer_of(name) for name in parameter_names))
        self.is_on = False
        self._norms: list[Tensor] = []
        self._names: list[str] = []

    def start_step(self, is_on: bool) -> None:
        """Drop what was collected, and collect the next step if `is_on`."""
        self.is_on = is_on
        self._norms.clear()
        self._names.clear()

    def add(self, fragments: Sequence[Fragment], updates: Sequence[Tensor], scale: float) -> None:
        """Add the fragments' gradients and weights, and their updates, `scale` times `updates`."""
        owned = [
            (fragment, update)
            for fragment, update in zip(fragments, updates, strict=True)
            if fragment.owned
        ]
        if not owned:
            return
        self._names += [fragment.name for fragment, _ in owned]
        gradient_F, update_F, weight_F = (
            torch.stack(torch._foreach_norm(tensors)).double()
            for tensors in (
                [fragment.gradient() for fragment, _ in owned],
                [update for _, update in owned],
                [fragment.values["weight"] for fragment, _ in owned],
            )
        )
        self._norms.append(torch.stack([gradient_F, update_F * scale, weight_F]))

    def squares(self) -> LayerSquares:
        """Return what was added since `start_step`."""
        if not self._norms:
            return LayerSquares(
                self._layers, torch.zeros(NUM_KINDS, len(self._layers), dtype=torch.float64)
            )
        norms_KF = torch.cat(self._norms, dim=1)
        is_in_FG = torch.zeros(len(self._names), len(self._layers), dtype=torch.float64)
        for row, name in enumerate(self._names):
            is_in_FG[row, self._layers.index(layer_of(name))] = 1.0
        return LayerSquares(self._layers, norms_KF.square() @ is_in_FG.to(norms_KF.device))


def layer_metrics(
    layers: Sequence[str], squares: Sequence[float], grad_norm: float, clip_norm: float
) -> dict[str, float]:
    """Return the metrics by name, from the flat `squares_KG` of all ranks and the global norm."""
    # The optimizer saw clipped gradients; this undoes the clipping.
    clipped_by = max(1.0, (grad_norm + CLIP_EPSILON) / clip_norm) if clip_norm else 1.0
    count = len(layers)
    gradients, updates, weights = (
        squares[kind * count : (kind + 1) * count] for kind in range(NUM_KINDS)
    )
    norms = {
        f"grad_norm/{layer}": math.sqrt(square) * clipped_by
        for layer, square in zip(layers, gradients, strict=True)
    }
    ratios = {
        f"update_ratio/{layer}": math.sqrt(update / weight)
        for layer, update, weight in zip(layers, updates, weights, strict=True)
        if weight > 0
    }
    return {**norms, **ratios}
