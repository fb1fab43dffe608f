import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.errors import ConfigError
from launcher.slurm.lost_nodes import FirstNodeGuard, JobNodes, replaced_nodes, use_up_old_numbers
from launcher.slurm.sbatch import Snapshot
from launcher.slurm.srun import (
    BLIND,
    RankEnd,
    RankEnds,
    Step,
    ended_from_outside,
    failed_nodes,
    first_failure,
    probe_answers,
    probe_nodes,
    srun_command,
)
from pretrain.config.cluster import ClusterConfig
from pretrain.rundir.events import (
    JobEnded,
    JobEndReason,
    JobStarted,
    NodeReplaced,
    ReplacedBecause,
    SupervisorKilled,
)
from pretrain.rundir.exit_statuses import EXIT_SITE_FAILED, EXIT_STOPPED, NEVER_STARTED
from pretrain.rundir.lock import StaleAttempt
from tests.helpers.jobs import THIS_JOB, fake_commands, until

STEP = Step(nodes=("n1", "n2"), ranks=4, cluster=ClusterConfig(ranks_per_node=2, cpus_per_rank=3))


def test_where_a_node_failed_its_first_rank_is_the_one_that_failed():
    log = "srun: error: Node failure on n2\nsrun: error: n1: tasks 0-1: Killed\n"
    assert STEP.first_rank_of(failed_nodes(log)) == 2
    assert STEP.first_rank_of(["n9"]) is None


def test_a_node_on_which_the_launch_failed_is_the_one_that_failed_and_not_one_that_was_killed():
    """What srun 22.05 wrote when it launched a step on a node that had died a second before."""
    log = """\
srun: error: Task launch for StepId=1.3 failed on node n2: Communication connection failure
srun: error: Application launch failed: Communication connection failure
srun: Job step aborted: Waiting up to 7 seconds for job step to finish.
0: slurmstepd-n1: error: *** STEP 1.3 ON n1 CANCELLED AT 2026-11-23T14:42:43 ***
srun: error: n1: tasks 0-1: Killed
srun: launch/slurm: _step_signal: Terminating StepId=1.3
"""
    assert failed_nodes(log) == ["n2"]
    assert STEP.first_rank_of(failed_nodes(log)) == 2
    assert first_failure({}, 4, log) == 0, "srun's other line, which blames the healthy node"


def in_container(image: str, **settings) -> list[str]:
    image_and_mounts = {"container_image": image, "container_mounts": ("/data",)}
    cluster = ClusterConfig(gpus_per_node="2", **image_and_mounts, **settings)
    step = replace(STEP, cluster=cluster)
    return srun_command(step, ["-m", "launcher.slurm.task"], [Path("/runs/a")], Path("/code"))


def test_pyxis_gets_the_image_and_sees_run_and_data():
    command = in_container("/images/x.sqsh")
    assert "--container-image=/images/x.sqsh" in command
    assert "--container-mounts=/runs/a:/runs/a,/data:/data" in command
    assert "--container-workdir=/code" in command
    assert command[-3:] == ["python3", "-m", "launcher.slurm.task"]


def test_apptainer_runs_the_task_inside_the_image():
    command = in_container("/images/x.sif")
    begin = command.index("apptainer")
    binds = ["--nv", "--bind=/runs/a", "--bind=/data", "--pwd=/code"]
    task = ["/images/x.sif", "python3", "-m", "launcher.slurm.task"]
    assert command[begin:] == ["apptainer", "exec", *binds, *task]


def test_options_of_srun_reach_the_ranks_and_those_that_the_launcher_sets_are_refused():
    options = {"cpu-bind": "none", "no-container-mount-home": None}
    command = in_container("/images/x.sqsh", srun_options=options)
    assert command[-5:-3] == ["--cpu-bind=none", "--no-container-mount-home"]
    for flag in command[1:-5]:
        name = flag.removeprefix("--").partition("=")[0]
        with pytest.raises(ConfigError, match=rf"srun_options\.{name} "):
            in_container("/images/x.sqsh", srun_options={name: "1"})
    with pytest.raises(ConfigError, match=r"srun_options: .*'c'"):
        in_container("/images/x.sqsh", srun_options={"c": "2"})


TASK = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
TASK |= {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}


def run_task(log: str, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launcher.slurm.task", log, "-c", code]
    return subprocess.run(command, env={**os.environ, **TASK}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(75)", 75), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_a_task_writes_down_how_its_trainer_ended(tmp_path, code, status):
    result = run_task(str(tmp_path / "rank-{rank}.log"), code)
    assert result.returncode == (0 if status == 0 else 1)
    assert json.loads((tmp_path / "rank-3.status").read_text()) == status


def test_a_task_s_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("mine\n")
    (tmp_path / "rank-3.log").symlink_to("precious")
    result = run_task(str(tmp_path / "rank-{rank}.log"), "print('ours')")
    assert result.returncode == 2
    assert f"error: {tmp_path}/rank-3.log " in result.stderr
    assert result.stderr.count("\n") == 1
    assert (tmp_path / "precious").read_text() == "mine\n"


@contextlib.contextmanager
def waiting_task(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The task of a rank that has exited with status 75, and cannot write that."""
    command = [sys.executable, "-m", "launcher.slurm.task", str(tmp_path / "r{rank}.log")]
    full = (0, resource.RLIM_INFINITY)
    with subprocess.Popen(
        [*command, "-c", "import sys; sys.exit(75)"],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, full),
        env={**os.environ, **TASK}, stderr=subprocess.PIPE, text=True,
    ) as task:  # fmt: skip
        assert task.stderr is not None
        status = tmp_path / "r3.status"
        assert f"{status}: " in task.stderr.readline()
        assert not status.exists()
        yield task


def test_a_rank_s_exit_status_is_whole_or_absent_and_outlasts_a_full_disk(tmp_path):
    with waiting_task(tmp_path) as task:
        room = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        resource.prlimit(task.pid, resource.RLIMIT_FSIZE, room)
        task.wait()
    assert (tmp_path / "r3.status").read_text() == "75"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_a_request_to_stop_ends_the_wait_to_write_an_exit_status(tmp_path, number):
    with waiting_task(tmp_path) as task:
        began = time.monotonic()
        task.send_signal(number)
        _, said = task.communicate()
    assert task.returncode == 1
    assert time.monotonic() - began < 60
    assert re.search("^error: rank 3 .* 75.*\n$", said)


def test_a_rank_without_status_was_killed_and_one_without_log_never_started(tmp_path: Path):
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(3)]
    for log in logs[:2]:
        log.touch()
    logs[0].with_suffix(".status").write_text("75")
    (tmp_path / "srun.log").touch()
    ends = RankEnds(logs)
    ends.read_rest()
    assert ends.statuses() == [EXIT_STOPPED, -9, NEVER_STARTED]
    shutil.rmtree(tmp_path)  # somebody tidies: what is missing tells nothing any more
    assert ends.statuses() == [EXIT_STOPPED, -9, -9]
    ends.read_listed()
    ends.read_rest()
    assert ends.statuses() == [EXIT_STOPPED, -9, -9]
    assert RankEnds(logs).statuses() == [EXIT_SITE_FAILED] * 3


def test_new_status_files_are_found_while_the_other_ranks_run(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("launcher.slurm.srun._LISTING_SECONDS", 0.0)
    monkeypatch.setattr("launcher.slurm.srun._SECONDS_AFTER_ALL", 0.0)
    logs = [tmp_path / f"rank-{rank}.log" for rank in range(2)]
    ends = RankEnds(logs)
    assert not ends.are_overdue()
    logs[1].with_suffix(".status").write_text("-9")
    assert not ends.are_overdue()
    assert ends.by_rank.keys() == {1}
    logs[0].with_suffix(".status").write_text("")  # not whole yet
    ends.read_listed()
    assert ends.by_rank.keys() == {1}
    logs[0].with_suffix(".status").write_text("1")
    until(ends.are_overdue)
    assert {rank: end.status for rank, end in ends.by_rank.items()} == {0: 1, 1: -9}


SAID = "Welcome!\nxl|n1|begun|lx\nxl|n2|begun|lx\nxl|n1|sees|lx\nsrun: error: n2: task 1\n"


@pytest.mark.parametrize(
    ("said", "problems"),
    [
        (SAID + "xl|n1|starts|lx\nxl|n2|starts|lx", {}),
        (SAID, {"n1": "does not start the ranks' program", "n2": BLIND}),
        ("xl|n1|beg", {"n1": "does not respond", "n2": "does not respond"}),
        (
            "srun: error: Task launch for StepId=1.3 failed on node n2: Communication connection "
            "failure",
            {"n2": "does not respond"},
        ),
        ("srun: error: Step limit reached", None),
        ("srun: error: Requested node configuration is not available", None),
    ],
)
def test_a_probe_tells_how_far_each_node_has_come(said, problems):
    probe = probe_answers(STEP.nodes, said)
    assert probe.needs_new_start is (problems is None)
    assert problems is None or probe.problems == problems


def test_a_probe_runs_the_tasks_own_program_and_names_who_hangs(tmp_path, monkeypatch):
    """n2 stands still as soon as it looks at the run directory."""
    hangs = "if [ $SLURMD_NODENAME = n2 ]; then test() { sleep 60; }; export -f test; fi"
    srun = f"""while [ $1 != bash ]; do shift; done
    for node in n1 n2; do export SLURMD_NODENAME=$node; {hangs}; "$@" & done; wait"""
    fake_commands(tmp_path, monkeypatch, srun=srun)
    monkeypatch.setattr("launcher.slurm.srun._PROBE_SECONDS", 12.0)
    Snapshot(tmp_path).take_code("")
    monkeypatch.setattr("launcher.slurm.srun.code_that_runs", lambda: Snapshot(tmp_path).code)
    began = time.monotonic()
    asked = []
    probe = probe_nodes(STEP, tmp_path, lambda: asked.append(time.monotonic() - began))
    assert probe.problems == {"n2": f"{BLIND} in 12 s"}
    assert len(asked) > 10

    def stop() -> None:
        if time.monotonic() > began + 13:
            raise StaleAttempt("a newer attempt")

    began = time.monotonic() - 12
    with pytest.raises(StaleAttempt):
        probe_nodes(STEP, tmp_path, stop)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_the_whole_step_lets_the_trainer_save_and_stop(tmp_path, number):
    """As `scancel --signal` sends it, to the task and to what it started."""
    trainer = "import signal, sys, time; signal.signal(12, lambda *_: sys.exit(75)); "
    trainer += f"open({str(tmp_path / 'up')!r}, 'w').close(); time.sleep(300)"
    command = [sys.executable, "-m", "launcher.slurm.task", str(tmp_path / "r{rank}.log")]
    with subprocess.Popen(
        [*command, "-c", trainer], env={**os.environ, **TASK}, start_new_session=True
    ) as task:
        until((tmp_path / "up").exists)
        os.killpg(task.pid, number)
    assert (tmp_path / "r3.status").read_text() == "75"


def test_an_exit_status_is_written_although_somebody_tidied_the_logs(tmp_path):
    log = tmp_path / "logs" / "attempt-0" / "rank-{rank}.log"
    log.parent.mkdir(parents=True)
    code = f"import shutil; shutil.rmtree({str(tmp_path / 'logs')!r})"
    assert run_task(str(log), code).returncode == 0
    assert (log.parent / "rank-3.status").read_text() == "0"


EXITED = "srun: error: {}: Exited with exit code 1\n"


@pytest.mark.parametrize(
    ("statuses", "ended", "log", "rank"),
    [
        ([1, -9, 1, 1], {0: 2.0, 1: 3.0, 2: 1.0, 3: 4.0}, "", 1),
        ([-9, -9, 1, 1], {2: 2.0, 3: 1.0}, "", 3),
        ([1, 2, -9], {0: 1.0, 1: 3.0, 2: 2.0}, "", 1),  # it knows what is wrong
        ([75, 0, 1, 0], {0: 1.0, 1: 1.0, 2: 2.0, 3: 1.0}, "", 2),
        ([-9, -9, -9, -9], {}, f"srun: job 3\n{EXITED.format('n2: tasks 2-3')}", 2),
        ([-15, -15, -9, -9], {0: 1.0, 1: 1.0}, EXITED.format("n2: tasks 2-3"), 2),
        ([-9, -9, -9, -9], {}, "", None),
        ([75, 75], {0: 1.0, 1: 1.0}, EXITED.format("n1: tasks 0-1"), None),
        ([0, 0, 0, 0], {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0}, "", None),
    ],
)
def test_the_rank_that_failed_first_hand_is_found(statuses, ended, log, rank):
    ends = {each: RankEnd(statuses[each], when) for each, when in ended.items()}
    assert first_failure(ends, len(statuses), log) == rank


STEP_ABORTED = "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
STEP_CANCELED = "0: slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT T ***\n"
TASK_KILLED = "srun: error: n1: task 0: Killed\n"
TERMINATING = "srun: launch/slurm: _step_signal: Terminating StepId=1.0\n"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        # SIGTERM, SIGHUP or SIGQUIT to srun.
        (["srun: forcing job termination\n", STEP_CANCELED, STEP_ABORTED, TASK_KILLED], True),
        (["srun: Quit\nsrun: forcing job termination\n", STEP_ABORTED, TASK_KILLED], True),
        ([STEP_ABORTED, STEP_CANCELED, TASK_KILLED, TERMINATING], True),  # scancel JOB.STEP
        ([TASK_KILLED, TERMINATING, "srun: Force Terminated StepId=1.0\n"], False),
        ([TASK_KILLED, TERMINATING, STEP_ABORTED, STEP_CANCELED], False),
        (["0: srun: forcing job termination\n", TASK_KILLED], False),  # a rank prints it
        ([], False),
    ],
)
def test_an_srun_that_was_asked_to_end_says_so_before_any_task_ends(lines, expected):
    assert ended_from_outside("".join(lines)) is expected


THREE = JobNodes(("n1", "n2"), ("n3",))


def test_the_first_spare_node_takes_the_place_of_the_lost_one_and_the_others_keep_theirs():
    for lost, left in {"n1": ("n3", "n2"), "n2": ("n1", "n3"), "n3": ("n1", "n2")}.items():
        assert THREE.without(lost) == JobNodes(left)
    without_spare = JobNodes(("n1", "n2"))
    assert without_spare.without("n1") is None
    assert without_spare.without("n3") == without_spare  # it did not train


def test_a_supervisor_after_one_that_was_killed_leaves_out_the_nodes_replaced_in_this_start():
    def started(restart: int) -> JobStarted:
        return JobStarted(job="7", restart=restart, nodes=("n1", "n2", "n3"), step=0)

    def replaced(node: str, job: str = "7") -> NodeReplaced:
        reason = ReplacedBecause.RANKS_FAILED
        return NodeReplaced(job=job, node=node, spare="n3", reason=reason)

    job = replace(THIS_JOB, restart=1)
    killed = SupervisorKilled(job="7", restart=1, step_before=0, step=0)
    former = [started(0), replaced("n1")]
    assert replaced_nodes([*former, started(1)], job) == []
    ledger = [*former, started(1), replaced("n2"), replaced("n1", job="8"), killed, started(1)]
    assert replaced_nodes(ledger, job) == ["n2"]


SRUN = 'echo "$@" >> "$0.started"; exec sleep 60'


def test_the_guard_of_the_first_node_starts_again_elsewhere_when_it_ends(tmp_path, monkeypatch):
    fake_commands(tmp_path, monkeypatch, srun=SRUN)
    started = tmp_path / "srun.started"
    started.touch()
    job = replace(THIS_JOB, nodes=("n1", "n2", "n3"))
    with FirstNodeGuard(job) as guard:
        for nodes, expected in ((job.nodes, ["n3"]), (("n1", "n2"), ["n3", "n2"])):
            guard.ensure_running(nodes)
            guard.ensure_running(job.nodes)
            until(lambda all=expected: len(started.read_text().splitlines()) == len(all))
            lines = started.read_text().splitlines()
            assert all(f"--nodelist={n} " in line for n, line in zip(expected, lines, strict=True))
            assert guard._srun is not None
            guard._srun.kill()
            guard._srun.wait()
        guard.ensure_running(["n1"])
    assert len(started.read_text().splitlines()) == 2, "none on the first node itself"


def test_empty_steps_are_awaited_and_end_with_what_slurms_news_raise(tmp_path, monkeypatch):
    fake_commands(tmp_path, monkeypatch, srun=SRUN.replace("$@", "$$ $@"))
    started = tmp_path / "srun.started"
    started.touch()

    def stale() -> None:
        if len(started.read_text().splitlines()) == 24:
            raise StaleAttempt("a newer attempt")

    job = replace(THIS_JOB, restart=1)
    lost = JobEnded(job="7", restart=0, reason=JobEndReason.FIRST_NODE_LOST, requeued=True)
    ledger = [JobStarted(job="7", restart=n, nodes=job.nodes, step=0) for n in range(2)]
    with pytest.raises(StaleAttempt):
        use_up_old_numbers([ledger[0], lost, ledger[1]], job, stale)
    options = "--nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=n1 --overlap --export=ALL"
    for line in started.read_text().splitlines():
        pid, *rest = line.split()
        assert rest == [*options.split(), "--chdir=/", "--quiet", "true"]
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
