"""A run on this machine, under the supervisor."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from foundation.settings import load_config
from launcher.restart_policy import RestartPolicy
from launcher.stop_signals import HOLDER, StopSignals
from launcher.supervisor import Supervisor, is_done_already
from pretrain.config.resolve import with_absolute_paths, with_vocabulary
from pretrain.config.run import RunConfig, accumulation_steps
from pretrain.processes.local_ranks import RankGroup, train_command
from pretrain.rundir.ownership import refuse_foreign_run
from pretrain.rundir.run_dir import RunDir
from pretrain.terminal.text import counted

_log = logging.getLogger(__name__)


def train_here(
    experiment: Path,
    path: Path | None = None,
    num_ranks: int = 1,
    overrides: Sequence[str] = (),
    policy: RestartPolicy = RestartPolicy(),  # noqa: B008  (frozen)
    from_step: int | None = None,
    forecast: Path | None = None,
) -> int:
    """Train in this directory, by default runs/NAME, until the run is finished.

    Returns 0 then, 75 if stopped on request, 2 if the run was refused or given up.
    """
    config = load_config(RunConfig, experiment, overrides)
    accumulation_steps(config, num_ranks)  # ConfigError before anything starts
    path, stop = path or Path("runs") / config.name, StopSignals()
    run_dir = RunDir(path, stop.retry(config.checkpoint.storage_patience_seconds))
    command = train_command(experiment, run_dir.path, *overrides)
    existed = run_dir.path.exists()
    refuse_foreign_run(run_dir.path)
    # Before any rank starts: a refused run must leave no failed attempt in the ledger.
    if is_done_already(run_dir, with_absolute_paths(config), from_step, overrides):
        _log.info("%s is done; give it more optim.steps, or name=NEW for another run", run_dir.path)
        return 0
    # ConfigError for a corpus that is absent, again before any rank starts.
    known = with_vocabulary(config)
    if run_dir.exists():
        from pretrain.rundir.trained_data import refuse_other_data  # loads numpy

        refuse_other_data(run_dir, with_absolute_paths(config))
    try:
        with stop, run_dir.locked(HOLDER):
            if from_step is not None:
                run_dir.ask_to_resume_from(from_step)
            if forecast:
                run_dir.sign_forecast(forecast, known)
            start = starter(command, num_ranks, run_dir)
            return Supervisor(run_dir, start, policy, stop).run()
    finally:
        if not existed and not run_dir.exists():
            run_dir.remove_unused()


def starter(command: Sequence[str], num_ranks: int, run_dir: RunDir) -> Callable[[int], RankGroup]:
    """Return the function that starts attempts of `command`; rank 0's output is repeated here."""

    def start(number: int) -> RankGroup:
        ranks = RankGroup(command, num_ranks, run_dir.logs, number, echo_rank_zero=True)
        pids = " ".join(map(str, ranks.pids))
        _log.info("attempt %d: %s, processes %s", number, counted(num_ranks, "rank"), pids)
        return ranks

    return start
