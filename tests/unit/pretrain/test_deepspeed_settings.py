from __future__ import annotations

from dataclasses import replace

import pytest

from foundation.errors import ConfigError
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.costs.memory import SMALLEST_BUCKET, bucket_elements, largest_parameter, optimizer_of
from pretrain.engines.deepspeed_engine import check_settings, deepspeed_settings

MODEL = ModelConfig(vocab_size=64)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"scheduler": {"type": "WarmupLR"}}, "optim.schedule"),
        ({"optimizer": {"type": "Adam"}}, "optim.name"),
        ({"train_batch_size": 3}, "deepspeed_extra.train_batch_size: .*3, .*16"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: .*3, .*2"),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}}, "offload_optimizer.ratio"),
        ({"zero_optimization": {"offload_optimizer": {"super_offload": True}}}, "super_offload"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "zenflow"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "offload_param.device=nvme"),
    ],
)
def test_settings_that_contradict_the_run_are_rejected(extra: dict, named: str) -> None:
    run = RunConfig(model=MODEL, engine=EngineConfig(deepspeed_extra=extra))
    with pytest.raises(ConfigError, match=named):
        deepspeed_settings(run, 2, 4, on_gpu=False)


@pytest.mark.parametrize("wrong", [{"overlap_com": True}, {"reduce_bucket_size": "large"}])
def test_settings_that_deepspeed_rejects_are_reported_in_one_line(wrong: dict) -> None:
    import deepspeed

    run = RunConfig(model=MODEL, engine=EngineConfig(deepspeed_extra={"zero_optimization": wrong}))
    with pytest.raises(ConfigError) as caught:
        check_settings(deepspeed, deepspeed_settings(run, 1, 1, on_gpu=False))
    assert str(caught.value).startswith("engine.deepspeed_extra: ")
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
    "engine",
    [
        {"offload_optimizer": True, "zero_stage": 0},
        {"offload_optimizer": True, "kind": "torch"},
        {"zero_stage": 3, "kind": "torch"},
    ],
)
def test_settings_that_the_stage_does_not_have_are_rejected(engine: dict) -> None:
    with pytest.raises(ConfigError, match=r"engine\.kind"):
        EngineConfig(**engine)
