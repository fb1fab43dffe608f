"""The process that keeps a supervisor running, with children that stand for one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from launcher.slurm import batch_process

# Dies as its lines say, one per life: a signal's number kills it, "exit N" ends it.
CHILD = """
import os, signal, sys
from pathlib import Path
lives = Path(sys.argv[1]).read_text().splitlines()
Path(sys.argv[1]).write_text("\\n".join(lives[1:]))
if lives[0].startswith("exit"):
    sys.exit(int(lives[0].split()[1]))
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
os.kill(os.getpid(), int(lives[0]))
"""
# Has its handlers late, as a supervisor that imports its modules first.
LATE = """
import signal, sys, time
print("alive", flush=True)
time.sleep(0.5)
received = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, _: received.append(number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGUSR1))
print(*sorted(received), flush=True)
"""
PARENT = """
import sys
from launcher.slurm.batch_process import BatchProcess
sys.exit(BatchProcess(sys.argv[1:]).run())
"""


def start(*child: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PARENT, sys.executable, "-S", "-c", *child]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lives(tmp_path: Path, *each: str) -> tuple[int, str]:
    """The exit status and the messages, when the supervisor lives and dies like this."""
    script = tmp_path / "lives"
    script.write_text("\n".join(each))
    process = start(CHILD, str(script))
    _, errors = process.communicate()
    return process.returncode, errors


def test_a_supervisor_that_a_signal_killed_is_started_again_and_its_exit_is_the_jobs(tmp_path):
    status, errors = lives(tmp_path, "9", "11", "exit 75")
    assert status == 75
    assert [line.split(" by ")[1] for line in errors.splitlines()] == [
        "SIGKILL; starting it again",
        "SIGSEGV; starting it again",
    ]


def test_a_supervisor_that_slurm_ends_after_it_has_requeued_the_job_is_not_started_again(tmp_path):
    assert lives(tmp_path, "15", "exit 0") == (128 + signal.SIGTERM, "")


def test_one_that_dies_as_soon_as_it_starts_is_given_up_with_the_status_of_a_shell(tmp_path):
    status, errors = lives(tmp_path, *["9"] * batch_process._MOST_SHORT_LIVES, "exit 0")
    assert status == 128 + signal.SIGKILL
    assert errors.endswith("3 times in a row; giving up\n")


def test_signals_reach_a_supervisor_that_has_no_handlers_for_them_yet():
    process = start(LATE)
    assert process.stdout is not None
    assert process.stdout.readline() == "alive\n"
    process.send_signal(signal.SIGUSR1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    assert output == f"{int(signal.SIGUSR1)} {int(signal.SIGTERM)}\n"
    assert process.returncode == 0
