"""`launcher local` with real ranks: finished, killed and restarted, hopeless, refused, stopped by
Ctrl-C.
"""

from __future__ import annotations

import ipaddress
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from launcher.cli import main
from launcher.run_state import read_state
from pretrain.commands.same_run import differing_losses
from pretrain.costs.memory import checkpoint_bytes
from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.events import Slowdown
from pretrain.rundir.exit_status import EXIT_STOPPED
from pretrain.rundir.run_dir import RunDir
from tests.helpers.full_disk import full_disk

RANKS = 2
STEPS = 240
INTERVAL = 60


@pytest.fixture(scope="module")
def experiment(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("local") / "tiny.yaml"
    path.write_text(
        f"""name: tiny
model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 16, dropout: 0.1}}
data: {{path: {tiny_corpus}, lanes: 8, segment_length: 8}}
optim: {{steps: {STEPS}}}
engine: {{kind: torch}}
checkpoint: {{interval: {INTERVAL}}}
evaluation: {{interval: 0, max_tokens: 500}}
metrics: {{interval: 1}}
"""
    )
    return path


def launch(
    experiment: Path, run_dir: Path, *more: str, ranks: int = RANKS, **variables: str
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launcher", "local", str(experiment), f"--ranks={ranks}"]
    return subprocess.Popen(
        [*command, f"--run-dir={run_dir}", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
    )


def until(condition: Callable[[], bool], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def last_measured(run_dir: RunDir) -> int:
    return max((line["step"] for line in run_dir.read_metrics()), default=0)


def listening_addresses(pid: int) -> list[str]:
    """On which addresses a process waits for TCP connections."""
    links = Path(f"/proc/{pid}/fd").iterdir()
    sockets = {os.readlink(link) for link in links if link.is_symlink()}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    own = [fields for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets]
    hosts = [bytes.fromhex(fields[1].partition(":")[0])[::-1] for fields in own]
    return [str(ipaddress.ip_address(host)) for host in hosts]


@pytest.fixture(scope="module")
def undisturbed(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    run_dir = RunDir(tmp_path_factory.mktemp("undisturbed") / "run")
    process = launch(experiment, run_dir.path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    return run_dir


def test_a_killed_rank_costs_an_attempt_also_on_a_full_disk_and_no_loss_changes(
    experiment, undisturbed, tmp_path
):
    run_dir = RunDir(tmp_path / "run")
    process = launch(experiment, run_dir.path)
    assert process.stdout is not None
    first = process.stdout.readline()
    pids = [int(pid) for pid in re.findall(r"\d+", first.partition("processes")[2])]
    assert len(pids) == RANKS, first
    until(lambda: last_measured(run_dir) > INTERVAL)
    os.kill(pids[1], signal.SIGSTOP)  # else the run may be over before it is looked at
    assert {address for pid in pids for address in listening_addresses(pid)} == {"127.0.0.1"}
    running = read_state(run_dir.path)
    assert (running.state, running.attempts, running.ranks) == ("running", 1, RANKS)
    # Files of the supervisor cannot grow: the same as a full disk.
    limits = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    os.kill(pids[1], signal.SIGKILL)
    said = process.stdout.readline()
    while "ledger.jsonl: File too large; the run waits" not in said:
        assert process.poll() is None, said
        said += process.stdout.readline()
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
    output = said + process.communicate()[0]
    assert process.returncode == 0, output
    assert "rank 1 was killed by SIGKILL" in output
    assert not differing_losses(undisturbed, run_dir)
    assert [line["step"] for line in run_dir.read_metrics() if line["kind"] == "train"] == list(
        range(1, STEPS + 1)
    )
    busy = (Slowdown,)  # of a machine that others use, too
    events = [each.name() for each in run_dir.ledger.read() if not isinstance(each, busy)]
    assert events == [
        "training_began",
        "attempt_ended",
        "training_began",
        "training_ended",
        "attempt_ended",
    ]
    done = read_state(run_dir.path)
    assert (done.state, done.attempts, done.step, done.checkpoint) == ("done", 2, STEPS, STEPS)
    assert done.last_failure == "rank 1 was killed by SIGKILL"
    spent = done.time_spent
    assert spent is not None
    assert 0 < spent.goodput < 1


def test_a_crash_loop_without_progress_is_given_up_with_its_reason(experiment, tmp_path):
    twice = "--attempts-without-progress=2"
    process = launch(experiment, tmp_path / "run", twice, ranks=1, **{VARIABLE: "sigkill@5"})
    output, _ = process.communicate()
    assert process.returncode == 2
    reason = (
        r"gave up: rank 0 was killed by SIGKILL; "
        r"2 attempts in a row brought no checkpoint beyond step 0"
    )
    assert re.search(reason, output), output
    assert output.count("attempt 0: ") == output.count("attempt 1: ") == 1
    assert "attempt 2: " not in output


def test_what_the_user_must_change_is_not_tried_again_and_leaves_nothing(experiment, tmp_path):
    process = launch(experiment, tmp_path / "run", "data.path=nowhere", ranks=1)
    output, _ = process.communicate()
    assert process.returncode == 2
    assert re.search(
        r"ERROR \S+ supervisor: not restarted: rank \d: \S+/nowhere/train does not exist",
        output.splitlines()[-1],
    )
    assert "Traceback" not in output
    assert "attempt 1: " not in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "status", "message"),
    [((), 0, "is done"), (["data.lanes=2"], 2, "data.lanes: 8 -> 2")],
    ids=["the same settings", "other settings"],
)
def test_a_run_that_is_done_stays_done(
    experiment, undisturbed, caplog, capsys, overrides, status, message
):
    before = undisturbed.ledger.path.read_bytes()
    caplog.set_level("INFO")
    run_dir = str(undisturbed.path)
    assert main(["local", str(experiment), "--run-dir", run_dir, *overrides]) == status
    assert message in caplog.text + capsys.readouterr().err
    assert undisturbed.ledger.path.read_bytes() == before
    assert read_state(undisturbed.path).state == "done"


def test_ctrl_c_saves_and_resume_goes_on(experiment, undisturbed, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    process = launch(experiment, run_dir.path)
    until(lambda: last_measured(run_dir) >= 3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == EXIT_STOPPED, output
    stopped_after = last_measured(run_dir)
    assert f"step {stopped_after}; rerun the same command to resume from there" in output
    stopped = read_state(run_dir.path)
    assert (stopped.state, stopped.checkpoint) == ("stopped", stopped_after)
    with full_disk(8192):  # also for what is started here: no rank is, because it could not write
        process = launch(experiment, run_dir.path)
    assert process.stdout is not None
    while "File too large; the run waits" not in (said := process.stdout.readline()):
        assert process.poll() is None, said
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == EXIT_STOPPED, output
    assert output.endswith(f"step {stopped_after}; rerun the same command to resume from there\n")
    second = subprocess.run([sys.executable, "-m", "launcher", "resume", str(run_dir.path)])
    assert second.returncode == 0
    assert not differing_losses(undisturbed, run_dir)


def test_a_second_launcher_on_the_same_run_is_refused(experiment, tmp_path, capsys):
    with RunDir(tmp_path / "run").locked("launcher"):
        assert main(["local", str(experiment), f"--run-dir={tmp_path / 'run'}"]) == 2
    assert "is in use by process" in capsys.readouterr().err


def test_the_checkpoint_holds_as_many_bytes_as_describe_promises(undisturbed):
    run = undisturbed.config
    files = list((undisturbed.checkpoints / f"step-{STEPS:08d}").glob("*.safetensors"))
    tensors = {}
    for path in files:
        with safe_open(path, "pt") as file:
            tensors |= {(path.name, name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    held = sum(
        tensor.nbytes for (_, key), tensor in tensors.items() if not key.startswith("random.")
    )
    assert held == checkpoint_bytes(run)
