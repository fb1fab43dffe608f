"""Legal model shapes of one family: the base's head size, feed-forward ratio and depth-to-width ratio, scaled.

A shape is a number of heads and layers; the width follows from the heads, so that every width is a multiple of the head
size and every matrix divides as the base's does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from data_pipeline.errors import ConfigError
from pretrain.config.run import RunConfig
from pretrain.costs.flops import cost_of

DEPTH_FREEDOM = 1.4  # layers may differ from the base's ratio to the width by this factor, to come nearer to a size
DEPTH_WEIGHT = 0.1  # how much a wrong depth counts against a wrong size, both as logarithms
MOST_HEADS = 256
INNER_MULTIPLE = 8


@dataclass(frozen=True, order=True)
class Shape:
    num_heads: int
    num_layers: int


def with_shape(base: RunConfig, shape: Shape) -> RunConfig:
    """The base experiment with another number of heads and layers, its widths in proportion."""
    model = base.model
    growth = shape.num_heads / model.num_heads
    width = 2 * round(model.d_model * growth / 2)
    inner = (
        INNER_MULTIPLE * max(1, round(model.d_inner * growth / INNER_MULTIPLE))
        if model.d_inner
        else 0
    )
    shaped = replace(
        model,
        num_heads=shape.num_heads,
        num_key_heads=shape.num_heads // _heads_per_key(base) if model.num_key_heads else 0,
        num_layers=shape.num_layers,
        d_model=width,
        d_head=model.head_width,
        d_inner=inner,
    )
    return replace(base, model=shaped)


def nearest_shape(base: RunConfig, parameters: float, keep_layers: bool = False) -> RunConfig:
    """The legal shape whose parameters come nearest to the wanted number, at about the base's depth-to-width ratio.

    With `keep_layers` every shape has the base's depth: where few layers are wanted, whole ones jump too far.
    """
    best: tuple[float, RunConfig] | None = None
    group = _heads_per_key(base)
    for num_heads in range(group, MOST_HEADS + 1, group):
        candidates = [
            _scored(base, shape, parameters)
            for shape in _shapes_of_width(base, num_heads, keep_layers)
        ]
        closest = min(candidates, key=lambda item: item[0])
        if best is None or closest[0] < best[0]:
            best = closest
        if all(cost_of(run).parameters > 2 * parameters for _, run in candidates):
            break
    assert best is not None
    return best[1]


def refuse_far_shape(run: RunConfig, parameters: float, tolerance: float = 0.5) -> None:
    """ConfigError when even the nearest legal shape is not near: the base's heads or vocabulary do not allow it."""
    found = cost_of(run).parameters
    if abs(math.log(found / parameters)) > tolerance:
        raise ConfigError(
            f"the nearest legal shape to {parameters:.3g} parameters has {found:.3g} (heads of {run.model.head_width}, "
            f"vocabulary {run.model.vocab_size}); use a base experiment with smaller heads or another vocabulary"
        )


def _shapes_of_width(base: RunConfig, num_heads: int, keep_layers: bool) -> list[Shape]:
    if keep_layers:
        return [Shape(num_heads, base.model.num_layers)]
    ideal = _ideal_layers(base, num_heads)
    fewest, most = (
        max(1, math.ceil(ideal / DEPTH_FREEDOM)),
        max(1, math.floor(ideal * DEPTH_FREEDOM)),
    )
    return [Shape(num_heads, num_layers) for num_layers in range(fewest, max(fewest, most) + 1)]


def _ideal_layers(base: RunConfig, num_heads: int) -> float:
    return base.model.num_layers * num_heads / base.model.num_heads


def _heads_per_key(base: RunConfig) -> int:
    return base.model.num_heads // base.model.key_heads


def _scored(base: RunConfig, shape: Shape, parameters: float) -> tuple[float, RunConfig]:
    run = with_shape(base, shape)
    size_error = abs(math.log(cost_of(run).parameters / parameters))
    depth_error = abs(math.log(shape.num_layers / max(1.0, _ideal_layers(base, shape.num_heads))))
    return size_error + DEPTH_WEIGHT * depth_error, run
