"""What of a model is alive while its engine is built: `python -m tests.helpers.live_tensors OUTPUT
CELLS.json RANKS`.

Every rank counts the bytes of all tensors that hold as much as one whole parameter, operation by
operation, and compares its fragments with the model built whole. It writes OUTPUT/SETTING-RANK.json
for each of the settings.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from data_pipeline.config_loader import parse_config
from pretrain.config.run import RunConfig
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.engines.engine import Engine
from pretrain.model.transformer_xl import TransformerXL
from pretrain.run import build_engine
from tests.helpers.forked_ranks import all_ended, fork_ranks, import_everything


class LiveTensors(TorchDispatchMode):
    """Within it: `peak` bytes at a time in storages of exactly one of the given sizes, however they
    came about.
    """

    def __init__(self, sizes: set[int]) -> None:
        super().__init__()
        self._sizes = sizes
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() in self._sizes:
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return result


def measure(run: RunConfig) -> dict[str, Any]:
    """The peak while the run's engine is built, what the whole model takes, and whether its weights
    are as drawn.
    """
    world = init_world()
    torch.manual_seed(run.seed)
    whole = dict(TransformerXL(run.model).named_parameters())
    state = torch.get_rng_state()
    sizes = {
        value.numel() * width for value in whole.values() for width in (2, 4) if value.ndim > 1
    }
    with LiveTensors(sizes) as live:
        engine = build_engine(run, world)
    result = {
        "peak": live.peak,
        "largest": 4 * max(value.numel() for value in whole.values()),
        "whole": 4 * sum(value.numel() for value in whole.values()),
        "as_drawn": _is_as_drawn(engine, {name: value.detach() for name, value in whole.items()}),
        "random_state_as_drawn": torch.equal(state, torch.get_rng_state()),
    }
    del engine
    gc.collect()
    return result


def _is_as_drawn(engine: Engine, whole: dict[str, Tensor]) -> bool:
    """Whether this rank's weights are the drawn ones bit by bit, and all moments zero."""
    seen = 0
    for fragment in engine.fragments():
        values = fragment.values["weight"]
        drawn = whole[fragment.name].view(-1)[fragment.start : fragment.start + values.numel()]
        same = torch.equal(values.detach().view(torch.int32), drawn.view(torch.int32))
        still = not any(bool(fragment.values[kind].any()) for kind in ("exp_avg", "exp_avg_sq"))
        if not (same and still):
            return False
        seen += values.numel()
    return seen > 0 and engine.optimizer_step_count() == 0


def measure_rank(output: Path, settings: dict[str, Any]) -> int:
    """One rank's results, a file for each setting."""
    torch.set_num_threads(1)
    rank = init_world().rank
    for name, tree in settings.items():
        result = measure(parse_config(RunConfig, tree, name))
        (output / f"{name}-{rank}.json").write_text(json.dumps(result))
    destroy_process_group()
    return 0


def main() -> None:
    output, settings, num_ranks = (
        Path(sys.argv[1]),
        json.loads(Path(sys.argv[2]).read_text()),
        int(sys.argv[3]),
    )
    import_everything()
    pids = fork_ranks(num_ranks, lambda: measure_rank(output, settings), output)
    while not all_ended(pids):
        time.sleep(0.01)


if __name__ == "__main__":
    main()
