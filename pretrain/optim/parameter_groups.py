"""The role of each parameter, by its name, and the optimizer's groups, which follow from the roles.

A fragment says which elements of a parameter a rank holds, and where in the optimizer's tensors.
Everything that must work at any world size and ZeRO stage uses fragments: checkpoints, EMA, LAMB,
and the norms per layer that are measured inside the optimizer's step:

    grad_norm/LAYER       norm of the gradient before clipping; squares add up to the global norm's
    update_ratio/LAYER    norm of the update that was applied / norm of the weights after it

LAYER is `embedding` (with tied weights also the output matrix), `layer.0` and so on, `output`, or
`shared` for what all layers use: u, v, a table of distances. Sums of squares stay on the device
until metrics are written; they are then summed over ranks in the same vector as all other metrics,
so they cost no collective of their own. Suffixes: K kinds of norms, F fragments, G layers.
"""

# pyright: reportPrivateImportUsage=false
# torch exports its _foreach functions without listing them.

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundation.settings import assert_never
from pretrain.config.mixer import Role, Weight
from pretrain.config.model import ModelConfig, OptimizerName
from pretrain.config.run import OptimConfig
from pretrain.distributed.world import World
from pretrain.model.adopted import LanguageModel
from pretrain.model.transformer_xl import TransformerXL

ADAM_STATE = ("exp_avg", "exp_avg_sq")
MUON_STATE = ("momentum",)
# An orthogonal update keeps the size of its input. Scaled to the size of AdamW's, it grows with
# width^1/2, so the rate has to shrink.
MUON_RATE_EXPONENT = -0.5
NUM_KINDS = 3  # gradient, update, weight
CLIP_EPSILON = 1e-6  # torch and all stages of DeepSpeed add it to the norm when they clip


@dataclass(frozen=True)
class Fragment:
    """The elements [start, start + n) of one flattened parameter, as this rank holds them.

    `values` are 1-D views into the live fp32 state (`weight`, and the optimizer's, such as
    `exp_avg` and `exp_avg_sq`): writing to them changes the engine. `replicated`: every rank holds
    these elements. `owned` is False where another rank writes them to the checkpoint. `master` is
    the tensor that the optimizer updates; the fragment's elements start at `offset` in it.

    Under ZeRO, with two ranks, and a master that is this rank's half of a flat vector:

        flat vector     | embedding ....... | query_weight ..... | padding |
        ranks           | rank 0 ................ | rank 1 ................ |
        rank 1          Fragment("query_weight", start=600, offset=0, ...); no fragment for padding
    """

    name: str
    start: int
    values: dict[str, Tensor]
    owned: bool
    master: Tensor
    offset: int
    replicated: bool = False

    def gradient(self) -> Tensor:
        """Return the part of the master's gradient that belongs to these elements."""
        assert self.master.grad is not None
        return self.master.grad.reshape(-1).narrow(0, self.offset, self.values["weight"].numel())


def create_state(
    state: dict[str, Tensor], master: Tensor, kinds: Sequence[str] = ADAM_STATE
) -> None:
    """Create the optimizer's state before its first step, for a checkpoint to be read into."""
    if "step" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        for kind in kinds:
            state[kind] = torch.zeros_like(master, memory_format=torch.preserve_format)


def new_fragment(
    name: str,
    start: int,
    master: Tensor,
    state: dict[str, Tensor],
    offset: int,
    count: int,
    owned: bool = True,
    replicated: bool = False,
) -> Fragment:
    """Return `count` elements at `offset` of the master and `start` of the parameter."""
    whole = {"weight": master.data, **{kind: state[kind] for kind in state if kind != "step"}}
    values = {kind: value.view(-1).narrow(0, offset, count) for kind, value in whole.items()}
    return Fragment(name, start, values, owned, master, offset, replicated)


class FragmentIndex:
    """A rank's fragments by master tensor, for optimizers that get tensors without names.

    `names` has the parameters in each master, also where this rank has no element of them, so they
    are the same on all ranks, in the same order. `is_sharded`: each element is on one rank;
    otherwise every rank holds all elements.
    """

    def __init__(
        self,
        fragments: Iterable[Fragment],
        names: Mapping[Tensor, Sequence[str]],
        is_sharded: bool,
        world: World,
    ) -> None:
        all_names = [name for inside in names.values() for name in inside]
        self.num_parameters = len(all_names)
        self.is_sharded = is_sharded
        self.world = world
        self._names = dict(names)
        index_of = {name: index for index, name in enumerate(all_names)}
        self._fragments: dict[Tensor, list[Fragment]] = {}
        for fragment in fragments:
            self._fragments.setdefault(fragment.master, []).append(fragment)
        self._indices = {
            master: torch.tensor([index_of[part.name] for part in parts], device=master.device)
            for master, parts in self._fragments.items()
        }

    def fragments_in(self, masters: Iterable[Tensor]) -> list[Fragment]:
        """Return the fragments in these tensors; a tensor of padding alone has none."""
        return [fragment for master in masters for fragment in self._fragments.get(master, [])]

    def names_in(self, masters: Iterable[Tensor]) -> tuple[str, ...]:
        """Return the parameters in these tensors, the same on all ranks."""
        return tuple(name for master in masters for name in self._names[master])

    def parameter_indices(self, masters: Sequence[Tensor]) -> Tensor:
        """Return the index of the parameter of each of `fragments_in(masters)`, on their device."""
        none = torch.empty(0, dtype=torch.int64, device=masters[0].device)
        return torch.cat([self._indices.get(master, none) for master in masters])


# Role -> names of parameters. A mixer's facts say the roles of its own parameters.
_ROLES: dict[Role, str] = {
    "matrix": r"layers\.\d+\.feed_forward\.(inner|gate|output)_weight|compressions\.\d+\.weight",
    "projection": r"(embedding|(embedding|head)\.bins\.\d+)\.projection",
    "table": r"(embedding|head)\.bins\.\d+\.weight|head\.bins\.\d+\.cluster_weight"
    r"|memory_tokens\.initial",
    "vector": r"layers\.\d+\.(attention|feed_forward)_norm\.(gain|bias)"
    r"|layers\.\d+\.feed_forward\.(inner|output)_bias"
    r"|(content|position)_bias"
    r"|distance_bias\.bucket_bias"
    r"|memory_tokens\.norm\.(gain|bias)"
    r"|compressions\.\d+\.bias",
    "output_bias": r"head\.bins\.\d+\.(bias|cluster_bias)",
}


def parameter_role(name: str, model: ModelConfig) -> Role:
    """Return a parameter's role; a new parameter needs one in its mixer's facts or in `_ROLES`."""
    if weight := mixer_weight(name, model):
        return weight.role
    roles: list[Role] = [role for role, names in _ROLES.items() if re.fullmatch(names, name)]
    assert len(roles) == 1, f"parameter {name} has the roles {roles}, expected one of {[*_ROLES]}"
    return roles[0]


def mixer_weight(name: str, model: ModelConfig) -> Weight | None:
    """Return the facts of a layer's mixer about a parameter; None if it is not a mixer's."""
    if not name.startswith("layers."):
        return None
    _, layer, owner, own_name = name.split(".", 3)
    mixer = model.mixer(int(layer))
    return mixer.weights(model).get(own_name) if owner == mixer.kind else None


def decays(role: Role) -> bool:
    """Return whether weight decay acts on such parameters."""
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
    rate_factor: float = 1.0  # multiplies the schedule's learning rate
    state: tuple[str, ...] = ADAM_STATE  # kinds of tensors of the parameters' sizes
    orthogonalizes: bool = False  # Muon updates the group


def group_traits(role: Role, optim: OptimConfig, model: ModelConfig) -> GroupTraits:
    """Return how parameters of this role are treated; `model.base_width` turns muP on.

    m is the width over the base's width. A power of m multiplies the learning rate of parameters
    that map hidden channels to hidden channels. It divides their weight decay, because a step
    decays a weight by the product of both. Gradients shrink as 1/m, and Adam's epsilon with them,
    except for the output's biases.
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

    AdamW's updates have entries of a fixed size, so they change what a matrix returns in proportion
    to its number of inputs: p = -1 (Yang et al. 2022, table 8). LAMB's updates have entries that
    shrink like the weights, as width^-1/2, which leaves p = -1/2.
    """
    match name:
        case "adamw" | "muon":  # what Muon leaves to AdamW
            return -1.0
        case "lamb":
            return -0.5
        case _:
            assert_never(name)


def parameter_groups(module: LanguageModel, optim: OptimConfig) -> list[dict[str, Any]]:
    """Return the optimizer's groups: traits, parameters, and by the parameter's name its shape and
    how many matrices are stacked in it.
    """
    groups: dict[GroupTraits, dict[str, Any]] = {}
    for name, parameter in module.named_parameters():
        is_own = isinstance(module, TransformerXL)
        role = parameter_role(name, module.config) if is_own else module.roles[name]
        traits = group_traits(role, optim, module.config)
        empty = {"params": [], "shapes": {}, "stacked": {}}
        group = groups.setdefault(traits, {**vars(traits), **empty})
        group["params"].append(parameter)
        # Under ZeRO-3 a parameter is an empty vector between its uses; `ds_shape` has its shape.
        group["shapes"][name] = tuple(getattr(parameter, "ds_shape", parameter.shape))
        weight = mixer_weight(name, module.config) if is_own else None
        group["stacked"][name] = weight.stacked if weight else 1
    return list(groups.values())


def set_learning_rate(groups: Iterable[dict[str, Any]], rate: float) -> None:
    """Set the rate of the next update in the optimizer's groups."""
    for group in groups:
        group["lr"] = rate * group["rate_factor"]


def state_of_parameters(groups: Iterable[dict[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return the kinds of the optimizer's state by the name of the parameter."""
    return {name: group["state"] for group in groups for name in group["shapes"]}


def layer_name(parameter_name: str) -> str:
    """Return the layer that a parameter is counted in."""
    if number := re.match(r"(?:inner\..*?)?(?:layers|compressions)\.(\d+)\.", parameter_name):
        return f"layer.{number[1]}"
    return {"embedding": "embedding", "head": "output"}.get(parameter_name.split(".")[0], "shared")


@dataclass(frozen=True)
class LayerSquares:
    """Sums of squares of clipped gradients, updates and weights over the elements this rank owns.

    The layers' `names` are equal on all ranks, so `squares_KG` can be summed over ranks.
    """

    names: tuple[str, ...]
    squares_KG: Tensor  # float64


class LayerMeter:
    """Collects the norms of an optimizer's updates, in the steps that `start_step` selects."""

    def __init__(self, parameter_names: Sequence[str]) -> None:
        self._layers = tuple(dict.fromkeys(layer_name(name) for name in parameter_names))
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
            is_in_FG[row, self._layers.index(layer_name(name))] = 1.0
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
