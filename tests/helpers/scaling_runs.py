"""Sweeps whose runs were not trained: their losses follow a known law."""

import json
from pathlib import Path

from foundation.files import write_text
from pretrain.commands import scale
from pretrain.config.run import RunConfig
from pretrain.costs.flops import run_cost
from pretrain.rundir.events import TrainingBegan
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.law import Law
from tests.helpers.metrics import train_line
from tests.helpers.scaling import HOFFMANN

EXPERIMENT = """
name: books
model: {vocab_size: 512, num_layers: 4, d_model: 128, num_heads: 8, memory_length: 64}
data: {segment_length: 64, lanes: 16, path: absent}
"""


def command(*arguments: object) -> int:
    return scale.PROGRAM.main([str(item) for item in arguments])


def train_by_the_law(
    directory: Path,
    config: RunConfig,
    until: float = 1.0,
    loss: float | None = None,
    law: Law = HOFFMANN,
) -> None:
    """A run directory as training leaves it, with the losses that the law gives, or a last one.

    `until` is the part that was done.
    """
    run_dir, cost = RunDir.create(directory, config), run_cost(config)
    last = round(until * config.optim.steps)
    lines = []
    for step in sorted({*range(1, last, max(1, last // 40)), last}):
        tokens = step * cost.tokens_per_step
        value = float(law.loss(cost.parameters, tokens))
        lines.append(train_line(step, value, tokens=tokens, seconds=2.0))
    if until == 1.0:
        final = lines[-1]["loss"] if loss is None else loss
        more = {"loss/code": final + 1, "tasks/quiz/acc": 0.5, "bits_per_byte": 0.4 * final}
        lines.append({"kind": "evaluation", "step": last, "seconds": 50.0, "loss": final, **more})
    write_text(run_dir.metrics, "".join(json.dumps(line) + "\n" for line in lines))
    run_dir.ledger.append(TrainingBegan(step=0, world_size=1, code="v1-7-gabc"))
