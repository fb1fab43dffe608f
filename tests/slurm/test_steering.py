"""A job that is asked to save, evaluate and stop, and resumed with other settings."""

from __future__ import annotations

import sys

from pretrain.rundir.events import JobEndReason, SettingsChanged
from tests.slurm.lab import SlurmLab
from tests.slurm.runs import STEPS, Runs, SlurmRun, assert_status

SLOW = {"PRETRAIN_FAULT": "slow:0.05@1"}  # seconds of a forward pass: there is time to ask


def launcher(lab: SlurmLab, *command: str) -> str:
    """What the command prints."""
    result = lab.run(sys.executable, "-m", "launcher", *command)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_job_does_what_it_is_asked_and_is_resumed_with_another_rate(runs: Runs, lab: SlurmLab):
    far = ("checkpoint.interval=100000", "optim.schedule.shape=constant")
    run = runs.submit("steered", *far, environment=SLOW, options={"nodelist": "n1,n2"})
    path = str(run.dir.path)
    run.wait_for_step(3)

    assert f"asked {path} to save" in launcher(lab, "signal", path, "save")
    run.until(run.published)
    asked = run.published()
    launcher(lab, "signal", path, "evaluate")
    run.until(lambda: [line for line in run.dir.read_metrics() if line["kind"] == "evaluation"])
    assert (run.state(), run.published()) == ("RUNNING", asked)
    assert f"'launcher resume {path}' continues" in launcher(lab, "signal", path, "stop")
    run.wait_for_end(JobEndReason.STOP_REQUESTED)
    run.until(lambda: run.state() not in ("RUNNING", "COMPLETING"), seconds=60)
    assert run.state() != "PENDING", "it is requeued"
    assert run.published()[-1] > asked[-1], run.logs()
    assert_status(run, "stopped", step=run.last_step())

    stopped = run.last_step()
    rate = f"optim.learning_rate={1e-3 / 2}"
    refused = lab.run(sys.executable, "-m", "launcher", "resume", path, "--ranks=2")
    assert (refused.returncode, "'launcher submit --nodes N'" in refused.stderr) == (2, True)
    again = launcher(lab, "resume", path, rate, f"optim.steps={stopped + 20}")
    resumed = SlurmRun(lab, run.dir.path, job=again.split()[1])
    resumed.wait_until_finished()
    assert_status(resumed, "done", step=stopped + 20)
    (changed,) = resumed.events(SettingsChanged)
    assert changed.step == stopped
    rates = {
        line["step"]: line["learning_rate"]
        for line in run.dir.read_metrics()
        if line["kind"] == "train"
    }
    assert [*rates] == list(range(1, stopped + 21))
    assert rates[stopped + 1] == 5e-4 == rates[stopped + 20]
    assert rates[stopped] == run.dir.settings_at(stopped - 1).optim.learning_rate != 5e-4
    assert STEPS not in rates
