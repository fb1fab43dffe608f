"""Starts from what a power failure can leave on a disk, in a process of their own."""

import subprocess

from foundation.programs import own_command


def test_runs_and_builds_continue_from_crash_states():
    """A whole checkpoint, its metrics and events, and identical bytes of resumed builds."""
    command = own_command("tests.crash_states", "--states", "1000")
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("(0 wrong)") == 12, "four subjects in three models"
