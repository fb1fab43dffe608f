"""Tasks of lm-eval, EleutherAI's evaluation harness, on a trained model.

lm-eval is an extra; it is imported when tasks run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from data_pipeline.errors import ConfigError, DataError
from data_pipeline.yaml_files import YAML_SUFFIXES
from pretrain.evaluation.task_names import check_tasks, silence_libraries
from pretrain.weights.trained_model import TrainedModel


def run_tasks(
    trained: TrainedModel,
    tasks: Sequence[str],
    *,
    limit: int = 0,
    few_shot: int | None = None,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Return the metrics of every task and group: `acc,none`, `acc_stderr,none`, ...

    A task is a name of lm-eval's or a YAML file, whose data may be local files. `limit` is how many
    examples of a task are used (0: all); `options` are those of `TrainedLM`.
    """
    check_tasks(tasks)
    silence_libraries()
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager

        from pretrain.evaluation.harness_model import TrainedLM
    except ImportError as error:
        raise ConfigError(
            f"--tasks needs lm-eval ({error}); `pip install 'xl-pretrain[lm-eval]'`"
        ) from None
    files = [task for task in tasks if task.endswith(YAML_SUFFIXES)]
    # The index of lm-eval's own tasks takes seconds.
    manager = TaskManager(include_defaults=len(files) < len(tasks))
    # The decorator that registers the class hides its arguments.
    model = TrainedLM(trained, **options)  # pyright: ignore[reportCallIssue]
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where it prints what it is doing
            found = simple_evaluate(
                model,
                tasks=list(tasks),
                task_manager=manager,
                limit=limit or None,
                num_fewshot=few_shot,
                log_samples=False,
            )
    except (KeyError, ValueError, OSError) as error:  # of tasks and their data, of many kinds
        reason = " ".join(str(error).split())
        raise DataError(f"lm-eval could not run {', '.join(tasks)}: {reason[:500]}") from error
    assert found is not None  # on the only rank
    return {task: dict(metrics) for task, metrics in found.get("results", {}).items()}


def task_rows(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return the rows of a table, heads first."""
    rows = [("task", "metric", "filter", "value", "standard error")]
    for task, metrics in results.items():
        for key, value in metrics.items():
            name, _, chosen = key.partition(",")
            if chosen and not name.endswith("_stderr"):
                error = metrics.get(f"{name}_stderr,{chosen}")
                rows.append((task, name, chosen, _shown(value), _shown(error)))
    return rows


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "-"
