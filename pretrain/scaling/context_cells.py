"""What `scale context collect` knows of a run before it evaluates it: how it differs from the
others, which of its losses are there already, and what the missing ones cost.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data_pipeline.config_loader import differences, to_tree
from data_pipeline.errors import ConfigError
from pretrain.checkpoint.marker import latest_step
from pretrain.config.resume_rules import may_change
from pretrain.config.run import RunConfig
from pretrain.costs.devices import CPU_MFU, DEVICES
from pretrain.costs.flops import cost_of, flops_of
from pretrain.reporting.results import differing_settings
from pretrain.rundir.metrics_summary import summarize_file
from pretrain.rundir.run_dir import RunDir

# Settings that a context sweep varies, with those that follow from them, and the seed of repeats.
AXES = frozenset(
    ("name", "seed", "model.memory_length", "data.segment_length", "data.lanes")
    + ("optim.schedule.warmup_steps", "optim.schedule.decay_steps")
)


@dataclass(frozen=True)
class TrainedCell:
    """A run and its losses by memory length, as far as they were measured before."""

    directory: Path
    config: RunConfig
    run_id: str
    known: Mapping[int, float]
    max_tokens: int  # scored per evaluation; 0: the whole split

    def missing(self, lengths: Sequence[int]) -> list[int]:
        """The memory lengths without a loss."""
        return [length for length in lengths if length not in self.known]

    def seconds(self, length: int) -> float:
        """About how long an evaluation with this memory takes, at the speed of the training."""
        tokens = self.max_tokens or self._last("tokens", 0)
        return tokens * _forward_flops(self.config, length) / self._flops_per_second()

    def _last(self, name: str, default: float) -> float:
        """The value that a line of the run's metrics had last."""
        lines = RunDir(self.directory).read_metrics()
        return next((line[name] for line in reversed(lines) if line.get(name)), default)

    def _flops_per_second(self) -> float:
        speed = summarize_file(RunDir(self.directory).metrics).recent_tokens_per_second or 0.0
        assumed = CPU_MFU * DEVICES["cpu"].fp32
        return speed * cost_of(self.config).flops_per_token or assumed


# Losses that were measured before: name, id, tokens trained on and tokens scored of a run -> by
# memory length.
Earlier = Mapping[tuple[str, str, int, int], Mapping[int, float]]


def read_cell(
    directory: Path, earlier: Earlier, name: str, trained_tokens: int, max_tokens: int
) -> TrainedCell:
    """Return the run of a directory, with the losses of its own last evaluation and `earlier`.

    UserError if it has no checkpoint to evaluate.
    """
    run_dir = RunDir.open(directory)
    config, run_id = run_dir.config, run_dir.identity.id
    if not latest_step(run_dir.checkpoints):
        raise ConfigError(f"{directory} has no checkpoint yet")
    asked = max_tokens or config.evaluation.max_tokens
    known = earlier.get((name, run_id, trained_tokens, asked), {})
    known = {**_own_losses(run_dir, config, asked), **known}
    return TrainedCell(directory, config, run_id, known, asked)


def recipe_id(config: RunConfig) -> str:
    """Return a short name for equal recipes: settings by which runs of a sweep must not differ."""
    changes = differences(to_tree(RunConfig()), to_tree(config))
    recipe = {key: value for key, (_, value) in changes.items() if _is_of_recipe(key)}
    text = json.dumps(recipe, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def differences_of(configs: Mapping[str, RunConfig]) -> dict[str, str]:
    """Return for each run its values of the settings in which the runs' recipes differ."""
    values = differing_settings(list(configs.values())) if configs else {}
    told = {key: each for key, each in values.items() if _is_of_recipe(key)}
    return {
        name: " ".join(f"{key}={each[index]}" for key, each in told.items())
        for index, name in enumerate(configs)
    }


def _is_of_recipe(key: str) -> bool:
    return key not in AXES and not may_change(RunConfig, key)


def _own_losses(run_dir: RunDir, config: RunConfig, max_tokens: int) -> dict[int, float]:
    """Losses with the training's memory and without, from the evaluation after the last step.

    None of a run with an average of its weights, which that evaluation may have used.
    """
    if max_tokens != config.evaluation.max_tokens or config.optim.ema_decay:
        return {}
    lines = [
        line
        for line in run_dir.read_metrics()
        if line.get("kind") == "evaluation" and line["step"] == config.optim.steps
    ]
    if not lines:
        return {}
    own = {0: "loss_without_memory", config.model.longest_memory: "loss"}
    return {length: float(lines[-1][name]) for length, name in own.items() if name in lines[-1]}


def _forward_flops(config: RunConfig, memory_length: int) -> float:
    """FLOPs per token of an evaluation, which keeps the memory's keys and values."""
    length, lanes = config.data.segment_length, config.evaluation.lanes
    try:
        model = config.model.with_memory(memory_length)
    except ConfigError:  # settings that need a memory
        model = replace(config.model, compressed_length=0, same_length=False)
        model = model.with_memory(memory_length)
    alone = replace(model, memory_length=0, compressed_length=0, same_length=False)
    flops, projections = flops_of(model, length, lanes), flops_of(alone, length, lanes).projections
    return flops.forward - flops.projections + projections
