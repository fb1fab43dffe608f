"""Losses of a run's kept checkpoints, measured by another job than the run's.

RUN/evaluations.jsonl has a line for each, in the format of metrics.jsonl. The report and
evaluations.csv show them, and TensorBoard does as tensorboard-checkpoints-TOKENS-tokens.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from foundation.files import append_whole
from foundation.tables import write_csv
from foundation.typed_values import json_text
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.index import read_index
from pretrain.checkpoint.verify import steps_that_count
from pretrain.metrics.writers import TensorBoard
from pretrain.rundir.evaluated_text import PARTS
from pretrain.rundir.history import STARTS_AND_ENDS, attempt_history, is_finished, last_event
from pretrain.rundir.run_dir import RunDir

POLL_SECONDS = 5.0


def unscored_steps(run_dir: RunDir, seconds: float = POLL_SECONDS) -> Iterator[int]:
    """Yield the step of each checkpoint that is newer than its lines, or has none, until the run
    has ended."""
    while True:
        is_held = any(lock.is_held for lock in run_dir.locks())
        if not is_held:  # else it may be starting
            RunDir.open(run_dir.path)
        ledger = run_dir.ledger.history()
        # One with more steps is resumed: its ledger says that it has finished, until it trains.
        last = last_event(ledger, *STARTS_AND_ENDS)
        has_ended = not is_held and last is not None and is_finished(last)
        history = attempt_history(ledger)
        lines = sorted(run_dir.read_evaluations(), key=lambda line: line["time"])
        scored = {line["step"]: line["time"] for line in lines}
        steps = steps_that_count(root := run_dir.checkpoints)
        saved = [read_index(step_directory(root, step)) for step in steps]
        saved = [own for own in saved if history.stands(own.step, own.attempt)]
        new = [x.step for x in saved if scored.get(x.step, 0.0) < x.directory.stat().st_mtime]
        yield from new
        if has_ended and not new:
            return
        if not new:
            time.sleep(seconds)


def _tokens(values: Mapping[str, Any]) -> int:
    """Return the tokens of the scored text."""
    return sum(tokens for _, tokens in values.get(PARTS) or ())


def write_point(run_dir: RunDir, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """Add a measured checkpoint to the run's files, and return its line.

    The latest line of a step and a text counts.
    """
    line = {"kind": "evaluation", "step": step, "time": time.time(), **values}
    append_whole(run_dir.evaluations, f"{json_text(line)}\n".encode())
    rows, tokens = run_dir.read_evaluations(), _tokens(values)
    directory = run_dir.tensorboard.with_name(f"tensorboard-checkpoints-{tokens}-tokens")
    # Written whole: in a file that goes on, an earlier step would take back the later ones.
    before, board = list(directory.glob("events.*")), TensorBoard(directory, 0)
    board.append([row for row in rows if _tokens(row) == tokens])  # a curve has losses of one text
    board.close()
    for path in before:
        path.unlink(missing_ok=True)
    names = dict.fromkeys(name for row in rows for name in row if name not in ("kind", PARTS))
    write_csv(run_dir.evaluations.with_suffix(".csv"), list(names), rows)
    return line
