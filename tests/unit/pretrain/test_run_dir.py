from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.config import MixturePart
from foundation.errors import ConfigError
from foundation.settings import to_tree
from pretrain.checkpoint.directory import INDEX
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.resolve import with_absolute_paths
from pretrain.config.run import MetricsConfig, RunConfig
from pretrain.rundir.events import SettingsChanged
from pretrain.rundir.ledger import events_of
from pretrain.rundir.metrics_file import cut_measurements_after, measurement_of
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.metrics import train_line

MEASURED = train_line(1)
RUN = RunConfig(name="first", model=ModelConfig(vocab_size=300))


def resume_error(path: Path, config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        RunDir.create_or_resume(path, config)
    return str(caught.value)


def test_a_new_directory_holds_identity_and_resolved_settings_and_is_opened_again(tmp_path, caplog):
    caplog.set_level("INFO", "pretrain")
    with pytest.raises(ConfigError, match="holds no run"):
        RunDir.open(tmp_path)
    created = RunDir.create(tmp_path / "deep/run", RUN)
    opened = RunDir.create_or_resume(tmp_path / "deep/run", RUN)
    assert not caplog.messages
    assert opened.config == RUN
    assert opened.identity == created.identity
    assert opened.identity.name == "first"
    with pytest.raises(ConfigError, match="already holds the run 'first'"):
        RunDir.create(tmp_path / "deep/run", RUN)


def test_a_run_that_was_killed_while_its_directory_was_made_starts_again(tmp_path):
    for name in ("checkpoints", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / ".config.yaml.14035.tmp").touch()
    (tmp_path / "checkpoints/step-00000003").mkdir()
    assert "holds other files and no run (checkpoints)" in resume_error(tmp_path, RUN)
    (tmp_path / "checkpoints/step-00000003").rmdir()
    assert RunDir.create_or_resume(tmp_path, RUN).config == RUN


def test_a_changed_setting_that_changes_the_model_is_refused_and_nothing_is_written(tmp_path):
    run_dir = RunDir.create(tmp_path, RUN)
    model, metrics = replace(RUN.model, d_model=64), MetricsConfig(interval=3)
    changed = replace(RUN, model=model, seed=2, metrics=metrics, optim=OptimConfig(steps=10))
    message = resume_error(tmp_path, changed)
    assert "optim.steps: 1000 -> 10 (may only grow)" in message
    assert "model.d_model: 128 -> 64" in message
    assert "seed: 1 -> 2" in message
    assert "metrics.interval" not in message
    assert run_dir.config == RUN
    assert run_dir.ledger.read() == []


def test_harmless_changes_are_logged_kept_and_entered_in_the_ledger(tmp_path, caplog):
    caplog.set_level("INFO", "pretrain")
    run_dir = RunDir.create(tmp_path, RUN)
    changed = replace(
        RUN,
        metrics=MetricsConfig(interval=3),
        engine=EngineConfig(zero_stage=3, deepspeed_extra={"prescale_gradients": True}),
        optim=OptimConfig(steps=2000),
    )
    RunDir.create_or_resume(tmp_path, changed)
    assert "changed setting  optim.steps: 1000 -> 2000" in caplog.messages
    assert len(caplog.messages) == 4
    assert run_dir.config == changed
    (event,) = events_of(run_dir.ledger.read(), SettingsChanged)
    assert event.changes["metrics.interval"] == (10, 3)


def test_a_path_is_the_same_setting_relative_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mixture = (MixturePart(path=Path("books"), weight=1.0),)
    run = replace(RUN, data=replace(RUN.data, mixture=mixture))
    RunDir.create(tmp_path / "run", run).refuse_other_run(with_absolute_paths(run))


def test_a_directory_with_other_files_is_refused_and_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    assert "thesis.tex" in resume_error(tmp_path, RUN)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_half_made_directory_is_completed(tmp_path):
    RunDir.create(tmp_path, RUN)
    (tmp_path / "run.json").unlink()
    (tmp_path / "checkpoints").rmdir()
    assert RunDir.create_or_resume(tmp_path, RUN).identity.name == "first"


def test_a_damaged_identity_or_another_format_is_refused(tmp_path):
    RunDir.create(tmp_path, RUN)
    identity = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**identity, "format": 99, "new": 1}))
    with pytest.raises(ConfigError, match="has format 99"):
        RunDir.open(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"{", b"[]", b"\xff", b'{"nbme": "x"}', b'{"a": 1, "b": 2}', b'{"format": 2}'),
        b'{"created": "", "format": 2, "id": "\\ud800", "name": "fuzz"}',
        None,
    ],
)
def test_a_damaged_identity_is_refused_with_the_way_to_write_it_again(tmp_path, damage):
    lost = RunDir.create(tmp_path, RUN).identity
    (tmp_path / "run.json").unlink()
    if damage is not None:
        (tmp_path / "run.json").write_bytes(damage)
    with pytest.raises(
        ConfigError, match=r"write .* into it, as a checkpoint's index.json"
    ) as raised:
        RunDir.open(tmp_path)
    assert "\n" not in str(raised.value)
    (tmp_path / "run.json").write_text(json.dumps({"name": lost.name, "id": lost.id}))
    assert RunDir.open(tmp_path).identity == replace(lost, created="")


def test_lost_settings_can_be_written_again_from_a_checkpoint(tmp_path):
    run_dir = RunDir.create(tmp_path, RUN)
    step = publish_step(run_dir.checkpoints, 7, run=run_dir.identity.id, config=to_tree(RUN))
    run_dir.config_file.unlink()
    with pytest.raises(ConfigError, match=r"write into it what .*index.json has as \"config\""):
        RunDir.create_or_resume(tmp_path, RUN)
    run_dir.config_file.write_text(json.dumps(json.loads((step / INDEX).read_text())["config"]))
    assert RunDir.create_or_resume(tmp_path, RUN).config == RUN


def test_cut_metrics_keep_every_step_up_to_the_one_resumed_and_report_missing_ones(
    tmp_path, caplog
):
    run_dir = RunDir.create(tmp_path, RUN)
    lines = [json.dumps(MEASURED | {"step": step}) + "\n" for step in (1, 2, 3, 3, 4)]
    run_dir.metrics.write_text("".join(lines) + '{"kind": "train", "st')
    assert cut_measurements_after(run_dir.metrics, 3) == 2
    assert run_dir.metrics.read_text() == "".join(lines[:4])
    assert cut_measurements_after(run_dir.metrics, 3) == 0
    assert not caplog.messages
    assert cut_measurements_after(run_dir.metrics, 5) == 0
    [warning] = caplog.messages
    assert warning.endswith("ends at step 3, expected 5; the rest is lost")
    assert cut_measurements_after(run_dir.metrics, 0) == 4
    assert run_dir.metrics.read_text() == ""


def test_no_flipped_bit_of_a_key_makes_a_line_that_readers_trip_over(tmp_path, caplog):
    line = json.dumps(MEASURED).encode() + b"\n"
    keys = [
        at
        for name in MEASURED
        for at in range(
            line.index(f'"{name}"'.encode()) + 1, line.index(f'"{name}"'.encode()) + 1 + len(name)
        )
    ]
    flipped = [line[:at] + bytes([line[at] ^ 1 << bit]) + line[at + 1 :]
               for at in keys for bit in range(8)]  # fmt: skip
    assert len(flipped) > 250
    assert all(measurement_of(each) is None for each in flipped)
    assert measurement_of(line) == MEASURED
    assert measurement_of(json.dumps(MEASURED | {"totals": 3.0}).encode()) is None
    for other in (b"[]", b"{}", b"3", b'{"kind": []}', b"\xff", b'{"kind": "train", "step": true}'):
        assert measurement_of(other) is None


@pytest.mark.parametrize(
    "name", ["checkpoints", "heartbeats", "ledger.jsonl", "logs", "metrics.jsonl", "tensorboard"]
)
def test_a_run_whose_parts_lead_out_of_its_directory_is_not_resumed(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    with (
        pytest.raises(ConfigError, match=f"{name} is a link, expected a part of the run"),
        RunDir(tmp_path / "run").locked("launcher"),
    ):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["run", name]
