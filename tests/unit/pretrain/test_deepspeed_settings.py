from __future__ import annotations

from pathlib import Path

import pytest

from data_pipeline.config_loader import load_config
from data_pipeline.errors import ConfigError
from pretrain.cli import main
from pretrain.config.engine import EngineConfig
from pretrain.config.run import RunConfig
from pretrain.engines.deepspeed_settings import check_settings, deepspeed_settings


@pytest.mark.parametrize(
    "settings", [{"initial_loss_scale": 3.0}, {"initial_loss_scale": 0.5}, {"loss_scale_window": 0}]
)
def test_loss_scales_that_would_round_or_never_change_are_rejected(
    settings: dict[str, float],
) -> None:
    with pytest.raises(ConfigError, match=f"engine.{next(iter(settings))}="):
        EngineConfig(**settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("what", ["offload_optimizer", "offload_param"])
def test_state_on_a_disk_is_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    experiment = tmp_path / "swapped.yaml"
    extra = f"{{zero_optimization: {{{what}: {{device: nvme, nvme_path: /mnt}}}}}}"
    experiment.write_text(f"engine: {{zero_stage: 3, deepspeed_extra: {extra}}}\n")
    assert main(["train", str(experiment), "--run-dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert f"zero_optimization.{what}.device=nvme: found state that DeepSpeed swaps to " in said
    assert not (tmp_path / "run").exists()


def test_state_in_host_memory_is_accepted(tmp_path: Path) -> None:
    experiment = tmp_path / "host.yaml"
    extra = "{zero_optimization: {offload_optimizer: {device: cpu}, overlap_comm: true}}"
    experiment.write_text(f"engine: {{zero_stage: 3, deepspeed_extra: {extra}}}\n")
    assert load_config(RunConfig, experiment).engine.deepspeed_extra["zero_optimization"][
        "overlap_comm"
    ]


@pytest.mark.parametrize(
    "setting",
    [
        "engine.micro_batch_lanes=-1",
        "engine.threads=-1",
        "optim.learning_rate=-0.1",
        "optim.epsilon=-1",
        "optim.weight_decay=-1",
        "optim.clip_norm=-1",
        "optim.betas=[0.9, 1.5]",
        "optim.schedule.warmup_steps=-3",
        "optim.schedule.decay_steps=-3",
        "optim.schedule.final_fraction=1.5",
        "evaluation.lanes=0",
        "evaluation.interval=-1",
        "evaluation.max_tokens=-1",
    ],
)
def test_settings_out_of_range_are_rejected_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str
) -> None:
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text("name: experiment\n")
    assert main(["train", str(experiment), "--run-dir", str(tmp_path / "run"), setting]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    name, value = setting.split("=")
    assert f"{name}={value}" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (
            {"scheduler": {"type": "WarmupLR"}},
            "deepspeed_extra.scheduler has no effect; use optim.schedule",
        ),
        (
            {"optimizer": {"type": "Adam"}},
            "deepspeed_extra.optimizer has no effect; use optim.name",
        ),
        ({"train_batch_size": 3}, "deepspeed_extra.train_batch_size: found 3, expected 16"),
        (
            {"zero_optimization": {"stage": 3}},
            "deepspeed_extra.zero_optimization.stage: found 3, expected 1",
        ),
    ],
)
def test_settings_that_contradict_the_run_are_rejected(extra: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        deepspeed_settings(RunConfig(engine=EngineConfig(deepspeed_extra=extra)), 2, 4)


@pytest.mark.parametrize("wrong", [{"overlap_com": True}, {"reduce_bucket_size": "large"}])
def test_settings_that_deepspeed_rejects_are_reported_in_one_line(wrong: dict) -> None:
    import deepspeed

    run = RunConfig(engine=EngineConfig(deepspeed_extra={"zero_optimization": wrong}))
    with pytest.raises(ConfigError) as caught:
        check_settings(deepspeed, deepspeed_settings(run, 1, 1))
    assert str(caught.value).startswith("engine.deepspeed_extra: DeepSpeed rejects it: ")
    assert next(iter(wrong)) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    check_settings(deepspeed, deepspeed_settings(RunConfig(), 1, 1))
