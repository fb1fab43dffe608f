"""RUN@STEP, RUN@best and RUN@last on a command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundation.errors import UserError
from foundation.typed_values import json_text
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.verify import note_refusal
from pretrain.config.run import ModelConfig, RunConfig
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_step import run_step
from tests.helpers.checkpoints import publish_step

RUN = RunConfig(name="tiny", model=ModelConfig(vocab_size=300))
LOSSES: dict[int, float | None] = {4: 1.0, 8: 3.0, 16: 2.0, 24: None}


@pytest.fixture
def runs() -> None:
    """Three runs in runs/: one with checkpoints, of which 24 was refused; two without."""
    tiny = RunDir.create(Path("runs/tiny"), RUN)
    for step in (8, 16, 24, 32):
        publish_step(tiny.checkpoints, step)
    note_refusal(step_directory(tiny.checkpoints, 24), "damaged")
    lines = ({"kind": "evaluation", "step": step, "loss": loss} for step, loss in LOSSES.items())
    tiny.metrics.write_text("".join(f"{json_text(line)}\n" for line in lines))
    RunDir.create(Path("runs/a@16"), RUN)
    RunDir.create(Path("runs/empty"), RUN)


@pytest.mark.parametrize(
    ("text", "run", "step"),
    [
        ("tiny", "tiny", None),
        ("runs/tiny", "tiny", None),
        ("tiny@8", "tiny", 8),
        ("runs/tiny@16", "tiny", 16),
        ("runs/tiny/@00016", "tiny", 16),
        ("tiny@last", "tiny", 32),
        ("tiny@best", "tiny", 16),
        ("a@16", "a@16", None),
        ("new@home/tiny", "../new@home/tiny", None),
    ],
)
def test_a_run_and_a_step_name_a_checkpoint(runs, text, run, step):
    named = run_step(text)
    assert (named.run.resolve(), named.step) == ((Path("runs") / run).resolve(), step)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("tiny@4", "no usable checkpoint of step 4; name one of its steps: 8, 16, 32"),
        ("tiny@24", "no usable checkpoint of step 24; name one of its steps: 8, 16, 32"),
        ("tiny@", "found '' behind @, expected a step, best or last"),
        ("tiny@-8", "found '-8' behind @, expected a step, best or last"),
        ("tiny@newest", "found 'newest' behind @, expected a step, best or last"),
        ("tony@8", "tony holds no run: it has no run.json; did you mean 'tiny'?"),
        ("a@16@8", "no usable checkpoint of step 8; train until one is saved"),
        ("empty@last", "no checkpoint yet; train until one is saved"),
        ("empty@best", "no evaluated checkpoint; train until one is saved"),
    ],
)
def test_a_name_of_no_checkpoint_says_which_there_are(runs, text, error):
    with pytest.raises(UserError) as caught:
        run_step(text)
    assert error in str(caught.value)
