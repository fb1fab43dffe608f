"""What happens to runs on a real Slurm of four hosts, 2 hosts x 2 ranks; each has to end as the
undisturbed one did.

Runs that take their time (two minutes to a time limit, a watchdog's patience) are begun first and
looked at last. All is in one file, for one cluster to serve it; what needs another cluster comes
while they train.
"""

import re
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from pretrain.checkpoint.directory import steps_on_disk
from pretrain.rundir.events import (
    AttemptEnded,
    AttemptReason,
    JobEnded,
    JobEndReason,
    JobStarted,
    NextAction,
    Outcome,
    Submitted,
    TrainingBegan,
)
from tests.helpers.corpora import make_tiny_corpus
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import (
    FAR,
    INTERVAL,
    NEAR,
    STEPS,
    Runs,
    SlurmRun,
    assert_status,
    in_background,
    status,
)


@pytest.fixture(scope="module")
def limited(runs: Runs) -> SlurmRun:
    """A run whose jobs last two minutes.

    It makes some steps in each of the first two, then waits for the notice.
    """
    # On a busy machine starts may take longer than what is left to train in.
    run = runs.submit("limited", "--attempts-without-progress=9", time_limit="00:02:00", **FAR)

    def disturb() -> None:
        for number in (1, 2):
            run.wait_for_step(80 * number)
            with run.paused():
                run.until(lambda asked=number: run.log().count("asking the ranks") == asked)

    in_background(disturb)
    return run


@pytest.fixture(scope="module")
def crashing(runs: Runs, lab: SlurmLab) -> SlurmRun:
    """A run whose disk is full when its job starts, that then loses a rank, then rank 0 while it
    writes a checkpoint, then another rank there, then hangs.
    """
    # Files of the supervisor can have 3 KiB: its ledger fits, what it
    # writes to try the disk before an attempt does not.
    full_disk = {"setup": ["ulimit -S -f 3"], **FAR}
    run = runs.submit("crashing", "engine.watchdog_timeout_seconds=150", **full_disk)

    def disturb() -> None:
        run.until(lambda: run.events(JobStarted))
        time.sleep(5)
        (supervisor,) = lab.run("pgrep", "-f", f"launcher batch {run.dir.path} ").stdout.split()
        assert lab.run("prlimit", "--pid", supervisor, "--fsize=unlimited").returncode == 0
        run.wait_for_step(INTERVAL + 20)
        run.signal_rank(3, signal.SIGKILL)
        run.until(lambda: len(run.begun_at()) == 2)
        run.kill_while_saving()
        run.until(lambda: len(run.begun_at()) == 3)
        run.wait_for_step(run.begun_at()[-1] + 10)
        # On the same host: it would be left, were it not asked for by name.
        run.signal_rank(1, signal.SIGKILL)
        run.until(lambda: len(run.begun_at()) == 4)
        run.wait_for_step(2 * INTERVAL + 20)
        run.signal_rank(1, signal.SIGSTOP)

    in_background(disturb)
    return run


PATIENCE = 90  # of the watchdog of a run that is suspended for longer
SLOW_START = """import sys, time
if "train" in sys.orig_argv:
    time.sleep(45)
"""


@pytest.fixture(scope="module")
def suspended(runs: Runs, lab: SlurmLab) -> SlurmRun:
    """A run that an administrator suspends for longer than its watchdog waits."""
    settings = ("optim.steps=120", f"engine.watchdog_timeout_seconds={PATIENCE}")
    run = runs.submit("suspended", *settings, nodes="1", options={"nodelist": "n4"})

    def disturb() -> None:
        run.wait_for_step(20)
        lab.run("scontrol", "suspend", run.job)
        time.sleep(PATIENCE + 15)
        lab.run("scontrol", "resume", run.job)

    in_background(disturb)
    return run


@pytest.fixture(scope="module")
def futile(runs: Runs) -> SlurmRun:
    """A run whose time limit ends before its ranks have started."""
    slow = runs.path / "slow"
    slow.mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_START)
    return runs.submit(
        "futile",
        "--attempts-without-progress=2",
        nodes="1",
        time_limit="00:01:00",
        environment={"PYTHONPATH": str(slow)},
        options={"nodelist": "n4"},
    )


def test_a_second_job_on_the_same_run_is_refused(
    runs: Runs, lab: SlurmLab, reference_begun, limited, crashing, suspended, futile
):
    run = reference_begun
    run.until(lambda: run.events(JobStarted))
    assert_status(run, "running", job=run.job, attempts=1)
    second = runs.try_submit("reference")
    assert second.returncode == 2
    assert f"job {run.job} (running) " in second.stderr
    assert second.stderr.count("\n") == 1
    script = str(run.dir.path / "slurm" / "job.sbatch")
    by_hand = lab.run("sbatch", "--parsable", script).stdout.strip()
    run.wait_until_finished()
    assert run.ends() == [f"job {run.job} has the run", "finished"]
    assert f"job {run.job} (running) " in (run.dir.logs / f"slurm-{by_hand}.log").read_text()
    assert run.attempts() == [NextAction.FINISHED]
    assert_status(run, "done", attempts=1, checkpoint=STEPS, last_failure="")
    again = runs.try_submit("reference")
    assert again.returncode == 2
    assert f"step {STEPS}" in again.stderr
    # looked at in test_a_done_run_that_is_requeued...
    assert lab.run("scontrol", "requeue", run.job).returncode == 0


def test_jobs_that_could_not_say_how_they_ended_are_asked_for_in_accounting(limited, crashing):
    with SlurmLab(num_nodes=2, accounting=True) as lab:
        runs = Runs(lab, make_tiny_corpus(lab.path / "corpus"))
        requeued = runs.submit("requeued", nodes="1", options={"nodelist": "n1"})
        lost = runs.submit("lost", nodes="1", options={"nodelist": "n2", "no-requeue": ""})
        for run in (requeued, lost):
            run.wait_for_step(20)
        lab.power_off("n1")
        lab.power_off("n2")

        requeued.until(lambda: requeued.state() == "PENDING")
        # Accounting lags.
        requeued.until(lambda: status(requeued)["reason"].startswith("a node failed; "), seconds=20)
        assert status(requeued)["state"] == "requeued"
        lost.until(lambda: not lost.state(), seconds=60)
        assert status(lost)["state"] == "failed"
        assert status(lost)["reason"].startswith("a node failed ")

        lab.boot("n1")
        requeued.wait_until_finished()
        requeued.until(lambda: status(requeued)["state"] == "done", seconds=20)
        assert len([line for line in requeued.dir.read_metrics() if line["kind"] == "train"]) == 300


@pytest.mark.parametrize(
    ("cluster", "nodes", "words"),
    [
        ({"partition": "nowhere"}, "2", "'nowhere' is unknown here; this cluster has main, urgent"),
        ({}, "8", "does not divide over 16 ranks"),
        ({"ranks_per_node": 1}, "8", "8 nodes, partition 'main' has 4"),
        ({"cpus_per_rank": 5}, "2", "10 CPUs per node, partition 'main' has 8"),
        ({"options": {"account": "nobody", "constraint": "gold"}}, "2", "sbatch rejected"),
    ],
)
def test_what_the_cluster_can_not_give_gets_one_line(runs: Runs, cluster, nodes, words):
    result = runs.try_submit("refused", nodes=nodes, **cluster)
    assert result.returncode == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (runs.path / "refused").exists()


def test_a_written_cluster_file_is_one_that_slurm_accepts(runs: Runs, lab: SlurmLab):
    file, script = runs.path / "written.yaml", runs.path / "written.sh"
    assert lab.run(sys.executable, "-m", "launcher", "new-cluster", str(file)).returncode == 0
    submit = [sys.executable, "-m", "launcher", "submit", str(runs.experiment), "--nodes=2"]
    dry = lab.run(*submit, f"--cluster={file}", f"--run-dir={runs.path / 'dry'}", "--dry-run")
    assert " --partition=main\n" in dry.stdout
    script.write_text(dry.stdout)
    tested = lab.run("sbatch", "--test-only", "--chdir=/tmp", "--output=/tmp/none", str(script))
    assert tested.returncode == 0, tested.stderr


def test_a_lost_answer_gives_one_job_and_a_cancelled_one_stays_cancelled(runs: Runs, lab: SlurmLab):
    shim = lab.stop_controller_at_next_sbatch(seconds=9)
    command = runs.command("canceled", nodes="1", options={"nodelist": "n1"})
    process = lab.popen(*command, PATH=f"{shim}:/usr/bin:/bin")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 0, err
    assert "respond" in err
    run = SlurmRun(lab, runs.path / "canceled", job=out.split()[1])
    where = run.events(Submitted)[0].work_dir
    listed = lab.run("squeue", "-h", "-o", "%A %Z").stdout.splitlines()
    assert [line for line in listed if line.endswith(f" {where}")] == [f"{run.job} {where}"]
    run.wait_for_step(1)
    lab.run("scancel", run.job)
    run.until(lambda: run.state() == "CANCELLED")
    assert run.ends() == ["canceled"]
    assert f"'launcher resume {run.dir.path}'" in run.log()
    assert_status(run, "canceled", last_failure="")


def test_a_done_run_that_is_requeued_ends_at_once_with_status_0(lab: SlurmLab, reference: SlurmRun):
    def job() -> str:
        return lab.run("scontrol", "show", "job", reference.job).stdout

    reference.until(lambda: "Restarts=1" in job() and "JobState=COMPLETED" in job())
    assert "ExitCode=0:0" in job()
    assert "nothing to do" in reference.log()
    assert reference.begun_at() == [0]
    assert reference.ends()[-1:] == ["finished"]  # the ledger is as before: no time was lost
    assert len(reference.events(JobStarted)) == 2  # with the job that was submitted by hand


# A comment that names fields of a job.
TELLING = "group=nlp Requeue=0 Restarts=7 Reason=TimeLimit JobState=FAILED PreemptTime=None"


def preempt(run: SlurmRun) -> None:
    """Submit a job that takes the run's nodes for a moment."""
    urgent = ["sbatch", "-p", "urgent", "-N2", "-w", "n1,n2", "--exclusive", "-o", "/dev/null"]
    assert run.lab.run(*urgent, "--wrap", "sleep 1").returncode == 0


def test_preempted_and_robbed_of_a_slurmstepd_it_ends_undisturbed(runs, lab, reference):
    run = runs.submit("preempted", options={**NEAR["options"], "comment": TELLING})
    run.wait_for_step(90)
    with run.paused():
        preempt(run)
        run.until(lambda: "PreemptTime=20" in lab.run("scontrol", "show", "job", run.job).stdout)
    run.wait_for_end(JobEndReason.PREEMPTED)
    run.wait_for_step(180)
    assert run.ended_at(Outcome.STOPPED) == run.begun_at()[1:]  # no step again
    lab.run("scontrol", "update", "PartitionName=main", "PreemptMode=CANCEL", "GraceTime=0")
    preempt(run)
    run.wait_for_end(JobEndReason.PREEMPTED, count=2)
    lab.run("scontrol", "update", "PartitionName=main", "PreemptMode=REQUEUE", "GraceTime=30")
    run.wait_for_step(220)
    lab.run_on("n2", "pkill", "-9", "-f", rf"slurmstepd: .{run.job}\.[0-9]")
    run.until(lambda: run.ended_at(Outcome.FINISHED))
    assert_status(run, "done", reason=f"its job {run.job} still holds n1 n2")
    run.wait_until_finished()
    run.assert_same_as(reference)
    assert "srun still" in run.log()
    assert_status(run, "done", attempts=3, last_failure="", reason="")
    assert run.ends() == ["preempted", "preempted", "finished"]


def test_a_container_that_does_not_start_ends_the_run_and_blames_no_host(runs: Runs, lab: SlurmLab):
    run = runs.submit("container", container_image="/none.sif", **NEAR)
    run.until(lambda: run.state() == "FAILED")
    (reason,) = run.ends()
    assert "(n1, n2)" in reason
    assert_status(run, "failed", reason=reason)
    command = [sys.executable, "-m", "launcher", "logs", str(run.dir.path), "--errors"]
    first = lab.run(*command).stdout.splitlines()[0]
    assert first.startswith("[job] ")
    assert "apptainer: command not found" in first


def test_a_crash_loop_is_given_up_with_a_reason(runs: Runs, lab: SlurmLab):
    run = runs.submit(
        'it\'s "100%j" $HOME #1',  # what Slurm and bash give a meaning to
        "--attempts-without-progress=2",
        nodes="1",
        environment={"PRETRAIN_FAULT": "sigkill@1", "NOTE": "two 'words' \"$HOME\""},
        partition="main,urgent",
        options={"nodelist": "n1", "comment": "50%j \"of\" 'it'", "exclusive": None},
    )
    run.until(lambda: run.state() == "FAILED")
    assert run.attempts() == [NextAction.RETRY, NextAction.GIVE_UP]
    job = lab.run("scontrol", "show", "job", run.job).stdout
    assert f"WorkDir={run.dir.path / 'slurm' / 'code'}\n" in job
    assert "Comment=50%j \"of\" 'it'" in job
    assert "Partition=urgent" in job or "Partition=main" in job
    assert "attempt 0: 2 ranks" in run.log()
    reason = run.events(AttemptEnded)[-1].cause
    assert re.search("by SIGKILL; 2 .* 0$", reason)
    assert_status(run, "failed", reason=reason, last_failure=reason)


def test_a_host_that_does_not_start_ranks_is_left(runs: Runs, lab: SlurmLab, reference: SlurmRun):
    python = str(Path(sys.executable).resolve())
    lab.run_on("n2", "mount", "--bind", "/bin/false", python)
    run = runs.submit("broken")
    run.until(lambda: run.begun_at())
    lab.run_on("n2", "umount", python)
    run.wait_until_finished()
    run.assert_same_as(reference)
    assert run.attempts() == [NextAction.FINISHED]
    left = "n2 does not start the ranks' program"
    assert run.ends() == [left, "finished"]
    assert "n2" not in run.nodes()
    assert_status(run, "done", last_failure=left)


def test_a_host_that_does_not_see_the_run_is_named(runs: Runs, lab: SlurmLab):
    lab.run_on("n2", "mount", "-t", "tmpfs", "none", str(runs.path))
    run = runs.submit("unshared", "checkpoint.storage_patience_seconds=5", **NEAR)
    run.until(lambda: run.state() == "FAILED")
    lab.run_on("n2", "umount", str(runs.path))
    assert "n2 does not see the run directory" in run.log()
    assert "n2 does not see the run directory" in run.ends()[0]
    assert_status(run, "failed", reason=run.ends()[0])


def test_a_directory_that_vanishes_is_never_a_finished_run(runs, lab, reference):
    run = runs.submit("hidden", "checkpoint.storage_patience_seconds=5", **NEAR)
    run.wait_for_step(INTERVAL + 10)
    lab.run_on("n2", "mount", "-t", "tmpfs", "none", str(run.dir.path))
    run.until(lambda: run.events(JobEnded))
    assert JobEndReason.FINISHED not in [end.reason for end in run.events(JobEnded)]
    assert steps_on_disk(run.dir.checkpoints) == [INTERVAL]
    lab.run_on("n2", "umount", str(run.dir.path))
    run.wait_until_finished()  # the job was requeued, and waits for the directory
    run.assert_same_as(reference)


def test_a_run_of_one_or_two_hosts_goes_on_with_one(runs: Runs, lab: SlurmLab, reference: SlurmRun):
    run = runs.submit("elastic", nodes="1:2", options={"exclude": "n3,n4"})
    run.wait_for_step(INTERVAL + 20)
    assert [event.world_size for event in run.events(TrainingBegan)] == [4]
    lab.power_off("n2")
    run.wait_until_finished()
    lab.boot("n2")
    assert [event.world_size for event in run.events(TrainingBegan)] == [4, 2]
    assert_status(run, "done", ranks=2, last_failure="node n2 failed")
    lines, expected = (
        [line for line in each.dir.read_metrics() if line["kind"] == "train"]
        for each in (run, reference)
    )
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert [line["tokens"] for line in lines] == [line["tokens"] for line in expected]
    losses, others = ([line["loss"] for line in each] for each in (lines, expected))
    assert losses[:INTERVAL] == others[:INTERVAL]
    assert losses == pytest.approx(others, rel=1e-3)


def test_cut_in_three_by_its_time_limit_no_step_is_made_twice(limited, reference):
    limited.wait_until_finished()
    limited.assert_same_as(reference)
    assert_status(limited, "done", last_failure="")
    *cut, last = limited.ends()
    assert (set(cut), last) == ({"time limit near"}, "finished")
    assert len(cut) >= 2
    assert limited.begun_at() == [0, *limited.ended_at(Outcome.STOPPED)]


def test_killed_thrice_and_hanging_costs_steps_since_the_checkpoint(crashing: SlurmRun, reference):
    run = crashing
    run.wait_until_finished()
    run.assert_same_as(reference)
    killed, saving, again, hung, finished = run.events(AttemptEnded)
    for ended, rank in ((killed, 3), (saving, 0), (again, 1)):
        assert ended.cause.startswith(f"rank {rank} ")
        assert ended.statuses[rank] == -signal.SIGKILL
    assert hung.reason is AttemptReason.HANG
    assert finished.next is NextAction.FINISHED
    assert run.ends() == ["finished"]
    assert_status(run, "done", attempts=5, last_failure=hung.cause)
    assert run.begun_at() == [0, *(event.step for event in (killed, saving, again, hung))]
    logs = [(run.dir.logs / "attempt-3" / f"rank-{rank}.log").read_text() for rank in (0, 2, 3)]
    # the first to lose patience says so; the others lose their peer a moment later
    assert any("Timeout" in log for log in logs)
    assert all("in train" in log for log in logs)


def test_a_disk_that_is_full_when_the_job_starts_is_waited_for(crashing: SlurmRun):
    crashing.until(lambda: "works again after" in crashing.log())
    waits = "crashing: File too large; the run waits, and tries again for up to 30 min"
    assert waits in crashing.log()
    assert len(crashing.events(JobStarted)) == 1


def test_suspended_for_longer_than_the_watchdog_waits_it_goes_on(suspended: SlurmRun):
    suspended.wait_until_finished()
    trained = [line for line in suspended.dir.read_metrics() if line["kind"] == "train"]
    assert [line["step"] for line in trained] == list(range(1, 121))
    times = [line["time"] for line in trained]
    assert max(later - one for one, later in pairwise(times)) > PATIENCE
    assert suspended.begun_at() == [0]
    assert suspended.attempts() == [NextAction.FINISHED]
    assert "Timeout" not in suspended.logs()
    assert_status(suspended, "done", attempts=1, last_failure="")


def test_a_run_that_its_time_limit_lets_never_begin_stops_and_names_the_limit(futile: SlurmRun):
    futile.until(lambda: len(futile.ends()) == 2)
    cut, reason = futile.ends()
    assert cut == "time limit near"
    assert re.search("^2 starts .* 00:01:00; .*time_limit", reason)
    assert_status(futile, "failed", reason=reason)
