"""The results of runs, and how their settings differ, for every table of runs side by side.

Torch-free, and without numpy, so that `launcher` can show it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foundation.errors import ConfigError
from foundation.settings import differences
from foundation.typed_values import to_tree
from pretrain.config.lane_parts import lane_parts
from pretrain.config.phases import tokens_of_steps
from pretrain.config.run import RunConfig
from pretrain.costs.flops import run_cost
from pretrain.rundir.evaluated_text import EvaluatedText
from pretrain.rundir.events import Event
from pretrain.rundir.history import skipped_windows
from pretrain.rundir.metric_names import (
    MEMORY_GAIN,
    RUN_SPEED,
    TRAIN_LOSS,
    VALIDATION_LOSS,
    memory_gain,
)
from pretrain.rundir.metrics_file import MetricsSummary
from pretrain.terminal.text import flops_text, format_number, si


@dataclass(frozen=True, kw_only=True)
class RunResults:
    """The results of a run so far; None where unknown. `metric_names` defines losses and speeds."""

    train_loss: float | None = None
    validation_loss: float | None = None
    validation_step: int | None = None  # of the evaluation, if not the run's latest step
    validation_error: float | None = None  # standard error of that loss, over documents
    validation_text: str = "-"  # how many tokens and documents were scored
    bits_per_byte: float | None = None
    memory_gain: float | None = None
    parameters: int | None = None
    flops: float | None = None  # of all steps so far
    run_tokens_per_second: float | None = None
    goodput: float | None = None
    skipped_windows: int = 0  # of data, which the run skips after loss spikes

    @property
    def when_validated(self) -> str:
        """` (step 100)` if the validation loss is not of the run's latest step, else ''."""
        return "" if self.validation_step is None else f" (step {self.validation_step:,})"

    @property
    def cells(self) -> dict[str, str]:
        """The texts of a table's cells, by the heads of their columns."""
        return {
            TRAIN_LOSS: format_number(self.train_loss, ".4f"),
            VALIDATION_LOSS: format_number(self.validation_loss, ".4f") + self.when_validated,
            "standard error": format_number(self.validation_error, ".4f"),
            "validated on": self.validation_text,
            "bits/byte": format_number(self.bits_per_byte, ".4f"),
            MEMORY_GAIN: format_number(self.memory_gain, "+.4f"),
            "parameters": "-" if self.parameters is None else si(self.parameters).strip(),
            "FLOPs": "-" if self.flops is None else flops_text(self.flops),
            RUN_SPEED: format_number(self.run_tokens_per_second, ",.0f"),
            "goodput": format_number(self.goodput, ".0%"),
            "skipped windows": str(self.skipped_windows),
        }


HEADS = tuple(RunResults().cells)


def results_of(
    config: RunConfig, metrics: MetricsSummary, ledger: Sequence[Event], goodput: float | None
) -> RunResults:
    """Return the results of a run with these measurements and events."""
    evaluation: Mapping[str, Any] = metrics.evaluation or {}
    text = EvaluatedText.of_line(evaluation)
    carries_memory = any(part.num_bytes(1) for part in lane_parts(config.model))
    try:
        cost = run_cost(config, min(metrics.step, config.optim.steps))
    except ConfigError:  # the vocabulary is not known before the run starts
        cost = None
    tokens, seconds = tokens_of_steps(config, range(metrics.step)), metrics.spent.steps
    return RunResults(
        train_loss=metrics.train_loss,
        validation_loss=evaluation.get("loss"),
        validation_step=None if (step := evaluation.get("step")) == metrics.step else step,
        validation_error=text.standard_error,
        validation_text=text.description,
        bits_per_byte=evaluation.get("bits_per_byte"),
        memory_gain=memory_gain(evaluation) if carries_memory else None,
        parameters=None if cost is None else cost.parameters,
        flops=None if cost is None else cost.flops,
        run_tokens_per_second=tokens / seconds if tokens and seconds else None,
        goodput=goodput,
        skipped_windows=len(skipped_windows(ledger)),
    )


def differing_settings(configs: Sequence[RunConfig]) -> dict[str, list[Any]]:
    """Return settings that differ -> their value in each run; the run's name does not count."""
    first, *others = map(to_tree, configs)
    keys = {key for other in others for key in differences(first, other)} - {"name"}
    return {key: [_value_at(tree, key) for tree in (first, *others)] for key in sorted(keys)}


def _value_at(tree: Any, key: str) -> Any:
    """Return the value of a setting; "-" if the tree has none, as in a mapping of free names."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return "-" if tree is None else tree
