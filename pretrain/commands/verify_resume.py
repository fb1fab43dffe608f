"""`pretrain verify-resume`: check, on the user's configuration, that a killed run resumes exactly.

It trains three times with real ranks. The first run trains to the end. In the second all ranks
SIGKILL themselves, a step after a checkpoint. The third resumes the second. Then it compares every
loss and every byte of the final states of the first and the third.

With `--resume-ranks` or `--resume-zero` the third has other ranks or another ZeRO stage, so
rounding differs: losses must agree to 1e-5 relative, weights, moments, EMA and memories to 1e-4 of
their L2 norm, counters and the lanes' cursors exactly.
"""

import argparse
import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from foundation.cli import add_experiment, check_least, check_output_directory
from foundation.errors import ConfigError, UserError
from foundation.settings import load_config
from pretrain.checkpoint.verify import latest_step
from pretrain.config.phases import runs_of_phases
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.processes.local_ranks import RankGroup, train_command
from pretrain.recovery.faults import SHORT_EVALUATION
from pretrain.recovery.faults import VARIABLE as FAULT_VARIABLE
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.text import counted

EXIT_DIFFERENT = 1
START_SECONDS = 600.0
KILLED = -9  # the status of a rank that was SIGKILLed
ELASTIC_TOLERANCE = 1e-5  # relative, of losses in fp32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags of `pretrain verify-resume`."""
    add_experiment(parser)
    add = parser.add_argument
    add("--ranks", type=int, default=2, help="number of ranks (default 2)")
    add("--steps", type=int, default=20, help="steps to train (default 20)")
    add("--kill-at", type=int, default=7, metavar="STEP", help="SIGKILL after STEP (default 7)")
    add("--resume-ranks", type=int, metavar="N", help="ranks when resuming (default: the same)")
    add("--resume-zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage when resuming")
    add("--work-dir", type=Path, help="keep the runs in DIR (default: a temporary directory)")


def run(arguments: argparse.Namespace) -> int:
    """Compare a killed and resumed run with an uninterrupted one; 0 if they agree, 1 if not."""
    check_least(arguments, 1, "ranks", "resume_ranks")
    if arguments.work_dir:
        check_output_directory("--work-dir", arguments.work_dir)
    if not 1 <= arguments.kill_at < arguments.steps:
        raise ConfigError(
            f"--kill-at={arguments.kill_at} must be at least 1 and below --steps={arguments.steps}"
        )
    config, other = (
        load_config(RunConfig, arguments.experiment, [*arguments.overrides, *settings])
        for settings in ((), zero_stage(arguments))
    )
    for ranks, trained in ((arguments.ranks, config), (_resume_ranks(arguments), other)):
        for phase in runs_of_phases(trained):
            accumulation_steps(phase, ranks)  # one error here instead of one from every rank
    if _is_elastic(arguments) and config.engine.number_format != "fp32":
        raise ConfigError(
            f"engine.precision={config.engine.precision}: with --resume-ranks or --resume-zero "
            f"losses must agree to {ELASTIC_TOLERANCE:g}; add engine.precision=fp32"
        )
    work = arguments.work_dir or Path(tempfile.mkdtemp(prefix="verify-resume-"))
    try:
        problems = train_and_compare(arguments, settings_of_check(arguments, config), work)
    finally:
        if arguments.work_dir is None:
            shutil.rmtree(work, ignore_errors=True)
    from pretrain.rundir.compare_runs import STATE_TOLERANCE, difference_lines

    if problems:
        print(f"different: {len(problems)} differences\n{difference_lines(problems)}")
        return EXIT_DIFFERENT
    if _is_elastic(arguments):
        print(
            f"agree: {arguments.steps} losses to {ELASTIC_TOLERANCE:g}; weights, moments, averages "
            f"and memories to {STATE_TOLERANCE:g} of their length; steps, tokens and lane cursors "
            "exactly"
        )
    else:
        print(
            f"identical: {arguments.steps} losses, weights, optimizer state, memories, cursors "
            "and random-number states"
        )
    return 0


def train_and_compare(
    arguments: argparse.Namespace, settings: Sequence[str], work: Path
) -> list[str]:
    """Return the differences between the uninterrupted run and the resumed one."""
    from pretrain.rundir.compare_runs import run_differences

    uninterrupted, killed = RunDir(work / "uninterrupted"), RunDir(work / "killed")
    for run_dir in (uninterrupted, killed):
        if run_dir.exists():
            raise ConfigError(f"{run_dir.path} exists; remove it or use another --work-dir")
    # Only states are compared, so the last evaluation may be short.
    short = f"{SHORT_EVALUATION}@{arguments.steps}"
    train = functools.partial(train_ranks, arguments.experiment, fault=short)
    _report(f"1/3 {arguments.steps} steps on {counted(arguments.ranks, 'rank')}, uninterrupted")
    train(settings, uninterrupted, arguments.ranks)
    _report(f"2/3 the same run, every rank SIGKILLed after step {arguments.kill_at}")
    train(settings, killed, arguments.ranks, fault=f"sigkill@{arguments.kill_at}")
    step = latest_step(killed.checkpoints)
    start = f"the checkpoint of step {step}" if step else "the start: no checkpoint yet"
    _report(f"3/3 resumed from {start}")
    train([*settings, *zero_stage(arguments)], killed, _resume_ranks(arguments))
    tolerance = ELASTIC_TOLERANCE if _is_elastic(arguments) else None
    return run_differences(uninterrupted, killed, arguments.steps, tolerance)


def train_ranks(
    config: Path, overrides: Sequence[str], run_dir: RunDir, ranks: int, *, fault: str = ""
) -> None:
    """Train on ranks of this machine to the end or, with the fault sigkill@N, to step N.

    If they exit in any other way, raise UserError with the last lines of the rank that failed.
    """
    command = train_command(config, run_dir.path, *overrides)
    environment = {FAULT_VARIABLE: fault}
    group = RankGroup(command, ranks, run_dir.logs, environment=environment, echo_rank_zero=True)
    with group:
        statuses = group.wait(timeout=START_SECONDS)
    failure = group.describe_failure(statuses)
    if fault.startswith("sigkill"):
        if KILLED not in statuses:
            raise UserError(f"no rank was killed: {failure or 'the run had already ended'}")
    elif any(statuses):
        raise UserError(failure)


def zero_stage(arguments: argparse.Namespace) -> list[str]:
    """Return the setting of the ZeRO stage when resuming, if it is another one."""
    return [] if arguments.resume_zero is None else [f"engine.zero_stage={arguments.resume_zero}"]


def _is_elastic(arguments: argparse.Namespace) -> bool:
    return arguments.resume_ranks is not None or arguments.resume_zero is not None


def _resume_ranks(arguments: argparse.Namespace) -> int:
    return arguments.ranks if arguments.resume_ranks is None else arguments.resume_ranks


def settings_of_check(arguments: argparse.Namespace, config: RunConfig) -> list[str]:
    """Return the user's settings, shortened to the check's steps; a cut warm-up keeps its slope."""
    schedule = config.optim.schedule
    warmup = min(schedule.warmup_steps, arguments.steps // 2)
    rate = config.optim.learning_rate * (warmup or 1) / (schedule.warmup_steps or 1)
    return [
        "evaluation.max_tokens=2000",
        *arguments.overrides,
        *(["engine.precision=fp32"] if _is_elastic(arguments) else []),  # auto may choose bf16
        f"optim.steps={arguments.steps}",
        f"optim.learning_rate={rate}",  # Adam turns rounding errors into updates of this size
        f"optim.schedule.warmup_steps={warmup}",
        f"optim.schedule.decay_steps={min(schedule.decay_steps, arguments.steps // 2)}",
        # The last checkpoint before the kill is one step older, so that a step is repeated.
        f"checkpoint.interval={max(1, arguments.kill_at - 1)}",
        "checkpoint.keep_last=3",
        # A blocking save writes the same bytes, which are on disk when the kill comes.
        "checkpoint.asynchronous=false",
        f"evaluation.interval={max(1, arguments.steps // 4)}",
        "metrics.tensorboard=false",
    ]


def _report(text: str) -> None:
    print(text, flush=True)
