"""`launcher local` with real ranks: finished, out of memory, killed, stopped by Ctrl-C, refused."""

import ipaddress
import os
import re
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from safetensors.torch import load_file

from launcher.cli import main
from launcher.run_state import read_state
from pretrain.cli import main as pretrain
from pretrain.costs.device_memory import checkpoint_bytes
from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.compare_runs import differing_losses
from pretrain.rundir.events import AttemptEnded, OutOfMemory
from pretrain.rundir.exit_statuses import EXIT_STOPPED
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.forked_ranks import run_ranks
from tests.helpers.full_disk import full_disk
from tests.helpers.jobs import until

RANKS = 2
STEPS = 120
INTERVAL = 30


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


def launch(experiment: Path, run_dir: Path, *more: str, **variables: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "launcher", "local", str(experiment), f"--ranks={RANKS}"]
    return subprocess.Popen(
        [*command, f"--run-dir={run_dir}", *more],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
    )


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
    command = ["train", str(experiment), f"--run-dir={run_dir.path}", "engine.micro_batch_lanes=2"]
    run_ranks(RANKS, partial(pretrain, command), run_dir.path.parent)
    return run_dir


class Launched:
    """A launcher and what it has said so far."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.said = ""

    def until(self, pattern: str) -> re.Match[str]:
        """Read up to a line that matches."""
        assert self.process.stdout is not None
        while not (match := re.search(pattern, line := self.process.stdout.readline())):
            self.said += line
            assert self.process.poll() is None or line, self.said
        self.said += line
        return match

    def stop_a_rank(self, attempt: int, run_dir: RunDir, after: int) -> list[int]:
        """Stop rank 1 of this attempt after a step; the process ids of its ranks."""
        pids = [*map(int, self.until(rf"attempt {attempt}: .* processes (.*)")[1].split())]
        until(lambda: last_measured(run_dir) > after)
        os.kill(pids[1], signal.SIGSTOP)  # else the run may be over before it is looked at
        return pids

    def end(self, status: int) -> str:
        """Everything that it said; it ends with this status."""
        self.said += self.process.communicate()[0]
        assert self.process.returncode == status, self.said
        return self.said


def test_attempts_lost_in_four_ways_change_no_loss(experiment, undisturbed, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    first = Launched(launch(experiment, run_dir.path, **{VARIABLE: "oom:2@1"}))
    pids = first.stop_a_rank(1, run_dir, after=INTERVAL)
    assert {address for pid in pids for address in listening_addresses(pid)} == {"127.0.0.1"}
    running = read_state(run_dir.path)
    assert (running.state, running.attempts, running.ranks) == ("running", 2, RANKS)
    # Files of the supervisor cannot grow: the same as a full disk.
    limits = resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE, (0, limits[1]))
    os.kill(pids[1], signal.SIGKILL)
    first.until("ledger.jsonl: File too large; ")
    resource.prlimit(first.process.pid, resource.RLIMIT_FSIZE, limits)

    pids = first.stop_a_rank(2, run_dir, after=2 * INTERVAL)
    first.process.send_signal(signal.SIGINT)
    first.until("asking the ranks to save and stop")
    os.kill(pids[1], signal.SIGCONT)
    said = first.end(EXIT_STOPPED)
    saved = last_measured(run_dir)
    assert f" step {saved}; " in said.splitlines()[-1]
    stopped = read_state(run_dir.path)
    assert (stopped.state, stopped.checkpoint) == ("stopped", saved)
    assert "rank 1 " in stopped.last_failure

    with full_disk(8192):  # also for what is started here: no rank is, because it could not write
        second = Launched(launch(experiment, run_dir.path))
    second.until("File too large; ")
    second.process.send_signal(signal.SIGINT)
    said = second.end(EXIT_STOPPED)
    assert f" step {saved}; " in said.splitlines()[-1]

    assert main(["resume", str(run_dir.path)]) == 0
    assert not differing_losses(undisturbed, run_dir)
    steps = [line["step"] for line in run_dir.read_metrics() if line["kind"] == "train"]
    assert steps == list(range(1, STEPS + 1))
    events = run_dir.ledger.read()
    (lacking,) = find_events(events, OutOfMemory)
    assert (lacking.rank, lacking.micro_batch_lanes) == (1, 4)
    ended = find_events(events, AttemptEnded)
    assert ended[0].first_failure == 1
    reasons = [each.reason.value for each in ended]
    assert reasons == ["out_of_memory", "rank_failed", "stop_requested", "finished"]
    done = read_state(run_dir.path)
    assert (done.state, done.attempts, done.step, done.checkpoint) == ("done", 4, STEPS, STEPS)
    assert done.time_spent is not None
    assert 0 < done.time_spent.goodput < 1


def test_what_the_user_must_change_is_tried_once_and_leaves_nothing(experiment, tmp_path, capfd):
    run_dir = tmp_path / "run"
    assert main(["local", str(experiment), f"--run-dir={run_dir}", "data.path=nowhere"]) == 2
    output = capfd.readouterr().err
    assert re.search(r"^error: .* no corpus at \S+/nowhere ", output.splitlines()[-1])
    assert "Traceback" not in output
    assert "attempt " not in output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("overrides", "status", "message"),
    [((), 0, "is done"), (["data.lanes=2"], 2, "data.lanes: 8 -> 2")],
    ids=["the same settings", "other settings"],
)
def test_a_done_run_stays_done(experiment, undisturbed, caplog, capsys, overrides, status, message):
    before = undisturbed.ledger.path.read_bytes()
    caplog.set_level("INFO")
    run_dir = str(undisturbed.path)
    assert main(["local", str(experiment), "--run-dir", run_dir, *overrides]) == status
    assert message in caplog.text + capsys.readouterr().err
    assert undisturbed.ledger.path.read_bytes() == before
    assert read_state(undisturbed.path).state == "done"


@pytest.mark.parametrize("overrides", [[], ["optim.clip_norm=0.5"], ["checkpoint.keep_last=5"]])
def test_resuming_a_done_run_asks_for_more_steps(undisturbed, capsys, overrides):
    before = undisturbed.ledger.path.read_bytes()
    assert main(["resume", str(undisturbed.path), *overrides]) == 2
    assert f"is done after step {STEPS}; to train further, give it" in capsys.readouterr().err
    assert undisturbed.ledger.path.read_bytes() == before


def test_a_second_launcher_on_the_same_run_is_refused(experiment, tmp_path, capsys):
    with RunDir(tmp_path / "run").locked("launcher"):
        assert main(["local", str(experiment), f"--run-dir={tmp_path / 'run'}"]) == 2
    assert f"process {os.getpid()} (launcher)" in capsys.readouterr().err


def test_the_checkpoint_holds_as_many_bytes_as_describe_promises(undisturbed):
    run = undisturbed.config
    held = 0
    for path in (undisturbed.checkpoints / f"step-{STEPS:08d}").glob("*.safetensors"):
        tensors = load_file(path)
        held += sum(tensors[key].nbytes for key in tensors if not key.startswith("random."))
    assert held == checkpoint_bytes(run)
