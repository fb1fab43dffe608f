"""What each parameter is, by its name, and the optimizer's groups, which follow from that."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from data_pipeline.setting_fields import assert_never
from pretrain.config.optim import OptimConfig

Role = Literal["matrix", "projection", "table", "vector", "output_bias"]
ADAM_STATE = ("exp_avg", "exp_avg_sq")

_ROLES: dict[Role, str] = {
    # From hidden channels to hidden channels: both sides grow with the model's width.
    "matrix": r"layers\.\d+\.attention\.(query|key_value|position|output)_weight"
    r"|layers\.\d+\.feed_forward\.(inner|gate|output)_weight"
    r"|compressions\.\d+\.weight",
    # Between the width of an embedding and the model's.
    "projection": r"(embedding|(embedding|head)\.bins\.\d+)\.projection",
    # A row of channels for each token, or for each cluster of tokens.
    "table": r"(embedding|head)\.bins\.\d+\.weight|head\.bins\.\d+\.cluster_weight",
    # Gains, biases, u and v, T5's table of distances.
    "vector": r"layers\.\d+\.(attention|feed_forward)_norm\.(gain|bias)"
    r"|layers\.\d+\.attention\.(query|key)_norm\.gain"
    r"|layers\.\d+\.feed_forward\.(inner|output)_bias"
    r"|(layers\.\d+\.attention\.)?(content|position)_bias"
    r"|distance_bias\.bucket_bias"
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
class GroupRule:
    """How the optimizer treats the parameters of a group."""

    decays: bool
    weight_decay: float
    rate_factor: float = 1.0  # of the schedule's learning rate
    state: tuple[str, ...] = ADAM_STATE  # kinds of tensors of the parameters' sizes


def rule_of(role: Role, optim: OptimConfig) -> GroupRule:
    """Return how the optimizer treats parameters of this role."""
    return GroupRule(decays(role), optim.weight_decay if decays(role) else 0.0)


def parameter_groups(module: nn.Module, optim: OptimConfig) -> list[dict[str, Any]]:
    """Return one group for each rule, with the parameters it holds for and their names."""
    groups: dict[GroupRule, dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        rule = rule_of(role_of(name), optim)
        group = groups.setdefault(rule, {**vars(rule), "params": [], "names": []})
        group["params"].append(parameter)
        group["names"].append(name)
    return list(groups.values())


def set_learning_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set the rate of the next update in the optimizer's groups."""
    for group in groups:
        group["lr"] = rate * group["rate_factor"]


def state_of_parameters(groups: Iterable[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of the optimizer's state by the name of the parameter."""
    return {name: group["state"] for group in groups for name in group["names"]}
