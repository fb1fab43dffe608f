import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.cli import main
from pretrain.config.run import RunConfig
from pretrain.processes.local_ranks import describe_failure
from pretrain.rundir.attempt_files import AttemptFiles
from pretrain.rundir.events import NextAction
from pretrain.rundir.run_dir import RunDir
from tests.helpers.jobs import attempt_ended
from tests.helpers.memory_limit import memory_limit

TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 3, in step
    fail()
ValueError: no such lane
"""
STACKS = """Thread 0x00007f12 (most recent call first):
  File "y.py", line 9 in wait
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir.create(tmp_path / "run", RunConfig())
    for attempt, rank, text in (
        (2, 0, "of attempt 2\n"),
        (10, 0, "step 1\nstep 2\nstep 3\n"),
        (10, 1, f"step 1\n{TRACEBACK}step 2\n{STACKS}"),
    ):
        files = AttemptFiles(run_dir.logs, attempt)
        files.create()
        files.rank_log(rank).write_text(text)
    return run_dir


def test_the_newest_attempts_first_rank_is_shown_from_its_end(run_dir, capsys):
    assert main(["logs", str(run_dir.path), "--lines=2"]) == 0
    assert capsys.readouterr().out == "step 2\nstep 3\n"
    assert main(["logs", str(run_dir.path), "--lines=0", "--rank=1"]) == 0
    assert capsys.readouterr().out == f"step 1\n{TRACEBACK}step 2\n{STACKS}"
    assert main(["logs", str(run_dir.path), "--attempt=2"]) == 0
    assert capsys.readouterr().out == "of attempt 2\n"


def test_errors_are_shown_with_their_tracebacks_for_all_ranks_and_the_job(run_dir, capsys):
    canceled = "slurmstepd: error: *** STEP 17.0 CANCELLED ***"
    (run_dir.logs / "slurm-17.log").write_text(f"attempt 10\n{canceled}\n")
    assert main(["logs", str(run_dir.path), "--errors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"[job] {canceled}"
    assert lines[1:] == [f"[rank 1] {line}" for line in (TRACEBACK + STACKS).splitlines()]
    assert main(["logs", str(run_dir.path), "--errors", "--rank=0", "--lines=1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_rank_that_failed_first_is_shown_first_then_srun_and_the_job(run_dir, capsys):
    (run_dir.logs / "attempt-10/rank-0.log").write_text("ConnectionError: peer gone\n")
    (run_dir.logs / "attempt-10/srun.log").write_text("srun: error: n1: task 1: Exited\n")
    (run_dir.logs / "slurm-17.log").write_text("slurmstepd: error: killed\n")
    run_dir.ledger.append(attempt_ended(attempt_number=10))
    assert main(["logs", str(run_dir.path), "--errors"]) == 0
    marks = [line.split("]")[0][1:] for line in capsys.readouterr().out.splitlines()]
    assert list(dict.fromkeys(marks)) == ["rank 1", "srun", "job", "rank 0"]


def test_a_container_that_does_not_start_is_an_error_without_any_rank(run_dir, capsys):
    (run_dir.logs / "attempt-10/rank-1.log").write_text("fine\n")
    assert main(["logs", str(run_dir.path), "--errors"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    AttemptFiles(run_dir.logs, 11).create()
    failed = "slurmstepd: error: pyxis: couldn't start container\n"
    (run_dir.logs / "attempt-11/srun.log").write_text(f"srun --nodes=2 python\n{failed}")
    assert main(["logs", str(run_dir.path), "--errors"]) == 0
    assert capsys.readouterr().out == f"[srun] {failed}"
    assert main(["logs", str(run_dir.path)]) == 2
    assert "attempt 11 " in capsys.readouterr().err


def test_what_the_batch_script_says_before_its_supervisor_starts_is_shown(run_dir, capsys):
    log = run_dir.logs / "slurm-17.log"
    said = "/spool/script: line 9: module: command not found\n"
    log.write_text(said)
    assert main(["logs", str(run_dir.path), "--errors"]) == 0
    assert f"[job] {said}" in capsys.readouterr().out
    log.write_text("licence refused\n")
    (run_dir.logs / "attempt-10/rank-1.log").write_text("fine\n")
    run_dir.ledger.append(attempt_ended(NextAction.GIVE_UP, attempt_number=10))
    assert main(["logs", str(run_dir.path), "--errors"]) == 0
    assert capsys.readouterr().out == "[job] licence refused\n"


def test_the_last_collectives_of_ranks_that_hung_are_named(run_dir, capsys):
    (run_dir.logs / "attempt-10/rank-1.log").write_text("fine\n")
    for name in ("10/gloo-rank-0", "10/nccl-rank-1", "10/nccl-rank-12", "2/gloo-rank-0"):
        (run_dir.logs / f"attempt-{name}").touch()
    assert main(["logs", str(run_dir.path), "--errors"]) == 0
    gloo, nccl = capsys.readouterr().out.splitlines()
    assert re.search(rf"^\[collectives\] .* rank 0 .*{run_dir.logs}/attempt-10/gloo-rank", gloo)
    command = f"torchfrtrace --prefix nccl-rank- -j {run_dir.logs}/attempt-10"
    assert re.search(rf"^\[collectives\] .* 2 ranks .*{command}$", nccl)


def test_a_log_of_any_size_and_line_is_shown_and_nobody_is_told_to_remove_it(run_dir, capsys):
    log = run_dir.logs / "attempt-10/rank-1.log"
    with open(log, "wb") as file:
        file.write(b"x" * (5 << 20) + b"\nRuntimeError: lost\n" + b"Thread 0x" * 500_000 + b"\n")
        file.truncate(20 << 30)  # a hole
        file.seek(0, os.SEEK_END)
        file.write(b"\nstep 7\nstep 8\n")
    with memory_limit(1 << 30):
        assert main(["logs", str(run_dir.path), "--rank=1", "--lines=2"]) == 0
        assert capsys.readouterr().out == "step 7\nstep 8\n"
        assert main(["logs", str(run_dir.path), "--rank=1", "--errors"]) == 0
        assert "[rank 1] RuntimeError: lost\n" in capsys.readouterr().out
        said = describe_failure([0, -9], AttemptFiles(run_dir.logs, 10).rank_logs(2))
    assert said.endswith("  | step 7\n  | step 8")
    assert len(said) < 5000, "it goes to the terminal"


LINES = {
    "error: data.lanes=8 does not divide over 3 ranks": True,
    "RuntimeError: connection closed": True,
    "torch.OutOfMemoryError: CUDA out of memory": True,
    "ERROR 12:04:31 supervisor: no attempt is left": True,
    "WARNING 12:04:31 rank 3: one error: retrying": False,
    "INFO 12:04:31 rank 0: step 17/100  loss 4.2  grad 0.9": False,
    "a document about errors": False,
}


def test_lines_of_an_error_are_told_from_others_without_torchs_marks(run_dir, capsys):
    marked = "".join(f"[rank3]: {line}\n" for line in TRACEBACK.splitlines())
    (run_dir.logs / "attempt-10/rank-1.log").write_text("\n".join([*LINES, marked, "step 2"]))
    assert main(["logs", str(run_dir.path), "--errors", "--rank=1"]) == 0
    errors = [line for line, tells in LINES.items() if tells] + TRACEBACK.splitlines()
    assert capsys.readouterr().out.splitlines() == [f"[rank 1] {line}" for line in errors]


def test_following_prints_what_comes_goes_over_to_the_next_attempt_and_ends_with_the_run(run_dir):
    code = (
        "from pretrain.rundir.run_dir import RunDir; from pathlib import Path\n"
        f"with RunDir(Path({str(run_dir.path)!r})).locked('launcher'):\n"
        "    print('held', flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    holder = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    command = [sys.executable, "-um", "launcher", "logs", str(run_dir.path), "--follow"]
    follower = subprocess.Popen([*command, "--lines=1"], stdout=subprocess.PIPE, text=True)
    assert follower.stdout is not None
    assert follower.stdout.readline() == "step 3\n"
    with open(run_dir.logs / "attempt-10/rank-0.log", "a") as file:
        file.write("step 4\n")
    assert follower.stdout.readline() == "step 4\n"
    AttemptFiles(run_dir.logs, 11).create()
    (run_dir.logs / "attempt-11/rank-1.log").touch()  # the others may begin before
    time.sleep(0.5)
    (run_dir.logs / "attempt-11/rank-0.log").write_text("step 5\n")
    assert follower.stdout.readline() == "--- attempt 11\n"
    assert follower.stdout.readline() == "step 5\n"
    run_dir.ledger.append(attempt_ended(NextAction.GIVE_UP, without_progress=3))
    holder.communicate(b"\n")
    output, _ = follower.communicate()
    assert "failed" in output
    assert follower.returncode == 0


@pytest.mark.parametrize("trap", ["pipe", "hole"])
@pytest.mark.parametrize("name", ["attempt-10/rank-0.log", "attempt-10/srun.log", "slurm-17.log"])
def test_a_pipe_or_holes_of_40_gib_in_place_of_a_log_are_not_read(run_dir, capsys, name, trap):
    (run_dir.logs / name).unlink(missing_ok=True)
    if trap == "pipe":
        os.mkfifo(run_dir.logs / name)
    else:
        with open(run_dir.logs / name, "w") as log:
            log.truncate(40 << 30)
    for arguments in ([] if "rank" in name else ["--errors"], ["--errors"]):
        with memory_limit(1 << 30):
            assert main(["logs", str(run_dir.path), *arguments]) == (2 if trap == "pipe" else 0)
        error = capsys.readouterr().err
        assert (name in error) == (trap == "pipe")
        assert len(error.splitlines()) == (trap == "pipe")


def test_escape_sequences_in_logs_are_shown_as_text(run_dir, capsys):
    log = run_dir.logs / "attempt-10/rank-0.log"
    log.write_text("error: \x1b]0;title\x07\x9b31m\tred\n")
    for arguments in ([], ["--errors", "--rank=0"]):
        assert main(["logs", str(run_dir.path), *arguments]) == 0
        assert "\\x1b]0;title\\x07\\x9b31m\tred\n" in capsys.readouterr().out


def test_a_run_without_logs_says_how_it_stands(tmp_path, capsys):
    RunDir.create(tmp_path / "run", RunConfig())
    assert main(["logs", str(tmp_path / "run")]) == 2
    assert "new" in capsys.readouterr().err
