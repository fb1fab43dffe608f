"""The configured optimizer, its learning rate, clipping, and when a step must be skipped.

The learning rate is a pure function of the step, so a resumed run needs no scheduler state. The
loss scale of fp16 (Micikevicius et al. 2018) is our own, and DeepSpeed sees a constant one: its
scalers skip, count and halve in a different way in each ZeRO stage.

All optimizers get tensors from ZeRO that are flat slices of many parameters. A `FragmentIndex`,
set after construction, tells them which parameter is where.

Each whole matrix has one owner, so picked that all ranks have about the same work. All parts that a
rank sends to another travel together, in one all-to-all each way.

Muon (Jordan et al. 2024) makes the average of gradients orthogonal: all its singular values become
about 1, so that rare directions count as much as frequent ones.

    m = momentum m + (1 - momentum) g
    O = NewtonSchulz((1 - momentum) g + momentum m)
    w = w (1 - lr decay) - lr scale O

That needs whole matrices, and ZeRO shards them. The average is kept element by element where the
weights are, like Adam's moments, so it is saved and resharded as those are. In each step a matrix
travels to one rank and its O back, both in the type in which O is computed.
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foundation.settings import assert_never
from pretrain.config.model import Precision
from pretrain.config.run import OptimConfig
from pretrain.costs.flops import NEWTON_SCHULZ_STEPS, newton_schulz_flops
from pretrain.distributed.collectives import any_rank, exchange_parts, sum_over_ranks
from pretrain.distributed.messages import gather_rows
from pretrain.distributed.world import World
from pretrain.model.transformer_xl import TransformerXL
from pretrain.optim.parameter_groups import (
    Fragment,
    FragmentIndex,
    LayerMeter,
    create_state,
    layer_of,
    parameter_groups,
    stacked_matrices,
)

# torch exports its _foreach functions without listing them.
# pyright: reportPrivateImportUsage=false


def adam_updates(
    fragments: Sequence[Fragment], group: Mapping[str, Any], num_updates: Tensor
) -> list[Tensor]:
    """Return Adam's update (Kingma and Ba 2015) of each fragment, without the learning rate.

        m / (sqrt(v) + epsilon), m and v corrected for bias after `num_updates`

    `num_updates` may be on the accelerator; nothing here waits for it.
    """
    if not fragments:
        return []
    # 1 - 0.999 has half its digits left in float32, so the difference is taken in float64.
    corrections = [(1.0 - torch.pow(beta, num_updates.double())).float() for beta in group["betas"]]
    updates = list(torch._foreach_sqrt([fragment.values["exp_avg_sq"] for fragment in fragments]))
    torch._foreach_div_(updates, corrections[1].sqrt())
    torch._foreach_add_(updates, group["eps"])
    torch._foreach_reciprocal_(updates)
    torch._foreach_mul_(updates, [fragment.values["exp_avg"] for fragment in fragments])
    torch._foreach_div_(updates, corrections[0])
    return updates


class FragmentOptimizer:
    """What the optimizers share: they change nothing, nor count a step, while `skips()`.

    Once `index` and `meter` are set, updates are passed to the meter while it is on.
    """

    skips: Callable[[], bool] = staticmethod(lambda: False)
    index: FragmentIndex | None = None
    meter: LayerMeter | None = None
    # Without torch's wrappers, which import its compiler to tell it to stay out of these methods:
    # half of a rank's start.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class GuardedAdamW(FragmentOptimizer, torch.optim.AdamW):
    """AdamW (Loshchilov and Hutter 2019) that may skip a step.

    The check is inside the optimizer because ZeRO computes the gradients' norm in the middle of its
    own step, right before it calls this one.
    """

    def step(self, closure: Any = None) -> Any:
        if not self.skips():
            self._update()

    def _update(self) -> None:
        with torch.no_grad():
            inspect.unwrap(torch.optim.AdamW.step)(self)
        if self.index is not None and self.meter is not None and self.meter.is_on:
            for group in self.param_groups:
                self._measure(group, self.index, self.meter)

    @torch.no_grad()
    def _measure(self, group: dict[str, Any], index: FragmentIndex, meter: LayerMeter) -> None:
        """Pass the update that was just applied to the meter, layer by layer to need little memory.

        The fused kernel does not return it and the old weights w are gone, but it follows from the
        moments and the new weights w'. With w' = w (1 - lr decay) - lr a, where a = `adam_updates`:

            w' - w = -lr (a + decay w') / (1 - lr decay)
        """
        rate, decay = group["lr"], group["weight_decay"]
        fragments = index.fragments_in(group["params"])
        for _, in_layer in itertools.groupby(
            fragments, key=lambda fragment: layer_of(fragment.name)
        ):
            parts = list(in_layer)
            updates = adam_updates(parts, group, self.state[parts[0].master]["step"])
            torch._foreach_add_(updates, [part.values["weight"] for part in parts], alpha=decay)
            meter.add(parts, updates, rate / (1.0 - rate * decay))


class Lamb(FragmentOptimizer, torch.optim.Optimizer):
    """LAMB (You et al. 2020, "Large batch optimization for deep learning", algorithm 2).

        r = m / (sqrt(v) + epsilon), m and v corrected for bias
        u = r + decay * w
        w -= lr * |w| / |u| * u

    |w| and |u| are norms of whole parameters: where elements are sharded across ranks, the ranks
    add up squares, in one small all-reduce per group. |w| is used as it is (phi(z) = z), and the
    ratio is 1 where either norm is 0. Parameters that do not decay (norms, biases) get plain Adam,
    ratio 1, as in the authors' BERT; which these are does not depend on the size of the decay.

    The engine clips gradients by their global norm before the step, so the moments see clipped
    gradients. Until `index` is set, a step only creates the moments: ZeRO takes such a step while
    it initializes.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self.skips():
            return
        for group in self.param_groups:
            masters = [master for master in group["params"] if master.grad is not None]
            if masters:
                self._update_moments(group, masters)
                self._update_weights(group, masters)

    def _update_moments(self, group: dict[str, Any], masters: Sequence[Tensor]) -> None:
        for master in masters:
            create_state(self.state[master], master)
            self.state[master]["step"] += 1
        exp_avgs, exp_avg_sqs = (
            [self.state[master][key] for master in masters] for key in ("exp_avg", "exp_avg_sq")
        )
        gradients = [master.grad for master in masters if master.grad is not None]
        beta1, beta2 = group["betas"]
        torch._foreach_lerp_(exp_avgs, gradients, 1.0 - beta1)
        torch._foreach_mul_(exp_avg_sqs, beta2)
        torch._foreach_addcmul_(exp_avg_sqs, gradients, gradients, 1.0 - beta2)

    def _update_weights(self, group: dict[str, Any], masters: Sequence[Tensor]) -> None:
        if self.index is None:
            return
        fragments = self.index.fragments_in(masters)
        weights = [fragment.values["weight"] for fragment in fragments]
        updates = adam_updates(fragments, group, self.state[masters[0]]["step"])
        if group["weight_decay"]:
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
        if group["decays"]:
            self._scale_by_trust_ratio(self.index, masters, weights, updates)
        if fragments:
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
        if self.meter is not None and self.meter.is_on:
            self.meter.add(fragments, updates, group["lr"])

    def _scale_by_trust_ratio(
        self,
        index: FragmentIndex,
        masters: Sequence[Tensor],
        weights: list[Tensor],
        updates: list[Tensor],
    ) -> None:
        """Multiply each update by |w| / |u| of its whole parameter.

        P = all parameters, F = this rank's fragments.
        A collective: a rank whose slice is padding only has no fragments, and still takes part.
        """
        squares_2P = torch.zeros(
            2, index.num_parameters, dtype=torch.float64, device=masters[0].device
        )
        parameter_F = index.parameter_indices(masters)
        if weights:
            norms_2F = torch.stack(
                [torch.stack(torch._foreach_norm(tensors)) for tensors in (weights, updates)]
            )
            squares_2P[:, parameter_F] = norms_2F.double().square()
        if index.is_sharded:
            squares_2P = sum_over_ranks(squares_2P)
        weight_F, update_F = squares_2P[:, parameter_F].sqrt()
        ratio_F = torch.where((weight_F > 0) & (update_F > 0), weight_F / update_F, 1.0).float()
        for update, ratio in zip(updates, ratio_F.unbind(), strict=True):
            update.mul_(ratio)


Span = tuple[int, int]  # the elements [start, stop) of a flattened matrix


class MatrixExchange:
    """The way of some matrices to their owners and back; making it is a collective.

    `shapes` and `costs`, by name, are equal on all ranks. `spans` are the elements that this rank
    holds; without `is_sharded` it holds all, as every other rank does.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, int]],
        costs: Mapping[str, float],
        spans: Mapping[str, Span],
        is_sharded: bool,
        world: World,
    ) -> None:
        rank, num_ranks = world.rank, world.world_size
        self._shapes = dict(shapes)
        self._is_sharded = is_sharded
        owner_of = dict(
            zip(shapes, owners([costs[name] for name in shapes], num_ranks), strict=True)
        )
        self.owned = [name for name in shapes if owner_of[name] == rank]
        if is_sharded:
            own = torch.tensor([spans.get(name, (0, 0)) for name in shapes], dtype=torch.int64)
            of_ranks = gather_rows(own.view(-1, 2)).tolist()
            held = [
                {name: (start, stop) for name, (start, stop) in zip(shapes, each, strict=True)}
                for each in of_ranks
            ]
        else:
            held = [{name: (0, rows * width) for name, (rows, width) in shapes.items()}] * num_ranks
        # Parts as this rank holds them, ordered by owner, and as it owns them, ordered by holder.
        self._held = [(name, held[rank][name]) for name in sorted(shapes, key=owner_of.__getitem__)]
        self._owned = [(name, of_rank[name]) for of_rank in held for name in self.owned]
        self._to_owners = [
            _size_of([held[rank][name] for name in shapes if owner_of[name] == owner])
            for owner in range(num_ranks)
        ]
        self._to_holders = [_size_of([of_rank[name] for name in self.owned]) for of_rank in held]

    def gather(self, parts: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Return the matrices that this rank owns, of the type and on the device of `like`.

        `parts` are the elements that this rank holds, flat.
        """
        if not self._is_sharded:
            return {name: parts[name].view(self._shapes[name]) for name in self.owned}
        own = [parts[name] for name, (start, stop) in self._held if stop > start]
        found = exchange_parts(torch.cat([*own, like]), self._to_owners, self._to_holders)
        wholes = {name: like.new_empty(self._shapes[name]) for name in self.owned}
        sizes = [stop - start for _, (start, stop) in self._owned]
        for (name, (start, stop)), part in zip(self._owned, found.split(sizes), strict=True):
            wholes[name].view(-1)[start:stop] = part
        return wholes

    def scatter(self, wholes: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
        """Return the elements that this rank holds, flat. `wholes` are matrices that it owns."""
        flat = {name: whole.reshape(-1) for name, whole in wholes.items()}
        own = [flat[name][start:stop] for name, (start, stop) in self._owned]
        found = exchange_parts(torch.cat([*own, like]), self._to_holders, self._to_owners)
        sizes = [stop - start for _, (start, stop) in self._held]
        names = [name for name, _ in self._held]
        return dict(zip(names, found.split(sizes), strict=True))


def owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Return the owner of each matrix: the largest first, each to the rank with the least so far.

    With equal costs these are ranks 0, 1, 2 and so on in turn.
    """
    loads = [0.0] * num_ranks
    found = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        found[index] = min(range(num_ranks), key=loads.__getitem__)
        loads[found[index]] += costs[index]
    return found


def _size_of(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)


COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Jordan et al.: the steepest at 0 that stays near 1
SMALLEST_NORM = 1e-7
MOMENTUM = 0.95  # decay of the average of gradients
RMS_OF_ADAMW = 0.2  # of an element of AdamW's updates, as Liu et al. 2025 measured


class Muon(GuardedAdamW):
    """Muon for the groups that say `orthogonalizes`, AdamW for the others.

    Until `index` is set, a step of Muon's groups only creates their state: ZeRO takes such a step
    while it initializes.
    """

    def __init__(
        self, groups: Sequence[dict[str, Any]], optim: OptimConfig, dtype: torch.dtype
    ) -> None:
        super().__init__(
            groups, lr=0.0, betas=optim.betas, eps=optim.epsilon, weight_decay=0.0, fused=True
        )
        self._dtype = dtype  # in which matrices are made orthogonal
        self._exchanges: dict[tuple[str, ...], MatrixExchange] = {}

    def _update(self) -> None:
        groups = self.param_groups
        for group in groups:
            if group["orthogonalizes"]:
                self._update_group(group)
        # AdamW updates every group that it sees.
        self.param_groups = [group for group in groups if not group["orthogonalizes"]]
        try:
            super()._update()
        finally:
            self.param_groups = groups

    @torch.no_grad()
    def _update_group(self, group: dict[str, Any]) -> None:
        masters = [master for master in group["params"] if master.grad is not None]
        for master in masters:
            create_state(self.state[master], master, group["state"])
            self.state[master]["step"] += 1
        if self.index is None or not masters:
            return
        fragments = self.index.fragments_in(masters)
        exchange = self._exchange_of(self.index, group, masters, fragments)
        like = torch.empty(0, dtype=self._dtype, device=self.index.world.device)
        averages = {each.name: self._average(each).to(like) for each in fragments}
        wholes = exchange.gather(averages, like)
        for name in exchange.owned:
            stacked = wholes[name].chunk(stacked_matrices(name))
            wholes[name] = torch.cat([orthogonalized(matrix) for matrix in stacked])
        self._apply(group, fragments, exchange.scatter(wholes, like))

    def _average(self, fragment: Fragment) -> Tensor:
        """Update the average of gradients; returns what is to be made orthogonal."""
        gradient, average = fragment.gradient(), fragment.values["momentum"]
        average.lerp_(gradient, 1.0 - MOMENTUM)
        return gradient.lerp(average, MOMENTUM)

    def _apply(
        self, group: dict[str, Any], fragments: Sequence[Fragment], orthogonal: Mapping[str, Tensor]
    ) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        measured = self.meter is not None and self.meter.is_on
        updates: list[Tensor] = []
        for each in fragments:
            rows, width = group["shapes"][each.name]
            scale = update_scale(rows // stacked_matrices(each.name), width)
            weight, update = each.values["weight"], orthogonal[each.name].to(each.master.device)
            if measured:
                updates.append(update.float() * scale + decay * weight)
            weight.mul_(1.0 - rate * decay)
            weight.add_(update, alpha=-(rate * scale))
        if self.meter is not None and measured:
            self.meter.add(fragments, updates, rate)

    def _exchange_of(
        self,
        index: FragmentIndex,
        group: dict[str, Any],
        masters: Sequence[Tensor],
        fragments: Sequence[Fragment],
    ) -> MatrixExchange:
        """Return the exchange of the matrices in `masters`: under ZeRO-3 a part of the group."""
        names = index.names_in(masters)
        if names not in self._exchanges:
            shapes = {name: group["shapes"][name] for name in names}
            costs = {name: _cost(name, *shape) for name, shape in shapes.items()}
            spans = {
                each.name: (each.start, each.start + each.values["weight"].numel())
                for each in fragments
            }
            self._exchanges[names] = MatrixExchange(
                shapes, costs, spans, index.is_sharded, index.world
            )
        return self._exchanges[names]


def orthogonalized(matrix: Tensor) -> Tensor:
    """Return U V^T of the matrix U S V^T, with singular values of about 0.7 to 1.2 instead of 1.

    Each step of Newton and Schulz's iteration applies an odd polynomial to all singular values.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=SMALLEST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def update_scale(rows: int, width: int) -> float:
    """Return the factor of an orthogonal update of a matrix (Liu et al. 2025, section 2.2)."""
    return RMS_OF_ADAMW * math.sqrt(max(rows, width))


def _cost(name: str, rows: int, width: int) -> float:
    stacked = stacked_matrices(name)
    return stacked * newton_schulz_flops(rows // stacked, width)


def build_optimizer(
    module: TransformerXL, optim: OptimConfig, precision: Precision = "fp32"
) -> GuardedAdamW | Lamb | Muon:
    """Return the configured optimizer; the engine sets its learning rate before every step."""
    groups = parameter_groups(module, optim)
    match optim.name:
        case "adamw":
            return GuardedAdamW(
                groups, lr=0.0, betas=optim.betas, eps=optim.epsilon, weight_decay=0.0, fused=True
            )
        case "lamb":
            return Lamb(groups, optim.betas, optim.epsilon)
        case "muon":
            # fp16 would overflow where Newton and Schulz's iteration squares.
            dtype = torch.float32 if precision == "fp32" else torch.bfloat16
            return Muon(groups, optim, dtype)
        case _:
            assert_never(optim.name)


def clip_gradients(module: nn.Module, optim: OptimConfig) -> Tensor:
    """Clip gradients to a global norm of `clip_norm` (0: no limit); returns the norm before."""
    parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
    limit = optim.clip_norm or float("inf")
    return nn.utils.clip_grad_norm_(parameters, limit, foreach=True)


def must_skip(grad_norm: float, skip_grad_norm: float) -> bool:
    """Whether this global norm is non-finite, or above the limit `skip_grad_norm` (0: none)."""
    return not math.isfinite(grad_norm) or 0.0 < skip_grad_norm < grad_norm


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
        """Set the scale for the next step; returns whether this one overflowed. A collective.

        They overflowed if they are non-finite, all losses of all ranks are finite and the scale can
        still be halved. Any other skipped update has another cause and leaves the scale alone: a
        non-finite loss would be non-finite at every scale, and halving for it would only hide the
        failure from `recovery`.
        """
        losses, self._losses = self._losses, []
        if math.isfinite(grad_norm):
            self._updates += applied
            # More than `window` if the setting was lowered on resume.
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


def learning_rate_at(optim: OptimConfig, step: int) -> float:
    """Return the learning rate of the update from `step` to `step + 1`; `step` starts at 0."""
    schedule = optim.schedule
    if step < schedule.warmup_steps:
        return optim.learning_rate * (step + 1) / schedule.warmup_steps
    return optim.learning_rate * _fraction_after_warmup(optim, step)


def _fraction_after_warmup(optim: OptimConfig, step: int) -> float:
    schedule = optim.schedule
    floor = schedule.final_fraction
    done = (step - schedule.warmup_steps) / max(1, optim.steps - schedule.warmup_steps)
    done = min(1.0, max(0.0, done))
    match schedule.shape:
        case "constant":
            return 1.0
        case "linear":
            return floor + (1.0 - floor) * (1.0 - done)
        case "cosine":
            return _cosine(floor, done)
        case "cosine_from_start":  # of Dai et al. 2019 in PyTorch; theirs in TensorFlow is "cosine"
            return _cosine(floor, min(1.0, step / optim.steps))
        case "inverse_sqrt":
            return max(floor, math.sqrt(max(1, schedule.warmup_steps) / max(1, step + 1)))
        case "wsd":  # warm-up, stable, decay: constant, then linear over the last `decay_steps`
            left = max(0, optim.steps - step)
            return floor + (1.0 - floor) * min(1.0, left / optim.decay_steps)
        case _:
            assert_never(schedule.shape)


def _cosine(floor: float, done: float) -> float:
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done))
