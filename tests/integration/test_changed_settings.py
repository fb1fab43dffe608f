"""Runs whose settings change at a resume, and branches of runs, bitwise; on both engines."""

import os
import re
import shutil
import signal
from functools import partial
from pathlib import Path

import pytest

from launcher.cli import main as launcher
from pretrain.checkpoint.directory import rank_file, step_directory, steps_on_disk
from pretrain.checkpoint.verify import verify
from pretrain.cli import main
from pretrain.recovery.faults import VARIABLE
from pretrain.rundir.compare_runs import differing_losses, differing_state, run_differences
from pretrain.rundir.events import Branched, Requested, SettingsChanged, TrainingBegan
from pretrain.rundir.exit_statuses import EXIT_STOPPED
from pretrain.rundir.history import find_events
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import flip_a_bit
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.forked_ranks import ForkedRanks
from tests.helpers.jobs import until

STEPS, CHANGED = 30, 12
ENGINES = {"torch": (1, ("engine.kind=torch",)), "deepspeed": (2, ("engine.zero_stage=2",))}
# All that changes how updates are made; at step 12 the rate is near its peak.
CHANGES = (
    "optim.learning_rate=1e-3", "optim.weight_decay=0.3", "optim.clip_norm=0.1",
    "optim.betas=[0.8, 0.9]", "optim.epsilon=1e-6", "optim.schedule.shape=linear",
    "recovery.skip_grad_norm=3",
)  # fmt: skip


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint of every fourth step."""
    folder = tmp_path_factory.mktemp("changed")
    corpora = [make_tiny_corpus(folder / name, seed=seed) for seed, name in enumerate("ab")]
    (folder / "tiny.yaml").write_text(
        f"""name: tiny
model: {{num_layers: 2, d_model: 32, num_heads: 2, memory_length: 16, dropout: 0.1}}
data: {{path: {corpora[0]}, lanes: 4, segment_length: 16}}
optim: {{steps: {STEPS}, learning_rate: 3.0e-3, weight_decay: 0.1, schedule: {{warmup_steps: 4}}}}
checkpoint: {{interval: 4, keep_last: 20, asynchronous: false}}
evaluation: {{interval: 0, max_tokens: 500}}
metrics: {{interval: 5, tensorboard: false}}
"""
    )
    return folder / "tiny.yaml"


def train(engine: str, experiment: Path, run_dir: RunDir, *more: str, fault: str = "") -> str:
    """Train with the ranks of the engine; return rank 0's log."""
    num_ranks, settings = ENGINES[engine]
    command = ["train", str(experiment), f"--run-dir={run_dir.path}", *settings, *more]
    variables = {VARIABLE: fault} if fault else {}
    logs = run_dir.path.parent
    statuses = ForkedRanks(num_ranks, partial(main, command), logs, **variables).wait()
    said = (logs / "rank-0.log").read_text()
    assert statuses == [-9 if fault else 0] * num_ranks, said
    return said


@pytest.fixture(scope="module", params=ENGINES)
def changed(request, experiment, tmp_path_factory) -> tuple[str, RunDir]:
    """The engine, and a run whose settings changed after step 12."""
    run_dir = RunDir(tmp_path_factory.mktemp(request.param) / "changed")
    train(request.param, experiment, run_dir, fault="sigkill@13")
    said = train(request.param, experiment, run_dir, *CHANGES)
    assert re.search("learning rate of step 13: 0.000.*, 0.2.* times the last one, 0.002", said)
    return request.param, run_dir


def test_a_run_that_falls_back_behind_a_change_repeats_both_settings(experiment, changed, tmp_path):
    engine, undisturbed = changed
    run_dir = RunDir(tmp_path / "changed")
    train(engine, experiment, run_dir, fault="sigkill@13")
    train(engine, experiment, run_dir, *CHANGES, fault="sigkill@21")
    assert steps_on_disk(run_dir.checkpoints)[-1] == 20
    for step in (12, 16, 20):
        flip_a_bit(step_directory(run_dir.checkpoints, step) / rank_file(0))
    said = train(engine, experiment, run_dir, *CHANGES, "--from-step=8")
    assert "optim.learning_rate 0.003 -> 0.001 from step 12" in said
    assert [event.step for event in find_events(run_dir.ledger.read(), TrainingBegan)][-2:] == [
        8,
        12,
    ]
    (event,) = find_events(run_dir.ledger.read(), SettingsChanged)
    assert (event.step, event.changes["optim.learning_rate"]) == (CHANGED, (3e-3, 1e-3))
    assert run_differences(undisturbed, run_dir, STEPS) == []


def test_a_branch_of_every_kept_step_is_its_trunk_up_to_there_and_on(experiment, changed, tmp_path):
    engine, trunk = changed
    lines = [line for line in trunk.read_metrics() if line["kind"] == "train"]
    branch = trunk
    for step in steps_on_disk(trunk.checkpoints)[:-1]:
        branch = RunDir(tmp_path / f"at-{step}")
        assert main(["branch", f"{trunk.path}@{step}", str(branch.path)]) == 0
        assert branch.identity.id != trunk.identity.id
        kept = [verify(step_directory(run.checkpoints, step)) for run in (trunk, branch)]
        assert differing_state(*kept) == []
        (event,) = find_events(branch.ledger.read(), Branched)
        assert (event.origin, event.step) == (str(trunk.path), step)
        of_branch = [line for line in branch.read_metrics() if line["kind"] == "train"]
        assert of_branch == lines[:step]
        assert branch.config.optim == trunk.settings_at(step).optim
    # The last one has the settings of all later steps.
    train(engine, branch.path / "config.yaml", branch)
    assert run_differences(trunk, branch, STEPS) == []


@pytest.fixture(scope="module")
def trunk(experiment, tmp_path_factory) -> RunDir:
    """A run of 13 steps without a change."""
    run_dir = RunDir(tmp_path_factory.mktemp("trunk") / "trunk")
    train("torch", experiment, run_dir, fault="sigkill@13")
    return run_dir


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        *((change, "loss") for change in CHANGES[:-1]),
        ("recovery.skip_grad_norm=1e-3", "loss"),
        ("optim.schedule.warmup_steps=20", "learning_rate"),
        ("optim.steps=20", "learning_rate"),
        ("data.phases=[{from_step: 8, segment_length: 8}]", "tokens"),
        ("evaluation.interval=10", ""),
        ("metrics.interval=3", ""),
        ("checkpoint.interval=3", ""),
    ],
)
def test_each_change_takes_effect_in_a_branch_from_its_step_on(trunk, tmp_path, change, differs):
    branch, setting = RunDir(tmp_path / "branch"), change.partition("=")[0]
    assert main(["branch", f"{trunk.path}@8", str(branch.path), change]) == 0
    (event,) = find_events(branch.ledger.read(), SettingsChanged)
    assert (event.step, [*event.changes]) == (8, [setting])
    train("torch", branch.path / "config.yaml", branch, fault="sigkill@13")
    problems = differing_losses(trunk, branch)
    assert bool(problems) is bool(differs), problems
    assert all(int(problem.split()[1][:-1]) > 8 for problem in problems)
    assert any(f": {differs} " in problem for problem in problems) or not differs
    lines = branch.read_metrics()
    evaluated = [line["step"] for line in lines if line["kind"] == "evaluation"]
    assert evaluated == ([10] if setting == "evaluation.interval" else [])
    ends = [line["step"] for line in lines if "tokens_per_second" in line and line["step"] > 8]
    assert (9 in ends) == (setting in ("metrics.interval", "checkpoint.interval"))
    assert (9 in steps_on_disk(branch.checkpoints)) == (setting == "checkpoint.interval")


@pytest.mark.parametrize(
    ("name", "new", "change", "said"),
    [
        ("@8", "b", "model.d_model=64", "model.d_model 32 -> 64 (the weights are of this model)"),
        ("@8", "b", "data.lanes=8", "data.lanes 4 -> 8 (give data.phases"),
        ("@8", "b", "seed=2", "seed 1 -> 2 (weights, dropout"),
        (
            "@8",
            "b",
            "optim.name=lamb",
            "optim.name adamw -> lamb (the saved state belongs to this optimizer",
        ),
        ("@8", "b", "optim.steps=7", "optim.steps 30 -> 7 (it has made 8)"),
        ("@8", "b", "optim.rate=7", "optim.rate: unknown setting"),
        ("@8", "b", "data.path=nowhere", "nowhere/train does not exist"),
        ("@9", "b", "", "no usable checkpoint of step 9; name one of its steps: 4, 8, 12"),
        ("", "b", "", "expected a step of the run, such as "),
        ("@8", "trunk", "", "it exists; name another run"),
    ],
)
def test_a_branch_that_cannot_be_is_refused_in_one_line(trunk, capsys, name, new, change, said):
    before = sorted(trunk.path.parent.iterdir())
    command = ["branch", f"{trunk.path}{name}", str(trunk.path.with_name(new))]
    assert main([*command, *([change] if change else [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert sorted(trunk.path.parent.iterdir()) == before


def test_what_a_run_cannot_continue_from_is_refused_before_an_attempt(trunk, experiment, capsys):
    ledger, other = trunk.ledger.read(), f"data.path={experiment.parent / 'b'}"
    branch = trunk.path.with_name("other")
    for command, said in (
        (("resume", str(trunk.path), "optim.steps=31", other), "b has the hash "),
        (("branch", f"{trunk.path}@8", str(branch), other), "b has the hash "),
        (("resume", str(trunk.path), "data.path=nowhere"), "nowhere"),
        (("resume", str(trunk.path), "--from-step=9"), "of step 9; give --from-step 8 or 12"),
        (("resume", str(trunk.path), "--ranks=3", "optim.steps=31"), "data.lanes=4"),
    ):
        assert (main if command[0] == "branch" else launcher)(command) == 2
        assert said in capsys.readouterr().err
    assert (trunk.ledger.read(), branch.exists()) == (ledger, False)


def test_a_branch_has_the_settings_that_its_trunk_had_before(trunk, experiment, tmp_path, capfd):
    changed, branch = RunDir(tmp_path / "changed"), RunDir(tmp_path / "branch")
    shutil.copytree(trunk.path, changed.path)
    rate = "optim.learning_rate=5e-4"
    train("torch", experiment, changed, "--from-step=8", rate, fault="sigkill@11")
    assert main(["branch", f"{changed.path}@8", str(branch.path)]) == 0
    for run_dir in (changed, branch):
        rates = [run_dir.settings_at(step).optim.learning_rate for step in (7, 8)]
        assert rates == [3e-3, 5e-4]
    capfd.readouterr()
    log = train("torch", branch.config_file, branch, "optim.learning_rate=4e-4", fault="sigkill@9")
    last = next(line for line in branch.read_metrics() if line["step"] == 8)["learning_rate"]
    assert f"the last one, {last:.3g}" in log
    at = f"{changed.path}@8"
    assert main(["report", at, "--output", str(tmp_path)]) == 0
    assert "step 8 of 30" in capfd.readouterr().out


def test_a_damaged_checkpoint_begins_no_branch(trunk, tmp_path, capsys):
    file = step_directory(trunk.checkpoints, 4) / rank_file(0)
    flip_a_bit(file)
    assert main(["branch", f"{trunk.path}@4", str(tmp_path / "b")]) == 2
    flip_a_bit(file)
    assert "its contents changed since it was written" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_run_saves_evaluates_and_stops_when_it_is_asked(experiment, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    settings = ("engine.kind=torch", "optim.steps=100000", "checkpoint.interval=100000")
    command = ["train", str(experiment), f"--run-dir={run_dir.path}", *settings]
    ranks = ForkedRanks(1, partial(main, command), tmp_path, **{VARIABLE: "slow:0.1@1"})

    def evaluated() -> list[int]:
        return [line["step"] for line in run_dir.read_metrics() if line["kind"] == "evaluation"]

    def ask(request: str) -> None:
        assert launcher(["signal", str(run_dir.path), request]) == 0

    until(lambda: run_dir.metrics.exists() and run_dir.read_metrics())
    ask("save")
    until(lambda: steps_on_disk(run_dir.checkpoints))
    assert not evaluated()
    ask("evaluate")
    until(evaluated)
    os.kill(ranks.pids[0], signal.SIGURG)  # by hand: a save
    until(lambda: steps_on_disk(run_dir.checkpoints)[1:])
    assert ranks.statuses == [None]
    ask("stop")
    assert ranks.wait() == [EXIT_STOPPED]
    *_, stopped = saved = steps_on_disk(run_dir.checkpoints)
    assert len(saved) == 3
    assert len(evaluated()) == 1
    run_dir.ledger.append(Requested(request="save"))  # as the next ranks start
    ranks = ForkedRanks(1, partial(main, command), tmp_path, **{VARIABLE: f"slow:0.1@{stopped}"})
    until(lambda: steps_on_disk(run_dir.checkpoints)[-1] == stopped + 1)
    ask("stop")
    assert ranks.wait() == [EXIT_STOPPED]
    assert len(evaluated()) == 1, "not what was asked for before"


def test_a_change_of_the_rate_resumes_from_the_local_checkpoint(experiment, tmp_path):
    run_dir, disk = RunDir(tmp_path / "run"), tmp_path / "disk"
    settings = (f"checkpoint.local={disk}", "checkpoint.local_interval=2", "checkpoint.interval=8")
    train("torch", experiment, run_dir, *settings, fault="sigkill@11")
    train("torch", experiment, run_dir, *settings, "optim.learning_rate=1e-3", fault="sigkill@13")
    ledger = run_dir.ledger.read()
    began = find_events(ledger, TrainingBegan)[-1]
    assert (began.step, began.local) == (10, True)
    assert [event.step for event in find_events(ledger, SettingsChanged)] == [10]


def test_settings_that_were_edited_in_the_run_directory_are_changes(trunk, tmp_path, capfd):
    run_dir = RunDir(tmp_path / "run")
    shutil.copytree(trunk.path, run_dir.path)
    file, text = run_dir.config_file, trunk.config_file.read_text()
    file.write_text(text.replace("dropout: 0.1", "dropout: 0.3"))
    assert launcher(["resume", str(run_dir.path)]) == 2
    said = capfd.readouterr().err
    assert "model.dropout: 0.1 -> 0.3 (the weights" in said
    assert f"{run_dir.path}@last NEW" in said
    assert run_dir.config == trunk.config
    file.write_text(text.replace("learning_rate: 0.003", "learning_rate: 0.001"))
    train("torch", file, run_dir, "--from-step=8", fault="sigkill@13")
    (event,) = find_events(run_dir.ledger.read(), SettingsChanged)
    assert (event.step, event.changes) == (8, {"optim.learning_rate": (3e-3, 1e-3)})
    assert run_dir.settings_at(7).optim.learning_rate == 3e-3
    file.write_text(text)
    assert launcher(["resume", str(run_dir.path)]) == 2
    assert " times the last one" in capfd.readouterr().err


def test_a_copy_of_a_run_and_its_corpus_continues_elsewhere(trunk, tmp_path):
    here, there = RunDir(tmp_path / "here"), RunDir(tmp_path / "there")
    for run_dir in (here, there):
        shutil.copytree(trunk.path, run_dir.path)
    shutil.copytree(trunk.config.data.path, tmp_path / "corpus")
    train("torch", here.path / "config.yaml", here)
    assert launcher(["resume", str(there.path), f"data.path={tmp_path / 'corpus'}"]) == 0
    assert there.config.data.path == tmp_path / "corpus"
    assert run_differences(here, there, STEPS) == []
