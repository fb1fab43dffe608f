"""What sites and people do to healthy runs: names, banners and limits changed, logs tidied, mounts
and nodes that stand still. No run may end of it, or be started twice."""

import shutil
import signal
import sys

import pytest

from pretrain.rundir.events import JobEndReason, NodesUnready, Outcome, Submitted
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import (
    FAR,
    INTERVAL,
    NEAR,
    Runs,
    SlurmRun,
    assert_status,
    in_background,
    status,
)

BANNER = """#!/bin/bash
echo "Welcome!
7|7|maintenance on Friday|24"
exec /usr/bin/$(basename "$0") "$@"
"""
SLOW_START = """import sys, time
if "train" in sys.orig_argv:
    time.sleep(45)
"""


@pytest.fixture(scope="module")
def shortened(runs: Runs, lab: SlurmLab) -> SlurmRun:
    """A run whose job an administrator lets run for a minute, in which its ranks start."""
    slow = runs.path / "slow-start"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_START)
    options = {"nodes": "1", "environment": {"PYTHONPATH": str(slow)}}
    options["options"] = {"nodelist": "n3"}
    run = runs.submit("shortened", "--attempts-without-progress=1", **options)
    assert lab.run("scontrol", "update", f"JobId={run.job}", "TimeLimit=1").returncode == 0
    return run


@pytest.fixture(scope="module")
def hung(runs: Runs, lab: SlurmLab) -> SlurmRun:
    """A run on whose second host no task gets further than its shell, until it is asked to stop."""
    hang = lab.path / "hang.sh"
    hang.write_text("#!/bin/sh\nexec sleep 900\n")
    hang.chmod(0o755)
    lab.run_on("n4", "mount", "--bind", str(hang), "/usr/bin/bash")
    run = runs.submit("hung", **FAR)

    def disturb() -> None:
        run.until(lambda: run.events(NodesUnready))
        lab.run("scancel", "-b", "--signal=USR1", run.job)
        run.wait_for_end(JobEndReason.TIME_LIMIT_NEAR)
        lab.run_on("n4", "umount", "-l", "/usr/bin/bash")

    in_background(disturb)
    return run


def test_a_run_outlasts_banners_new_names_tidied_logs_and_a_mount_that_is_away(
    runs: Runs, lab: SlurmLab, reference_begun, shortened, hung, request
):
    wrappers = lab.path / "wrappers"
    wrappers.mkdir()
    for name in ("sbatch", "squeue", "scontrol", "sinfo"):
        (wrappers / name).write_text(BANNER)
        (wrappers / name).chmod(0o755)
    submit = lab.popen(*runs.command("site", **NEAR), PATH=f"{wrappers}:/usr/bin:/bin")
    out, err = submit.communicate(timeout=100)
    assert submit.returncode == 0, err
    run = SlurmRun(lab, runs.path / "site", job=out.split()[1])
    assert [event.job for event in run.events(Submitted)] == [run.job]

    run.wait_for_step(20)
    rename = f"scontrol update JobId={run.job} JobName=x AdminComment=$'gepr\\xfcft'"
    assert lab.run("bash", "-c", rename).returncode == 0
    assert_status(run, "running", job=run.job)
    for command in (runs.command("site", **NEAR), [sys.executable, "-m", "launcher", "resume"]):
        where = [] if "submit" in command else [str(run.dir.path)]
        assert lab.run(*command, *where).returncode == 2, "its job lives"
    shutil.rmtree(run.dir.logs)

    run.wait_for_step(40)
    lab.run("scancel", "--signal=USR1", run.job)  # to its ranks
    run.wait_for_end(JobEndReason.STOP_REQUESTED)
    run.until(lambda: len(run.begun_at()) == 2)
    assert run.begun_at()[1:] == run.ended_at(Outcome.STOPPED)

    run.wait_for_step(INTERVAL + 20)
    lab.run_on("n2", "mount", "-t", "tmpfs", "none", str(run.dir.path))
    run.signal_rank(3, signal.SIGKILL)
    blind = {"n2": "does not see the run directory"}
    run.until(lambda: blind in [event.problems for event in run.events(NodesUnready)])
    assert_status(run, "running", reason="waiting: n2 does not see the run directory")
    lab.run_on("n2", "umount", "-l", str(run.dir.path))
    run.wait_until_finished()
    run.assert_same_as(request.getfixturevalue("reference"))
    assert run.ends() == ["asked to stop", "finished"]
    assert len(run.begun_at()) == 3


def test_a_host_that_hangs_before_an_attempt_is_named_and_keeps_no_stop_waiting(hung, reference):
    hung.wait_until_finished()
    hung.assert_same_as(reference)
    assert hung.events(NodesUnready)[0].problems == {"n4": "does not respond in 60 s"}
    assert hung.ends() == ["time limit near", "finished"]
    assert hung.begun_at() == [0]


def test_a_time_limit_that_somebody_shortened_is_not_blamed_on_the_cluster_file(shortened, lab):
    shortened.until(shortened.ends)
    (reason,) = shortened.ends()
    assert "the cluster file has 1:00:00: 'launcher resume' submits another job" in reason
    resume = [sys.executable, "-m", "launcher", "resume", str(shortened.dir.path)]
    again = lab.run(*resume)
    assert again.returncode == 0, again.stderr
    job = again.stdout.split()[1]
    limit = lab.run("squeue", "-h", "-j", job, "-o", "%l").stdout
    lab.run("scancel", job)
    assert limit == "1:00:00\n"
    shortened.until(lambda: status(shortened)["state"] == "canceled")
