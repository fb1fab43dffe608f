"""Tasks of lm-eval, EleutherAI's evaluation harness, on a trained model.

lm-eval is an extra; it is imported when tasks run.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
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
    bootstrap_iters: int = 100_000,
    runs_code: bool = False,
    **options: Any,
) -> dict[str, dict[str, Any]]:
    """Return the metrics of every task and group: `acc,none`, `acc_stderr,none`, ...

    A task is a name of lm-eval's or a YAML file, whose data may be local files. `limit` is how many
    examples of a task are used (0: all); `bootstrap_iters` are for standard errors (0: none);
    `options` are those of `TrainedLM`. Unless it `runs_code`, `!function` in a file is a DataError.
    """
    simple_evaluate, manager = _harness(tasks)
    from pretrain.evaluation.harness_model import TrainedLM

    # The decorator that registers the class hides its arguments.
    model = TrainedLM(trained, **options)  # pyright: ignore[reportCallIssue]
    with _one_line("run", tasks), _functions(runs_code):
        found = simple_evaluate(
            model,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit or None,
            num_fewshot=few_shot,
            log_samples=False,
            bootstrap_iters=bootstrap_iters,
        )
    assert found is not None  # on the only rank
    return {task: dict(metrics) for task, metrics in found.get("results", {}).items()}


def load_tasks(tasks: Sequence[str]) -> None:
    """Load tasks and their data; ConfigError or DataError if that fails, also for `!function`."""
    _, manager = _harness(tasks)
    with _one_line("load", tasks), _functions(are_run=False):
        manager.load(list(tasks))


def _harness(tasks: Sequence[str]) -> tuple[Any, Any]:
    """Return lm-eval's `simple_evaluate` and a manager that finds the tasks."""
    check_tasks(tasks)
    silence_libraries()
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ConfigError(
            f"tasks need lm-eval ({error}); `pip install 'xl-pretrain[lm-eval]'`"
        ) from None
    files = [task for task in tasks if task.endswith(YAML_SUFFIXES)]
    return simple_evaluate, _manager(TaskManager, include_defaults=len(files) < len(tasks))


@functools.cache  # the index of lm-eval's own tasks takes seconds, in every evaluation of a run
def _manager(kind: Any, include_defaults: bool) -> Any:
    return kind(include_defaults=include_defaults)


@contextlib.contextmanager
def _functions(are_run: bool) -> Iterator[None]:
    """Whether lm-eval imports what `!function` names in files that are not its own."""
    from lm_eval.tasks import _yaml_loader

    load, own = _yaml_loader._import_func_in_yml, Path(_yaml_loader.__file__).parent

    def load_trusted(name: str, folder: Path) -> Any:
        if are_run or folder.is_relative_to(own):
            return load(name, folder)
        raise ValueError(
            f"found !function {name}, which runs code; read it, then give --run-task-code to "
            "`pretrain evaluate`"
        )

    _yaml_loader._import_func_in_yml = load_trusted
    try:
        yield
    finally:
        _yaml_loader._import_func_in_yml = load


@contextlib.contextmanager
def _one_line(what: str, tasks: Sequence[str]) -> Iterator[None]:
    """Turn what goes wrong with tasks and their data, which is of many kinds, into a DataError."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # where it prints what it is doing
            yield
    except (KeyError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise DataError(f"lm-eval could not {what} {', '.join(tasks)}: {reason[:500]}") from error


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
