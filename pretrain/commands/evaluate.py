"""`pretrain evaluate`: losses on a split, context lengths, probes and tasks."""

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from data_pipeline.config import MOST_ROWS
from data_pipeline.corpora.manifest import SPLITS
from foundation.cli import Answer, add_json, check_least, check_output_directory
from foundation.errors import ConfigError, print_error
from foundation.sizes import size_of
from pretrain.config.evaluation_sets import evaluated_split
from pretrain.config.model import Precision, ProbeName, RopeExtension
from pretrain.distributed.slurm_variables import rank_numbers
from pretrain.processes.leaving import leave_group
from pretrain.rundir.run_paths import run_path
from pretrain.terminal.text import fitted_table

if TYPE_CHECKING:
    from pretrain.commands.evaluation_outputs import EvaluationOutput

# What is measured besides losses -> the flags that go only with it, and their defaults.
OWN_FLAGS: dict[str, dict[str, Any]] = {
    "context_length": {"longest_context": 1000},
    "tasks": {"limit": None, "few_shot": None, "run_task_code": False},
    "probe": {"trials": 64, "longest_distance": 0, "output": None},
}
# Flags with which losses are other numbers than those of a run's report.
OTHER_NUMBERS = (
    "memory_length", "segment_length", "clamp", "rope_extension", "same_length", "data", "ema",
    "context_length", "probe",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain evaluate`."""
    add, tokens = parser.add_argument, size_of("tokens")
    add("runs", type=run_path, nargs="+", metavar="RUN", help="run, RUN@STEP, or export")
    add("--follow", action="store_true", help="score each kept checkpoint until the run has ended")
    add("--data", type=Path, help="corpus or its URL (default: the run's; an export needs one)")
    add("--split", default="validation", help="split of the corpus (default %(default)s)")
    add("--memory-length", type=tokens, nargs="+", metavar="N", help="a result for each N tokens")
    add("--segment-length", type=tokens, default=0, metavar="N", help="default: as in training")
    add("--clamp", type=int, metavar="N", help="encode distances above N as N; 0: no limit")
    add("--rope-extension", choices=get_args(RopeExtension), help="stretch rope to longer memory")
    add("--same-length", action="store_true", help="let all tokens see equally many keys")
    add("--lanes", type=int, default=0, metavar="N", help="streams at a time (default: the run's)")
    add("--max-tokens", type=tokens, default=0, metavar="N", help="score N tokens (default: all)")
    add("--precision", choices=get_args(Precision), help="default: the run's; on a CPU fp32")
    add("--ema", action="store_true", help="use the weight EMA, if the run has one")
    add_json(parser)
    measure = parser.add_mutually_exclusive_group().add_argument
    measure("--context-length", action="store_true", help="relative effective context lengths")
    measure("--tasks", nargs="+", metavar="TASK", help="tasks of lm-eval: names, or YAML files")
    measure("--probe", nargs="+", choices=get_args(ProbeName), metavar="PROBE", help="test memory")
    add = parser.add_argument_group("with --tasks").add_argument
    add("--limit", type=int, metavar="N", help="use N examples of each task (default: all)")
    add("--run-task-code", action="store_true", help="let YAML files run the code of `!function`")
    add("--few-shot", type=int, metavar="N", help="solved examples before each (default: task's)")
    add = parser.add_argument_group("with --context-length").add_argument
    add("--longest-context", type=tokens, metavar="N", help="20 contexts up to N (default 1000)")
    add = parser.add_argument_group("with --probe").add_argument
    add("--trials", type=int, metavar="N", help="needles and copies per distance (default 64)")
    add("--longest-distance", type=tokens, metavar="N", help="default: twice what one layer sees")
    add("--output", type=Path, metavar="DIR", help="folder of probes.json (default: the run's)")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run(arguments: argparse.Namespace) -> int | Answer:
    """Return a table for each run, or on ranks above 0 the exit status."""
    _check(arguments)
    from pretrain.commands.evaluation_outputs import outputs_of  # late: torch takes seconds

    outputs: list[EvaluationOutput] = []

    def measure() -> int:
        outputs.extend(outputs_of(arguments))
        return 0

    status = leave_group(measure, rank_numbers(os.environ)[1], report=print_error)
    if not outputs:
        return status
    values = [output.values for output in outputs]
    texts = [f"{output.title}\n\n{fitted_table(output.rows)}" for output in outputs]
    return Answer("\n\n".join(texts), values[0] if len(values) == 1 else values)


def _check(arguments: argparse.Namespace) -> None:
    """Set defaults; ConfigError for bad numbers and for flags that would have no effect."""
    memory_lengths = arguments.memory_length or []
    changed = [name for name in OTHER_NUMBERS if getattr(arguments, name) not in (None, False, 0)]
    if arguments.follow and (changed or len(arguments.runs) > 1):
        flag = _flag(changed[0]) if changed else f"{len(arguments.runs)} runs"
        raise ConfigError(f"--follow scores one run as its report does: found {flag}")
    data = arguments.data and Path(os.path.abspath(arguments.data))
    if data and data.name in SPLITS and evaluated_split(data) == data:  # DIR/SPLIT
        if arguments.split not in ("validation", data.name):
            raise ConfigError(f"--data={arguments.data} and --split={arguments.split} contradict")
        arguments.data, arguments.split = data.parent, data.name
    if arguments.split != "validation":
        changed.append("split")
    arguments.is_curve = not changed and (len(arguments.runs) > 1 or arguments.follow)
    for kind, flags in OWN_FLAGS.items():
        for name, default in flags.items():
            value = getattr(arguments, name)
            if value is None or value is False:
                setattr(arguments, name, default)
            elif not getattr(arguments, kind):
                raise ConfigError(f"{_flag(name)} requires {_flag(kind)}")
        if getattr(arguments, kind) and len(memory_lengths) > 1:
            raise ConfigError(f"{_flag(kind)} takes one --memory-length; run it once for each")
    check_least(arguments, 0, "memory_length", "segment_length", "lanes", "max_tokens", "clamp")
    check_least(arguments, 0, "limit", "few_shot")
    check_least(arguments, 1, "trials")
    if arguments.longest_distance > MOST_ROWS:
        raise ConfigError(
            f"--longest-distance={arguments.longest_distance} must be at most {MOST_ROWS:,}"
        )
    if arguments.output:
        check_output_directory("--output", arguments.output)
    check_least(arguments, 2, "longest_context")
    if arguments.tasks and arguments.max_tokens:
        raise ConfigError("--max-tokens has no effect on --tasks; use --limit")
    if arguments.tasks:
        from pretrain.evaluation.task_names import check_tasks

        arguments.tasks = [name for names in arguments.tasks for name in names.split(",") if name]
        check_tasks(arguments.tasks)
    if arguments.same_length and 0 in memory_lengths:
        raise ConfigError(
            "--same-length needs a --memory-length above 0, the number of keys each token sees"
        )
