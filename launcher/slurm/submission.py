"""Submits the job of a run to Slurm, only once even if an answer of Slurm is lost."""

from collections.abc import Sequence
from pathlib import Path

from foundation.errors import ConfigError
from foundation.files import make_directory, read_text
from foundation.settings import load_config
from launcher.slurm.client import Slurm
from launcher.slurm.sbatch import (
    Job,
    Snapshot,
    check_references,
    check_request,
    is_script_of,
    own_work_dirs,
    render,
    replaced_snapshot,
)
from pretrain.config.cluster import load_cluster
from pretrain.config.resolve import with_absolute_paths, with_vocabulary
from pretrain.config.run import RunConfig
from pretrain.rundir.events import Submitted
from pretrain.rundir.history import last_event
from pretrain.rundir.run_dir import RunDir


def submit(
    job: Job, config: RunConfig, from_step: int | None = None, forecast: Path | None = None
) -> str:
    """Save what the job runs, submit it once, record it in the ledger; return the job's id."""
    run_dir, script, slurm = RunDir(job.run_dir), render(job), Slurm()
    check_request(job.cluster, job.nodes, slurm.retry_unreachable(slurm.partitions))
    existed = run_dir.path.exists()
    try:
        with run_dir.locked("submit"):
            refuse_live_job(slurm, run_dir)
            if forecast:
                run_dir.sign_forecast(forecast, with_vocabulary(config))
            with replaced_snapshot(run_dir) as snapshot:
                snapshot.take_settings(config, job.cluster)
                snapshot.take_code(script)
                submitted = _submitted(slurm, run_dir, job.name, from_step)
            run_dir.ledger.append(submitted)
            return submitted.job
    except ConfigError:
        if not existed:
            run_dir.remove_unused()
        raise


def _submitted(slurm: Slurm, run_dir: RunDir, name: str, from_step: int | None) -> Submitted:
    """Return the event of the run's job, which is in the queue now."""
    snapshot = Snapshot(run_dir.path)
    if from_step is not None:
        run_dir.ask_to_resume_from(from_step)
    number, work_dir = slurm.submit(snapshot.script, str(snapshot.code))
    return Submitted(job=number, job_name=name, work_dir=work_dir)


def refuse_live_job(slurm: Slurm, run_dir: RunDir) -> None:
    """Raise ConfigError while a live job has the run, even if it is ending. That job works in the
    run's code, or is the last one submitted, which the site may run in another directory."""
    ledger = run_dir.ledger.read()
    last, own = last_event(ledger, Submitted), own_work_dirs(run_dir.path, ledger)
    live = slurm.live_jobs(own[0])
    live += [job for job in slurm.jobs([last.job] if last else []) if job.is_live]
    for job in live:
        if job.work_dir in own:
            raise ConfigError(
                f"job {job.id} ({job.state.lower()}) has the run {run_dir.path} already; "
                f"wait for it, or end it: launcher cancel {run_dir.path}"
            )


def submit_again(
    run_dir: RunDir, before: Submitted | None, from_step: int | None, overrides: Sequence[str] = ()
) -> Submitted:
    """Submit the run's script again, with its first code and settings except for `overrides`."""
    if before is None:
        raise ConfigError(f"{run_dir.path} was never submitted; use 'launcher submit'")
    snapshot = Snapshot(run_dir.path)
    script, config = snapshot.script, load_config(RunConfig, snapshot.experiment, overrides)
    if not is_script_of(read_text(script), run_dir.path):
        raise ConfigError(
            f"{script} was written for another run directory, so this one was moved or copied; "
            "submit it again: launcher submit EXPERIMENT --cluster CLUSTER "
            f"--run-dir {run_dir.path}"
        )
    if overrides and run_dir.exists():
        from pretrain.rundir.trained_data import refuse_other_data  # loads numpy

        refuse_other_data(run_dir, with_absolute_paths(config))
    cluster, slurm = load_cluster(snapshot.cluster), Slurm()
    check_references(cluster)
    with run_dir.locked("submit"):
        refuse_live_job(slurm, run_dir)
        snapshot.take_settings(config, cluster)
        make_directory(run_dir.logs)  # Slurm starts no job that cannot write its log
        submitted = _submitted(slurm, run_dir, before.job_name, from_step)
        run_dir.ledger.append(submitted)
    return submitted
