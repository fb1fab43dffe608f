"""AdamW over fragments of parameters, and what all optimizers share.

Optimizers get tensors from ZeRO that are flat slices of many parameters. A `FragmentIndex`, set
after construction, tells them which parameter is where.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pretrain.optim.parameter_groups import Fragment, FragmentIndex, LayerMeter, layer_name

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
    """What the optimizers share. While `skips()` is true, a step changes and counts nothing.

    Once `index` and `meter` are set, updates are passed to the meter while it is on.
    """

    skips: Callable[[], bool] = staticmethod(lambda: False)
    index: FragmentIndex | None = None
    meter: LayerMeter | None = None
    # Without torch's wrappers: they import its compiler only to keep it out of these methods, which
    # would take half of a rank's start.
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
            fragments, key=lambda fragment: layer_name(fragment.name)
        ):
            parts = list(in_layer)
            updates = adam_updates(parts, group, self.state[parts[0].master]["step"])
            torch._foreach_add_(updates, [part.values["weight"] for part in parts], alpha=decay)
            meter.add(parts, updates, rate / (1.0 - rate * decay))
