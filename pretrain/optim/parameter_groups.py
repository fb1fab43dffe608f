"""What each parameter is, by its name, and the optimizer's groups, which follow from that."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from foundation.settings import assert_never
from pretrain.config.choices import OptimizerName
from pretrain.config.model import ModelConfig
from pretrain.config.run import OptimConfig
from pretrain.model.transformer_xl import TransformerXL

Role = Literal["matrix", "projection", "table", "vector", "output_bias"]
ADAM_STATE = ("exp_avg", "exp_avg_sq")
MUON_STATE = ("momentum",)
# An orthogonal update returns as much as it is given; as large as AdamW's, it grows with the
# width^1/2.
MUON_RATE_EXPONENT = -0.5

_ROLES: dict[Role, str] = {
    # From hidden channels to hidden channels: both sides grow with the model's width.
    "matrix": r"layers\.\d+\.attention\.(query|key_value|position|output)_weight"
    r"|layers\.\d+\.deltanet\.(query|key|value|gate|output|decay|write)_weight"
    r"|layers\.\d+\.feed_forward\.(inner|gate|output)_weight"
    r"|compressions\.\d+\.weight",
    # Between the width of an embedding and the model's.
    "projection": r"(embedding|(embedding|head)\.bins\.\d+)\.projection",
    # A row of channels for each token, for each cluster of tokens, or for each memory token.
    "table": r"(embedding|head)\.bins\.\d+\.weight|head\.bins\.\d+\.cluster_weight"
    r"|memory_tokens\.initial",
    # Gains, biases, u and v, sinks and scales of heads, T5's table of distances, a deltanet's
    # convolution and gates.
    "vector": r"layers\.\d+\.(attention|feed_forward)_norm\.(gain|bias)"
    r"|layers\.\d+\.attention\.((query|key)_norm\.gain|sinks|length_scale)"
    r"|layers\.\d+\.deltanet\.(convolution_weight|decay_rate|decay_bias|output_norm\.gain)"
    r"|layers\.\d+\.feed_forward\.(inner|output)_bias"
    r"|(layers\.\d+\.attention\.)?(content|position)_bias"
    r"|distance_bias\.bucket_bias"
    r"|memory_tokens\.norm\.(gain|bias)"
    r"|compressions\.\d+\.bias",
    # One number for each token or cluster.
    "output_bias": r"head\.bins\.\d+\.(bias|cluster_bias)",
}


def role_of(name: str) -> Role:
    """Return what the parameter of this name is; a new parameter must be added to the table."""
    found: list[Role] = [role for role, names in _ROLES.items() if re.fullmatch(names, name)]
    assert len(found) == 1, f"parameter {name} has the roles {found}, expected one of {[*_ROLES]}"
    return found[0]


def decays(role: Role) -> bool:
    """Whether weight decay acts on such parameters."""
    match role:
        case "matrix" | "projection" | "table":
            return True
        case "vector" | "output_bias":
            return False
        case _:
            assert_never(role)


@dataclass(frozen=True)
class GroupTraits:
    """How the optimizer treats a group's parameters; those with equal traits share a group."""

    decays: bool
    weight_decay: float
    eps: float
    rate_factor: float = 1.0  # of the schedule's learning rate
    state: tuple[str, ...] = ADAM_STATE  # kinds of tensors of the parameters' sizes
    orthogonalizes: bool = False  # updates as Muon does


def group_traits(role: Role, optim: OptimConfig, model: ModelConfig) -> GroupTraits:
    """Return how parameters of this role are treated: with `model.base_width`, as muP says.

    The rate of what maps hidden channels to hidden channels is multiplied by a power of the width
    over the base's, m, and its weight decay is divided by that: their product is what decays a
    weight in a step. Gradients shrink as 1/m, and Adam's epsilon with them, except those of the
    output's biases.
    """
    width = model.width_multiplier
    match role:
        case "matrix":
            grows = True
        case "projection":
            grows = model.embedding_grows
        case "table" | "vector" | "output_bias":
            grows = False
        case _:
            assert_never(role)
    by_muon = role == "matrix" and optim.name == "muon"
    exponent = MUON_RATE_EXPONENT if by_muon else rate_exponent(optim.name)
    factor = width**exponent if grows else 1.0
    epsilon = optim.epsilon if role == "output_bias" else optim.epsilon / width
    decay = optim.weight_decay / factor if decays(role) else 0.0
    if by_muon:
        return GroupTraits(True, decay, epsilon, factor, MUON_STATE, orthogonalizes=True)
    return GroupTraits(decays(role), decay, epsilon, factor)


def rate_exponent(name: OptimizerName) -> float:
    """Return p: the best rate of a hidden matrix is proportional to the model's width^p.

    Updates of entries of equal size change what a matrix returns in proportion to its inputs, so
    AdamW has p = -1 (Yang et al. 2022, table 8). LAMB's entries shrink with the matrix's norm over
    its side, width^-1/2, which leaves the other half.
    """
    match name:
        case "adamw" | "muon":  # what Muon leaves to AdamW
            return -1.0
        case "lamb":
            return -0.5
        case _:
            assert_never(name)


def stacked_matrices(name: str) -> int:
    """Return how many matrices of equal shape a matrix has one above the other: keys and values."""
    return 2 if name.endswith(".key_value_weight") else 1


def parameter_groups(module: TransformerXL, optim: OptimConfig) -> list[dict[str, Any]]:
    """Return the optimizer's groups, with the parameters of each and their shapes by name."""
    groups: dict[GroupTraits, dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        traits = group_traits(role_of(name), optim, module.config)
        group = groups.setdefault(traits, {**vars(traits), "params": [], "shapes": {}})
        group["params"].append(parameter)
        # Under ZeRO-3 a parameter is an empty vector between its uses; `ds_shape` has its shape.
        group["shapes"][name] = tuple(getattr(parameter, "ds_shape", parameter.shape))
    return list(groups.values())


def set_learning_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set the rate of the next update in the optimizer's groups."""
    for group in groups:
        group["lr"] = rate * group["rate_factor"]


def state_of_parameters(groups: Iterable[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of the optimizer's state by the name of the parameter."""
    return {name: group["state"] for group in groups for name in group["shapes"]}
