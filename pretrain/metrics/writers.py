"""Where measurements are kept: a line each in metrics.jsonl, a point per number in TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pretrain.rundir.run_dir import RunDir

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

NOT_DRAWN = ("kind", "step", "time")


class MetricsFiles:
    """A run's measurements on rank 0; those beyond `step` are removed first, for they come again.

    `may_write` is asked before each writing; it raises UserError in a start that has been overtaken.
    """

    def __init__(
        self, run_dir: RunDir, step: int, tensorboard: bool, may_write: Callable[[], None]
    ) -> None:
        self._path = run_dir.metrics
        self._may_write = may_write
        run_dir.cut_metrics_after(step)
        self._tensorboard = _open_tensorboard(run_dir, step) if tensorboard else None

    def append(self, lines: Sequence[dict[str, Any]]) -> None:
        """Write the lines; TensorBoard shows `train/loss` for `loss` in a line of the kind `train`."""
        self._may_write()
        with open(self._path, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        if self._tensorboard is None:
            return
        for line in lines:
            for name, value in line.items():
                if name not in NOT_DRAWN and value is not None:
                    self._tensorboard.add_scalar(f"{line['kind']}/{name}", value, line["step"])
        self._tensorboard.flush()

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


def _open_tensorboard(run_dir: RunDir, step: int) -> SummaryWriter:
    from torch.utils.tensorboard import SummaryWriter

    # What a killed run had logged beyond its checkpoint is made again: TensorBoard is told to forget it.
    return SummaryWriter(str(run_dir.tensorboard), purge_step=step + 1 if step else None)
