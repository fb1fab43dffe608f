"""RUN@STEP, RUN@best and RUN@last on a command line."""

from pathlib import Path

import pytest

from foundation.errors import UserError
from foundation.typed_values import json_text
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.verify import note_refusal
from pretrain.config.run import ModelConfig, RunConfig
from pretrain.rundir.run_dir import RunDir
from pretrain.rundir.run_step import run_step
from pretrain.weights.initial_weights import _kept
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


def test_a_folder_that_is_no_run_does_not_hide_a_run_of_its_name(runs):
    Path("tiny").mkdir()
    run = Path("runs/tiny")
    assert [run_step(text) for text in ("tiny", "tiny@8")] == [(run, None), (run, 8)]
    Path("tiny/model.safetensors").write_bytes(b"")
    assert run_step("tiny").run == Path("tiny"), "an export"
    RunDir.create(Path("empty"), RUN)
    assert run_step("empty").run == Path("empty")


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


def test_the_best_checkpoint_is_the_best_of_those_scored_on_the_same_tokens(runs, caplog):
    run_dir, short, whole = RunDir.open(Path("runs/tiny")), [500, 500], [900, 1100]

    def line(step: int, loss: float, tokens: list[int]) -> str:
        parts = [[loss, count] for count in tokens]
        return f"{json_text({'kind': 'evaluation', 'step': step, 'loss': loss, 'parts': parts})}\n"

    run_dir.metrics.write_text(line(8, 3.0, short) + line(16, 2.5, short) + line(32, 2.0, whole))
    assert run_step("tiny@best").step == 16
    assert "step 16, of steps 8, 16 by their losses on the same 1,000 tokens" in caplog.text
    assert "scored on others: 32; 'pretrain evaluate runs/tiny@16 runs/tiny@32' comp" in caplog.text
    caplog.clear()
    run_dir.evaluations.write_text(line(16, 2.2, whole) + line(8, 1.9, whole))
    assert run_step("tiny@best").step == 8, "of three on the same tokens"
    assert not caplog.text
    run_dir.evaluations.write_text("".join(line(8 * n, 2.4 + n % 2, short) for n in (1, 2, 4)))
    assert run_step("tiny@best").step == 16
    run_dir.evaluations.write_text(line(32, 2.6, short) + line(16, 2.2, whole))
    assert run_step("tiny@best").step == 32, "two of three are compared on the longer text, too"


def test_weights_to_start_from_are_of_a_run_that_is_named_as_in_runs(runs):
    tiny = Path("runs/tiny").absolute()
    assert _kept(Path("tiny@8").absolute()) == _kept(tiny.with_name("tiny@8")) == (tiny, 8)
    assert _kept(tiny) == (tiny, 32)
    assert _kept(Path("nowhere@8").absolute()) is None


def test_a_checkpoints_directory_is_answered_with_its_name(runs):
    with pytest.raises(UserError, match=r"name a run's checkpoint runs/tiny@8$"):
        RunDir.open(Path("runs/tiny/checkpoints/step-00000008"))
