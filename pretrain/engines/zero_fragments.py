"""The fragments of a rank under DeepSpeed: where each ZeRO stage keeps fp32 weights and moments.

The optimizer updates fp32 tensors, the *masters*. The stage determines what a master has:

    stage  precision   wrapper of the optimizer       masters                          each has
    0      fp32        none                           the parameters                   a parameter
    0      bf16, fp16  FP16_UnfusedOptimizer          fp32_groups                      a parameter
    1      bf16        BF16_Optimizer                 fp32_groups_flat_partition       one slice
    1, 2   all other   DeepSpeedZeroOptimizer         single_partition_of_fp32_groups  one slice
    3      all         DeepSpeedZeroOptimizer_Stage3  fp32_partitioned_groups_flat     many slices

One slice: the parameters of a group are concatenated, and each rank has one slice of the result.
Many slices: each rank has one slice of every parameter of a group.
No public function of DeepSpeed tells which parameters' elements a rank's masters contain,
and its checkpoint formats are tied to stage and world size. So this module reads internals of
DeepSpeed 0.19.8. The version is pinned, and tests compare every stage with plain torch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pretrain.distributed.world import World
from pretrain.engines.torch_engine import replicated_fragment
from pretrain.optim.parameter_groups import (
    Fragment,
    create_state,
    new_fragment,
    state_of_parameters,
)


class ZeroFragments:
    """The fragments of one rank. `optimizer` is what `deepspeed.initialize` returned."""

    def __init__(self, module: nn.Module, optimizer: Any, stage: int, world: World) -> None:
        self._module = module
        self._optimizer = optimizer
        self._stage = stage
        self._world = world
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    @property
    def base_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer inside DeepSpeed's wrapper; its state has the moments."""
        return getattr(self._optimizer, "optimizer", self._optimizer)

    def __iter__(self) -> Iterator[Fragment]:
        kinds = state_of_parameters(self.base_optimizer.param_groups)
        for master, weights in self._masters():
            state: dict[str, Tensor] = self.base_optimizer.state[master]
            # A master holds parameters of one group, so all have the same kinds of state.
            create_state(state, master.data, kinds[self._names[id(weights[0])]])
            yield from self._fragments_in(master, weights, state)

    def names_in_masters(self) -> dict[Tensor, list[str]]:
        """Return the names of the parameters of each master's group, the same on every rank."""
        return {
            master: [self._names[id(weight)] for weight in weights]
            for master, weights in self._masters()
        }

    def write_weights(self) -> None:
        """Round the masters into the weights that the model computes with. A collective."""
        if self._stage == 3:
            self._write_weights_of_stage_3()
        elif self._stage > 0:
            self._optimizer.update_lp_params()
        else:
            for weight, master in self._weights_and_masters():
                if weight is not master:
                    weight.data.copy_(master.data)

    def _masters(self) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield each master and all weights of its group, also those in other ranks' slices."""
        wrapper = self._optimizer
        if self._stage == 0:
            yield from ((master, [weight]) for weight, master in self._weights_and_masters())
        elif self._stage == 3:
            masters = wrapper.fp32_partitioned_groups_flat
            yield from zip(masters, wrapper.fp16_groups, strict=True)
        else:
            groups = getattr(wrapper, "bit16_groups", None) or wrapper.bf16_groups
            masters = getattr(wrapper, "single_partition_of_fp32_groups", None)
            masters = wrapper.fp32_groups_flat_partition if masters is None else masters
            yield from zip(masters, groups, strict=True)

    def _fragments_in(
        self, master: Tensor, weights: list[Tensor], state: dict[str, Tensor]
    ) -> Iterator[Fragment]:
        if self._stage == 0:
            yield replicated_fragment(self._names[id(weights[0])], master, state, self._world)
        elif self._stage == 3:
            yield from self._fragments_of_stage_3(master, weights, state)
        else:
            yield from self._fragments_of_stages_1_and_2(master, weights, state)

    def _weights_and_masters(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each weight with its master under stage 0."""
        if self._optimizer is self.base_optimizer:  # fp32: a parameter is its own master
            yield from ((parameter, parameter) for parameter in self._module.parameters())
            return
        groups = zip(self._optimizer.fp16_groups, self._optimizer.fp32_groups, strict=True)
        for weights, masters in groups:
            yield from zip(weights, masters, strict=True)

    def _fragments_of_stages_1_and_2(
        self, master: Tensor, weights: list[Any], state: dict[str, Tensor]
    ) -> Iterator[Fragment]:
        """Yield this rank's fragments: its slice of the concatenated and padded parameters.

        The slice has a suffix of one parameter, some whole ones and a prefix of another. DeepSpeed
        notes on each weight (`_hp_mapping`) which of the weight's elements this rank's master has
        (`lp_fragment_address`) and where in the master they are (`get_hp_fragment_address()`).
        """
        for weight in weights:
            mapping = weight._hp_mapping
            if mapping is None:  # other ranks have all elements of this weight
                continue
            in_master = mapping.get_hp_fragment_address()
            start = mapping.lp_fragment_address.start
            name = self._names[id(weight)]
            yield new_fragment(name, start, master, state, in_master.start, in_master.numel)

    def _fragments_of_stage_3(
        self, master: Tensor, weights: list[Any], state: dict[str, Tensor]
    ) -> Iterator[Fragment]:
        """Yield this rank's fragments: its slice of each parameter of the group.

        Each parameter is padded and cut into one slice per rank; a master concatenates one rank's
        slices. The last ranks' slices can end in padding or be all padding. Padding belongs to no
        fragment, because a checkpoint must not depend on the world size.
        """
        offset = 0
        for weight in weights:
            length = weight.partition_numel()
            start = self._world.rank * length
            count = max(0, min(length, weight.ds_numel - start))
            if count:
                name = self._names[id(weight)]
                yield new_fragment(name, start, master, state, offset, count)
            offset += length

    def _write_weights_of_stage_3(self) -> None:
        """Round each master into its group's flat vector, and make the weights views of that."""
        wrapper = self._optimizer
        # DeepSpeed keeps small parameters gathered on every rank. Their old values must go: this
        # drops them, and the epilogue gathers the new ones.
        wrapper.checkpoint_event_prologue()
        groups = zip(
            wrapper.fp16_partitioned_groups_flat,
            wrapper.fp16_partitioned_groups,
            wrapper.fp32_partitioned_groups_flat,
            strict=True,
        )
        for flat, slices, master in groups:
            flat.data.copy_(master.data)
            for own_slice, view in zip(slices, wrapper.unflatten(flat, slices), strict=True):
                own_slice.data = view.data
        wrapper.checkpoint_event_epilogue()
