"""Which part of which parameter a rank holds, and where in the tensors that its optimizer updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Fragment:
    """A run of one parameter's elements, [start, start + n), as this rank holds them.

    `values` are 1-D views into the live fp32 state (`weight`, `exp_avg`, `exp_avg_sq`): writing to them changes the
    engine. `owned` is False where another rank writes the same elements to the checkpoint. `master` is the tensor that
    the optimizer updates; there the run begins at `place`.
    """

    name: str
    start: int
    values: dict[str, Tensor]
    owned: bool
    master: Tensor
    place: int

    def gradient(self) -> Tensor:
        """The part of the master's gradient that belongs to these elements."""
        assert self.master.grad is not None
        return self.master.grad.reshape(-1).narrow(0, self.place, self.values["weight"].numel())


def create_moments(state: dict[str, Tensor], master: Tensor) -> None:
    """Give Adam its state before the first step, so that a checkpoint can be read into it."""
    if "exp_avg" not in state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
        state["exp_avg"] = torch.zeros_like(master, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(master, memory_format=torch.preserve_format)


def fragment_of(
    name: str,
    start: int,
    master: Tensor,
    state: dict[str, Tensor],
    place: int,
    count: int,
    owned: bool = True,
) -> Fragment:
    """The fragment of `count` elements that begin at `place` of the master and at `start` of the parameter."""
    whole = {"weight": master.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
    values = {kind: value.view(-1).narrow(0, place, count) for kind, value in whole.items()}
    return Fragment(name, start, values, owned, master, place)


class FragmentIndex:
    """A rank's fragments by the tensors they lie in, for an optimizer that is handed such tensors and no names.

    `names` are those of all parameters, in one order on all ranks. `is_sharded`: a parameter's elements are spread over
    the ranks; otherwise each rank holds all of them.
    """

    def __init__(
        self, fragments: Iterable[Fragment], names: Sequence[str], is_sharded: bool
    ) -> None:
        self.num_parameters = len(names)
        self.is_sharded = is_sharded
        numbers = {name: number for number, name in enumerate(names)}
        self._fragments: dict[Tensor, list[Fragment]] = {}
        for fragment in fragments:
            self._fragments.setdefault(fragment.master, []).append(fragment)
        self._numbers = {
            master: torch.tensor([numbers[each.name] for each in inside], device=master.device)
            for master, inside in self._fragments.items()
        }

    def fragments_in(self, masters: Iterable[Tensor]) -> list[Fragment]:
        """What lies in these tensors; nothing where one holds only padding."""
        return [fragment for master in masters for fragment in self._fragments.get(master, [])]

    def parameter_indices(self, masters: Sequence[Tensor]) -> Tensor:
        """For each of `fragments_in(masters)` the number of its parameter, on their device."""
        none = torch.empty(0, dtype=torch.int64, device=masters[0].device)
        return torch.cat([self._numbers.get(master, none) for master in masters])
