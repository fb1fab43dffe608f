"""Fragments: which part of which parameter a rank holds, and where in its optimizer's tensors.

Everything that must work at any world size and ZeRO stage goes through them: checkpoints, EMA,
LAMB, per-layer norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pretrain.distributed.world import World
from pretrain.optim.parameter_groups import ADAM_STATE


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


def fragment_of(
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

    `names` are those of the parameters in each master, also of those of which this rank has no
    element, so that they are the same on all ranks, in the same order. `is_sharded`: each element
    is on one rank; otherwise every rank holds all of them.
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
            master: torch.tensor([index_of[each.name] for each in inside], device=master.device)
            for master, inside in self._fragments.items()
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
