from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from foundation.errors import ConfigError
from foundation.settings import load_config
from pretrain.cli import main
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.memory import (
    SMALLEST_BUCKET,
    bucket_elements,
    largest_parameter,
    optimizer_of,
)
from pretrain.engines.deepspeed_engine import check_settings, deepspeed_settings
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.models import TINY, VARIANTS

MODEL = ModelConfig(vocab_size=64)


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
            "deepspeed_extra.zero_optimization.stage: found 3, expected 2",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}},
            "offload_optimizer.ratio: with it DeepSpeed's own Adam updates weights",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"super_offload": True}}},
            "super_offload: with it DeepSpeed's own Adam updates weights, expected optim.name=",
        ),
        (
            {"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}},
            "zenflow: with it DeepSpeed's own Adam updates weights",
        ),
    ],
)
def test_settings_that_contradict_the_run_are_rejected(extra: dict, said: str) -> None:
    run = RunConfig(model=MODEL, engine=EngineConfig(deepspeed_extra=extra))
    with pytest.raises(ConfigError, match=said):
        deepspeed_settings(run, 2, 4, on_gpu=False)


@pytest.mark.parametrize("wrong", [{"overlap_com": True}, {"reduce_bucket_size": "large"}])
def test_settings_that_deepspeed_rejects_are_reported_in_one_line(wrong: dict) -> None:
    import deepspeed

    run = RunConfig(model=MODEL, engine=EngineConfig(deepspeed_extra={"zero_optimization": wrong}))
    with pytest.raises(ConfigError) as caught:
        check_settings(deepspeed, deepspeed_settings(run, 1, 1, on_gpu=False))
    assert str(caught.value).startswith("engine.deepspeed_extra: DeepSpeed rejects it: ")
    assert next(iter(wrong)) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    check_settings(deepspeed, deepspeed_settings(RunConfig(model=MODEL), 1, 1, on_gpu=False))


# What DeepSpeed makes of each is compared by tests/integration/test_zero_memory.py; fp16 needs a
# GPU and is compared in tests/gpu.
@pytest.mark.parametrize(
    ("stage", "precision", "offload", "optimizer", "overlaps"),
    [
        (0, "fp32", False, "", None),
        (0, "bf16", False, "FP16_UnfusedOptimizer", None),
        (1, "bf16", False, "BF16_Optimizer", False),
        (1, "fp16", False, "DeepSpeedZeroOptimizer", False),
        (1, "bf16", True, "DeepSpeedZeroOptimizer", False),
        (2, "bf16", False, "DeepSpeedZeroOptimizer", True),
        (2, "fp16", False, "DeepSpeedZeroOptimizer", True),
        (2, "bf16", True, "DeepSpeedZeroOptimizer", False),
        (3, "bf16", False, "DeepSpeedZeroOptimizer_Stage3", True),
        (3, "fp32", True, "DeepSpeedZeroOptimizer_Stage3", True),
    ],
)
def test_on_a_gpu_stages_2_and_3_reduce_gradients_while_the_backward_pass_goes_on(
    stage: int, precision: str, offload: bool, optimizer: str, overlaps: bool | None
) -> None:
    engine: dict = {"zero_stage": stage, "precision": precision, "offload_optimizer": offload}
    run = RunConfig(model=MODEL, engine=EngineConfig(**engine))
    assert optimizer_of(run) == optimizer
    on_gpu, on_cpu = (deepspeed_settings(run, 2, 1, on_gpu=on_gpu) for on_gpu in (True, False))
    assert on_gpu["zero_optimization"].get("overlap_comm") == overlaps
    assert not on_cpu["zero_optimization"].get("overlap_comm")
    assert on_gpu.get("communication_data_type") == ("fp32" if stage else None)


def test_an_unset_stage_is_one_that_overlaps() -> None:
    run = RunConfig(model=MODEL, engine=EngineConfig(precision="bf16"))
    assert deepspeed_settings(run, 8, 1, on_gpu=True)["zero_optimization"]["overlap_comm"]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_largest_parameter_is_that_of_the_built_model(name: str) -> None:
    model = replace(TINY, **VARIANTS[name])
    with torch.device("meta"):
        found = max(each.numel() for each in TransformerXL(model).parameters())
    assert largest_parameter(model) == found


def test_every_parameter_fits_into_a_bucket() -> None:
    wordy = ModelConfig(vocab_size=267_735, num_layers=2, d_model=410, num_heads=10, d_head=41)
    bucket = bucket_elements(RunConfig(model=wordy))
    assert bucket == largest_parameter(wordy) == 267_735 * 410
    few = replace(wordy, vocab_size=2000, num_layers=16)
    assert largest_parameter(few) < bucket_elements(RunConfig(model=few)) == SMALLEST_BUCKET
    run = RunConfig(model=wordy, engine=EngineConfig(zero_stage=3))
    settings = deepspeed_settings(run, 2, 1, on_gpu=True)["zero_optimization"]
    assert settings["reduce_bucket_size"] == bucket
    assert settings["stage3_max_reuse_distance"] < bucket
    extra = {"zero_optimization": {"reduce_bucket_size": 5e8, "overlap_comm": False}}
    run = replace(run, engine=EngineConfig(zero_stage=3, deepspeed_extra=extra))
    settings = deepspeed_settings(run, 2, 1, on_gpu=True)["zero_optimization"]
    assert (settings["reduce_bucket_size"], settings["overlap_comm"]) == (5e8, False)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"offload_optimizer": True, "zero_stage": 0}, "of 1 or more, found deepspeed and 0"),
        ({"offload_optimizer": True, "kind": "torch"}, "needs engine.kind=deepspeed and"),
        ({"zero_stage": 3, "kind": "torch"}, "needs engine.kind=deepspeed, found torch"),
    ],
)
def test_settings_that_the_stage_does_not_have_are_rejected(engine: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EngineConfig(**engine)
