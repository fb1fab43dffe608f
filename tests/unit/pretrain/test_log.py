from __future__ import annotations

import os
import re
import subprocess
import sys

SCRIPT = r"""
import logging, sys, warnings
from pretrain.terminal.log import adopt_logger, set_up_logging
foreign = logging.getLogger("Foreign")
foreign.propagate = False
foreign.addHandler(logging.StreamHandler(sys.stdout))
set_up_logging("someone else")
set_up_logging("rank 3", *sys.argv[1:])
adopt_logger("Foreign", ignored="harmless")
logging.getLogger("pretrain.run").debug("detail")
logging.getLogger("pretrain.run").info("step %d", 7)
logging.getLogger("launcher.supervisor").error("no attempt is left")
logging.getLogger("launcher.supervisor").error("https://me:secret@host/a?sig=1 \x1b[2J")
logging.getLogger("library").info("chatter")
foreign.info("chatter")
foreign.warning("a harmless thing")
foreign.warning("no fused kernel")
warnings.warn("old API", UserWarning)
"""
LINES = [
    "DEBUG TIME rank 3: detail",
    "INFO TIME rank 3: step 7",
    "ERROR TIME rank 3: no attempt is left",
    "ERROR TIME rank 3: https://***@host/a?*** \\x1b[2J",
    "WARNING TIME rank 3: no fused kernel",
    "WARNING TIME rank 3: <string>:18: UserWarning: old API",
]


def logged(*arguments: str, **variables: str) -> list[str]:
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return re.sub(r"\b\d\d:\d\d:\d\d\b", "TIME", done.stderr).splitlines()


def test_every_line_has_level_time_and_writer_and_libraries_report_only_warnings():
    assert logged() == LINES[1:]


def test_the_level_is_an_argument_or_inherited_and_the_argument_wins():
    assert logged("debug") == LINES
    assert logged(PRETRAIN_LOG_LEVEL="error") == LINES[2:4]
    assert logged("info", PRETRAIN_LOG_LEVEL="error") == LINES[1:]
    assert logged(PRETRAIN_LOG_LEVEL="nonsense") == LINES[1:]
