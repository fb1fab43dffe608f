from __future__ import annotations

import os
import subprocess
import sys

from pretrain.processes.node_check import find_strays
from pretrain.processes.node_findings import TOKEN

BUSY = [sys.executable, "-c", "while True: pass"]


def test_a_busy_stranger_is_found_and_a_process_of_the_check_or_one_that_rests_is_none():
    stranger = subprocess.Popen(BUSY)
    ours = subprocess.Popen(BUSY, env={**os.environ, TOKEN: "x"})
    resting = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        found = "; ".join(find_strays(on_gpus=False))
    finally:
        for process in (stranger, ours, resting):
            process.kill()
            process.wait()
    assert f"({stranger.pid}) keeps a core busy" in found
    assert f"({ours.pid})" not in found
    assert f"({resting.pid})" not in found
