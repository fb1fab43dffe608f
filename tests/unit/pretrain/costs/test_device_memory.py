"""What `describe` says a step needs, against what it took; what DeepSpeed is told of buckets."""

import json
import os
import re
import subprocess
from dataclasses import replace

import pytest
import torch

from foundation.errors import ConfigError
from foundation.programs import own_command
from foundation.typed_values import to_tree
from pretrain.cli import main
from pretrain.config.run import DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.costs.device_memory import (
    SMALLEST_BUCKET,
    Footprint,
    bucket_elements,
    deepspeed_optimizer,
    largest_parameter,
    layer_bytes,
)
from pretrain.engines.deepspeed_engine import check_settings, deepspeed_settings
from pretrain.kernels.triton.settings import CAPABILITIES
from pretrain.kernels.triton.tiling import WORKSPACE_BYTES, built_in_tiles

DEEP = {"vocab_size": 1000, "num_layers": 4, "d_model": 256, "num_heads": 4, "memory_length": 128}
LONG = {"vocab_size": 500, "num_layers": 4, "d_model": 128, "num_heads": 4, "memory_length": 512}
WORDY = {"vocab_size": 16000, "num_layers": 2, "d_model": 128, "num_heads": 4, "memory_length": 64}
MODERN = {"positions": "rope", "feed_forward": "swiglu", "norm": "rmsnorm", "num_key_heads": 2}
DELTANET = {"layer_kinds": ("deltanet",)}
DROPPED = {"dropout": 0.1, "attention_dropout": 0.1}
AGAIN = {"activation_checkpointing": "selective"}
# What is measured: the model, lanes and segment length (and segments), the engine.
CASES = {
    "deep": (DEEP, (8, 128), {}),
    "slots, dropout": ({**DEEP, **DROPPED}, (8, 128), {"micro_batch_lanes": 4}),
    "long memory, checkpointed": (LONG, (4, 512), {"activation_checkpointing": "full"}),
    "long memory, scores computed again": (LONG, (2, 512), AGAIN),
    "sinks": ({**LONG, "attention_sinks": True}, (2, 512), {"attention_kernel": "plain"}),
    "many words, in chunks": (WORDY, (16, 64), {"logits_chunk_tokens": 128}),
    "deltanet, isolated": ({**DEEP, **DELTANET, "isolate_documents": True}, (8, 128), {}),
    "deltanet, products between tokens computed again": ({**LONG, **DELTANET}, (2, 512), AGAIN),
    "torch's attention": (
        {**DEEP, **MODERN, "norm_position": "pre"},
        (8, 128),
        {"attention_kernel": "sdpa"},
    ),
    "mamba2, isolated": (
        {**DEEP, "layer_kinds": ("mamba2",), "isolate_documents": True},
        (8, 128),
        {},
    ),
    "mamba2, products between tokens computed again": (
        {**LONG, "layer_kinds": ("mamba2",)},
        (2, 512),
        AGAIN,
    ),
    "eight segments, each read again": (
        {**DEEP, "layer_kinds": ("attention", "deltanet")},
        (4, 64, 8),
        {"activation_checkpointing": "segments"},
    ),
    "three segments": ({**DEEP, "layer_kinds": ("attention", "deltanet")}, (4, 64, 3), AGAIN),
}


def run_of(name: str) -> RunConfig:
    model, (lanes, segment_length, *segments), engine = CASES[name]
    return RunConfig(
        model=ModelConfig(**model),
        data=DataConfig(lanes=lanes, segment_length=segment_length),
        optim=OptimConfig(gradient_segments=segments[0] if segments else 1),
        engine=EngineConfig(kind="torch", **engine),
    )


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    """Peak bytes of every case, from one process of its own."""
    settings = json.dumps([to_tree(run_of(name)) for name in CASES])
    command = own_command("tests.helpers.peak_memory", settings)
    # Freed memory goes back at once, so that the process holds what the tensors hold.
    names = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
    environment = {**os.environ, **dict.fromkeys(names, "65536")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_estimate_of_a_steps_peak_memory_is_within_15_per_cent(measured, name):
    assert Footprint(run_of(name), 1).device == pytest.approx(measured[name], rel=0.15)


LARGE = {"vocab_size": 500, "num_layers": 1, "d_model": 2048, "num_heads": 16}
LONGEST = {"num_key_heads": 2, "memory_length": 16384, "compressed_length": 7}
WORKSPACES = {
    "whole lanes": ({**LARGE, "memory_length": 100}, (6, 130)),
    "beyond": ({**LARGE, **LONGEST}, (2, 8192)),
    "wide and odd heads": ({**LARGE, "d_head": 80, "memory_length": 333}, (3, 1000)),
}


def fused_run(name: str) -> RunConfig:
    model, (lanes, segment_length) = WORKSPACES[name]
    data = DataConfig(lanes=lanes, segment_length=segment_length)
    return RunConfig(model=ModelConfig(**model), data=data, engine=EngineConfig(precision="bf16"))


def launched_workspace_bytes(run: RunConfig, capability: tuple[int, int]) -> int:
    """Return what the launcher allocates for a layer's backward pass, on a device without data."""
    from pretrain.kernels.triton.attention import Backward, Call, Inputs, Options

    model, B, L = run.model, run.data.lanes, run.data.segment_length
    C = L + model.memory_length + model.compressed_length
    N, G, H = model.num_heads, model.key_heads, model.head_width

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    key_BCGH, value_BCGH = empty(B, C, 2, G, H).unbind(2)
    relative = (empty(C, N, H), empty(N, H), empty(N, H))
    absent = dict.fromkeys(("first_keys_BL", "query_ends_BC", "dropout_keys_B"))
    kind = {"tiles": built_in_tiles(H, capability), "workspace_bytes": WORKSPACE_BYTES}
    options = Options(window=C, drop_threshold=0, deterministic=True, **absent, **kind)
    call = Call(Inputs(empty(B, L, N, H), key_BCGH, value_BCGH, *relative, None, None), options)
    call.arguments["output_gradients"] = empty(B, L, N, H)
    backward = Backward(call, adds_positions=False)
    summed = backward.key_gradients if backward.heads_per_program < N // G else []
    return backward.workspace.nbytes + sum(gradient.nbytes for gradient in summed)


@pytest.mark.parametrize("name", WORKSPACES)
def test_the_fused_kernels_workspace_is_counted_as_the_launcher_allocates_it(name):
    run = fused_run(name)
    memory = run.model.longest_memory + run.model.compressed_length
    counted = layer_bytes(run, run.data.lanes, True, "attention", memory).workspace
    for capability in CAPABILITIES:
        assert counted == launched_workspace_bytes(run, capability) > 0
    assert (counted > WORKSPACE_BYTES) == (name == "beyond")
    assert Footprint(run, 1, on_gpu=True).parts["activations"] > counted


def test_a_model_that_no_memory_can_hold_is_refused_before_it_is_drawn(corpus, tmp_path, capsys):
    (tmp_path / "run.yaml").write_text("model: {d_model: 65536, num_layers: 100}\n")
    command = ["train", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")]
    assert main([*command, f"data.path={corpus.directory.parent}", "data.lanes=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(r" [\d,]{13,} .* [\d,.]+ GiB ", said)
    assert not (tmp_path / "run").exists()


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
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "device: .*nvme"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients"),
        ({"zero_optimization": {"zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"zenflow": {}}}, "zenflow"),
        ({"bf16": {"enabled": True}}, "bf16.enabled"),
        ({"flops_profiler": {"enabled": True}}, "deepspeed_extra.flops_profiler.enabled"),
        ({"timers": {"throughput": {"enabled": True}}}, "throughput.enabled"),
    ],
)
def test_settings_that_contradict_the_run_are_rejected(extra: dict, named: str) -> None:
    run = RunConfig(model=MODEL, engine=EngineConfig(deepspeed_extra=extra))
    with pytest.raises(ConfigError, match=named):
        deepspeed_settings(run, 2, 4, on_gpu=False)


def test_a_shard_within_a_node_divides_the_ranks() -> None:
    extra = {"zero_optimization": {"zero_hpz_partition_size": 4}}
    run = RunConfig(model=MODEL, engine=EngineConfig(zero_stage=3, deepspeed_extra=extra))
    for ranks in (1, 2, 4, 8):
        deepspeed_settings(run, ranks, 1, on_gpu=True)
    with pytest.raises(ConfigError, match=r"zero_hpz_partition_size: found 4, .* 6 ranks"):
        deepspeed_settings(run, 6, 1, on_gpu=True)


@pytest.mark.parametrize("wrong", [{"overlap_com": True}, {"reduce_bucket_size": "large"}])
def test_settings_that_deepspeed_rejects_are_reported_in_one_line(wrong: dict) -> None:
    import deepspeed

    run = RunConfig(model=MODEL, engine=EngineConfig(deepspeed_extra={"zero_optimization": wrong}))
    with pytest.raises(ConfigError) as caught:
        check_settings(deepspeed, deepspeed_settings(run, 1, 1, on_gpu=False))
    assert str(caught.value).startswith("engine.deepspeed_extra")
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
def test_stages_2_and_3_reduce_gradients_early(stage, precision, offload, optimizer, overlaps):
    engine: dict = {"zero_stage": stage, "precision": precision, "offload_optimizer": offload}
    run = RunConfig(model=MODEL, engine=EngineConfig(**engine))
    assert deepspeed_optimizer(run) == optimizer
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
