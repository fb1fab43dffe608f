"""How long each layer's gradient is and how far an update moves its weights, from what the optimizer has at hand.

    grad_norm/LAYER       norm of the gradient before clipping; the squares of all layers add up to the global norm's
    update_ratio/LAYER    norm of the update that was applied, by the norm of the weights after it

LAYER is `embedding` (with tied weights the output matrix too), `layer.0` and so on, `output`, or `shared` for what all
layers use: u, v, a table of distances. Sums of squares stay on the device until the metrics are written, where they
travel in the vector that the ranks exchange anyway.

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
CLIP_EPSILON = (
    1e-6  # added to the norm by whatever clips gradients here: torch and every stage of DeepSpeed
)


def layer_of(parameter_name: str) -> str:
    """The layer that a parameter counts to."""
    if found := re.match(r"(?:layers|compressions)\.(\d+)\.", parameter_name):
        return f"layer.{found[1]}"
    return {"embedding": "embedding", "head": "output"}.get(parameter_name.split(".")[0], "shared")


@dataclass(frozen=True)
class LayerSquares:
    """Sums of squares of clipped gradients, updates and weights of the elements that this rank owns.

    `names` of layers are the same on all ranks, so that the ranks' `squares_KG` may be added.
    """

    names: tuple[str, ...]
    squares_KG: Tensor  # float64


class LayerMeter:
    """Takes from an optimizer what it applies, in the steps it is asked to."""

    def __init__(self, parameter_names: Sequence[str]) -> None:
        self._layers = tuple(dict.fromkeys(layer_of(name) for name in parameter_names))
        self.is_on = False
        self._norms: list[Tensor] = []
        self._names: list[str] = []

    def begin(self, asked: bool) -> None:
        """Look at the next step, or look away."""
        self.is_on = asked
        self._norms.clear()
        self._names.clear()

    def add(self, fragments: Sequence[Fragment], updates: Sequence[Tensor], scale: float) -> None:
        """The fragments' gradients and weights as they are, and `scale` times each of `updates` as what was applied."""
        own = [
            (fragment, update)
            for fragment, update in zip(fragments, updates, strict=True)
            if fragment.owned
        ]
        if not own:
            return
        self._names += [fragment.name for fragment, _ in own]
        gradient_F, update_F, weight_F = (
            torch.stack(torch._foreach_norm(tensors)).double()
            for tensors in (
                [fragment.gradient() for fragment, _ in own],
                [update for _, update in own],
                [fragment.values["weight"] for fragment, _ in own],
            )
        )
        self._norms.append(torch.stack([gradient_F, update_F * scale, weight_F]))

    def take(self) -> LayerSquares:
        """What was added since `begin`."""
        if not self._norms:
            return LayerSquares(
                self._layers, torch.zeros(NUM_KINDS, len(self._layers), dtype=torch.float64)
            )
        norms_KF = torch.cat(self._norms, dim=1)
        belongs_FG = torch.zeros(len(self._names), len(self._layers), dtype=torch.float64)
        for row, name in enumerate(self._names):
            belongs_FG[row, self._layers.index(layer_of(name))] = 1.0
        return LayerSquares(self._layers, norms_KF.square() @ belongs_FG.to(norms_KF.device))


def numbers_of_layers(
    layers: Sequence[str], squares: Sequence[float], grad_norm: float, clip_norm: float
) -> dict[str, float]:
    """The measurements by their names; `squares`: all ranks' `squares_KG` in a row, `grad_norm`: the global norm."""
    shortened = max(1.0, (grad_norm + CLIP_EPSILON) / clip_norm) if clip_norm else 1.0
    count = len(layers)
    gradients, updates, weights = (
        squares[kind * count : (kind + 1) * count] for kind in range(NUM_KINDS)
    )
    norms = {
        f"grad_norm/{layer}": math.sqrt(square) * shortened
        for layer, square in zip(layers, gradients, strict=True)
    }
    ratios = {
        f"update_ratio/{layer}": math.sqrt(update / weight)
        for layer, update, weight in zip(layers, updates, weights, strict=True)
        if weight > 0
    }
    return {**norms, **ratios}
