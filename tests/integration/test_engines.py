"""Every ZeRO stage, precision and activation checkpointing against plain torch; resuming.

All cells train in one group of two ranks, then three more on one rank resume from what two ranks
saved.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint import directory as files
from pretrain.checkpoint import marker
from pretrain.checkpoint.elastic_reader import load_weights
from pretrain.commands.same_run import differing_state, summary
from pretrain.config.model import ModelConfig
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.engine_cells import (
    STAGES,
    STEPS,
    Results,
    assert_resumed_bitwise,
    cell,
    engine_settings,
    largest_difference,
    opened_files,
    read_result,
    train_cells,
    whole_and_resumed,
)
from tests.helpers.engine_worker import MODEL

# bf16: the two engines round gradients at different places (DeepSpeed sums them over ranks in fp32
# from bf16 values).
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}


RESUMED = ("offload", "overlapping")


def further_cells(name: str, engine: dict[str, Any]) -> list[dict[str, Any]]:
    """Whole; where optimizer or gradients take another way, resumed as well."""
    return (
        whole_and_resumed(name, engine)
        if name.endswith(RESUMED)
        else [cell(f"{name}-whole", engine, save_at=[])]
    )


MATRIX = {
    f"zero{stage}-{precision}-{checkpointing}": engine_settings(
        stage, precision, checkpointing, micro=2
    )
    for stage in STAGES
    for precision, checkpointing in (
        ("fp32", "none"),
        ("fp32", "full"),
        ("bf16", "none"),
        ("bf16", "full"),
    )
}


# Other ways to keep activations, and the optimizer on the CPU, under every stage that has them.
FURTHER = {
    f"zero{stage}-{precision}-{kind}": {
        **engine_settings(stage, precision, "none", micro=2),
        **more,
    }
    for kind, more in {
        "selective": {"activation_checkpointing": "selective"},
        "full-chunks": {
            "activation_checkpointing": "full",
            "logits_chunk_tokens": 6,
        },
        "offload": {"offload_optimizer": True},
    }.items()
    for stage, precision in (*((stage, "fp32") for stage in STAGES), (3, "bf16"))
    if kind != "offload" or (precision == "fp32" and stage in (1, 3))
} | {
    "zero2-bf16-overlapping": {
        **engine_settings(2, "bf16", "none", micro=2),
        "zero": {"overlap_comm": True},
    },
}

# Non-finite gradients on one rank, and gradients above the limit: by every way
# DeepSpeed updates weights.
HARMFUL = {
    "nan": {"fault": {"step": 3, "kind": "nan"}, "skips": [3], "until": 4},
    "long": {"recovery": {"skip_grad_norm": 1e-6}, "skips": [1, 2], "until": 2},
}

# What differs between models in the eyes of an engine: parameters that lie elsewhere, are shared,
# or learn from a loss of their own; each under the stage that partitions them.
MODELS: dict[str, dict[str, Any]] = {
    "modern": {
        "positions": "rope",
        "norm": "rmsnorm",
        "feed_forward": "swiglu",
        "num_key_heads": 1,
        "query_key_norm": True,
        "attention_sinks": True,
        "softmax_scaling": "log_length",
        "z_loss": 1e-3,
    },
    "adaptive": {
        "cutoffs": (40, 100),
        "div_val": 2,
        "tie_projections": (False, True, True),
        "positions": "t5",
        "base_width": 8,
    },
    "compressive": {"compressed_length": 6},
    "deltanet": {"layer_kinds": ("deltanet", "attention"), "isolate_documents": True},
}
COMPILED: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"compiled-zero{stage}": (stage, MODELS["modern"]) for stage in STAGES},
    "compiled-compressive": (3, MODELS["compressive"]),
    "compiled-deltanet": (3, MODELS["deltanet"]),
}
TORCHS_ATTENTION = {"positions": "rope", "num_key_heads": 1, "attention_dropout": 0.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "sdpa": {"model": TORCHS_ATTENTION},
    **{name: {"model": model} for name, model in MODELS.items()},
    # Segments of a step that teach each other through rows, states and memory tokens.
    "segments": {
        "model": {"layer_kinds": ("deltanet", "attention"), "memory_tokens": 2},
        "optim": {"gradient_segments": 3},
    },
}


# Compressed rows as well, which the elastic chain of test_elastic.py leaves out.
COMPRESSED: dict[str, Any] = {"compressed_length": 6, "isolate_documents": True}
EMA: dict[str, Any] = {"model": COMPRESSED, "optim": {"ema_decay": 0.9}}


@pytest.fixture(scope="session")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def results(tiny_corpus: Path, output: Path) -> Results:
    """Losses and norms by cell and step: plain torch on one rank, everything else on two."""
    on_two = [
        each for name, settings in MATRIX.items() for each in whole_and_resumed(name, settings)
    ]
    train_cells(tiny_corpus, output, on_two, num_ranks=2)
    plain = [
        cell(
            f"torch-{precision}",
            {"kind": "torch", **engine_settings(1, precision, "none", micro=0)},
        )
        for precision in ("fp32", "bf16")
    ]
    fewer = [
        cell(
            f"zero{stage}-on-one",
            engine_settings(stage, "fp32", "none"),
            resume=f"zero{origin}-fp32-none-half",
        )
        for stage, origin in ((0, 3), (3, 1), (1, 2))
    ]
    train_cells(tiny_corpus, output, plain + fewer, num_ranks=1)
    return {
        each["name"]: read_result(output / f"{each['name']}.json")
        for each in on_two + plain + fewer
    }


@pytest.fixture(scope="session")
def further(results: Results, tiny_corpus: Path, output: Path) -> Results:
    """The results and those of the further and the harmful cells, on two ranks."""
    cells = [each for name, settings in FURTHER.items() for each in further_cells(name, settings)]
    cells += [
        cell(f"{kind}-{name}", settings, save_at=[], **more)
        for name, settings in MATRIX.items()
        for kind, more in HARMFUL.items()
        if name.endswith("none")
    ]
    # Two more steps: what a skipped one left behind would show there.
    offloaded = {**engine_settings(2, "bf16", "none", micro=2), "offload_optimizer": True}
    cells.append(cell("nan-offloaded", offloaded, save_at=[], **{**HARMFUL["nan"], "until": 5}))
    train_cells(tiny_corpus, output, cells, num_ranks=2)
    return {
        **results,
        **{each["name"]: read_result(output / f"{each['name']}.json") for each in cells},
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_each_cell_agrees_with_plain_torch_on_one_process(results: Results, name: str) -> None:
    assert_agrees_with_plain_torch(results, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", FURTHER)
def test_each_further_cell_agrees_with_plain_torch_on_one_process(
    further: Results, name: str
) -> None:
    assert_agrees_with_plain_torch(further, name)


def assert_agrees_with_plain_torch(results: Results, name: str) -> None:
    precision = name.split("-")[1]
    plain, whole = results[f"torch-{precision}"], results[f"{name}-whole"]
    assert len(whole["losses"]) == STEPS
    assert largest_difference(whole["losses"], plain["losses"]) < TOLERANCE[precision]


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_all_ranks_skip_the_same_step_and_no_bit_of_the_engine_changes(
    further: Results, stage: int
) -> None:
    """The worker compares the bits; this checks that only the injected loss is NaN."""
    for precision in ("fp32", "bf16"):
        name = f"zero{stage}-{precision}-none"
        losses, whole = further[f"nan-{name}"]["losses"], further[f"{name}-whole"]["losses"]
        assert [step for step, loss in losses.items() if math.isnan(loss)] == [3]
        assert [losses[1], losses[2]] == [whole[1], whole[2]]
        assert further[f"long-{name}"]["losses"][1] == whole[1]


@pytest.mark.slow
def test_with_an_offloaded_optimizer_nothing_of_a_skipped_step_remains(further: Results) -> None:
    norms = further["nan-offloaded"]["norms"]
    assert [step for step, norm in norms.items() if not math.isfinite(norm)] == [3]
    assert norms[5] < 2 * norms[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MATRIX if "fp32" in name])
def test_gradient_norms_agree_with_plain_torch(results: Results, name: str) -> None:
    """A gradient that is wrong by a factor hardly changes Adam's losses, but its norm."""
    assert (
        largest_difference(results[f"{name}-whole"]["norms"], results["torch-fp32"]["norms"]) < 1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", MATRIX)
def test_a_resumed_cell_repeats_the_whole_one_bitwise(
    results: Results, output: Path, name: str
) -> None:
    assert_resumed_bitwise(results, output, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FURTHER if name.endswith(RESUMED)])
def test_a_run_with_an_offloaded_optimizer_or_another_reduction_resumes_bitwise(
    further: Results, output: Path, name: str
) -> None:
    assert_resumed_bitwise(further, output, name)


@pytest.fixture(scope="session")
def variants(tiny_corpus: Path, output: Path) -> Results:
    """ZeRO-3 with checkpointing and chunked logits on two ranks, resumed; plain torch on one."""
    engine = {**engine_settings(3, "fp32", "full", micro=2), "logits_chunk_tokens": 6}
    own = {"sdpa": {"attention_kernel": "sdpa"}}
    plain = {"kind": "torch", **engine_settings(1, "fp32", "none", micro=0)}
    on_two = [
        each
        for name, settings in VARIANTS.items()
        for each in whole_and_resumed(f"{name}-zero3", engine | own.get(name, {}), **settings)
    ]
    on_two += whole_and_resumed("ema-zero2", engine_settings(2, "fp32", "none", micro=2), **EMA)
    train_cells(tiny_corpus, output, on_two, num_ranks=2)
    on_one = [cell(f"{name}-torch", plain, **settings) for name, settings in VARIANTS.items()]
    on_one.append(cell("ema-on-one", engine, resume="ema-zero2-half", **EMA))
    train_cells(tiny_corpus, output, on_one, num_ranks=1)
    return {each["name"]: read_result(output / f"{each['name']}.json") for each in on_two + on_one}


@pytest.fixture(scope="session")
def compiled(tiny_corpus: Path, output: Path) -> Results:
    """Compiled models, with and without checkpointing, on two ranks; plain torch on one."""
    plain = {"kind": "torch", **engine_settings(1, "fp32", "none", micro=0)}
    on_two, on_one = [], []
    for name, (stage, model) in COMPILED.items():
        checkpointing = "full" if stage % 2 else "none"
        engine = {**engine_settings(stage, "fp32", checkpointing, micro=2), "compile": True}
        on_two += whole_and_resumed(name, engine, model={**model, "dropout": 0.0})
        on_one.append(cell(f"{name}-plain", plain, model={**model, "dropout": 0.0}))
    train_cells(tiny_corpus, output, on_two, num_ranks=2)
    train_cells(tiny_corpus, output, on_one, num_ranks=1)
    return {each["name"]: read_result(output / f"{each['name']}.json") for each in on_two + on_one}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_run_agrees_with_plain_torch_and_resumes_bitwise(
    compiled: Results, output: Path, name: str
) -> None:
    whole, plain = compiled[f"{name}-whole"], compiled[f"{name}-plain"]
    assert largest_difference(whole["losses"], plain["losses"]) < TOLERANCE["fp32"]
    assert largest_difference(whole["norms"], plain["norms"]) < 1e-4
    assert_resumed_bitwise(compiled, output, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_under_zero_3_agrees_with_plain_torch(variants: Results, name: str) -> None:
    found, plain = variants[f"{name}-zero3-whole"], variants[f"{name}-torch"]
    assert largest_difference(found["losses"], plain["losses"]) < TOLERANCE["fp32"]
    assert largest_difference(found["norms"], plain["norms"]) < 1e-4


@pytest.mark.slow
def test_an_ema_resumes_bitwise_and_at_another_world_size_and_stage(
    variants: Results, output: Path
) -> None:
    whole, resumed, on_one = (
        marker.verify(files.step_directory(output / name, STEPS))
        for name in ("ema-zero2-whole", "ema-zero2-resumed", "ema-on-one")
    )
    problems = differing_state(whole, resumed)
    assert not problems, summary(problems)
    emas, others, weights = (
        weights_of(found, ema) for found, ema in ((whole, True), (on_one, True), (whole, False))
    )
    assert all(torch.allclose(emas[name], others[name], rtol=0, atol=1e-5) for name in emas)
    assert max(float((emas[name] - weights[name]).abs().max()) for name in emas) > 1e-3
    losses, expected = (variants[name]["losses"] for name in ("ema-on-one", "ema-zero2-whole"))
    assert largest_difference(losses, expected) < TOLERANCE["fp32"]


def weights_of(found: marker.Checkpoint, ema: bool) -> dict[str, torch.Tensor]:
    module = TransformerXL(ModelConfig(**MODEL, **COMPRESSED))
    load_weights(module, found, ema)
    return dict(module.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_resumes_bitwise(variants: Results, output: Path, name: str) -> None:
    whole, half, resumed = (
        variants[f"{name}-zero3-{part}"] for part in ("whole", "half", "resumed")
    )
    assert {**half["losses"], **resumed["losses"]} == whole["losses"]
    assert opened_files(output / f"{name}-zero3-resumed.json") == [[0], [1]]
    ends = [
        marker.verify(files.step_directory(output / f"{name}-zero3-{part}", STEPS))
        for part in ("whole", "resumed")
    ]
    problems = differing_state(*ends)
    assert not problems, summary(problems)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero0-on-one", "zero3-on-one", "zero1-on-one"])
def test_another_world_size_and_stage_continue_with_the_same_losses(
    results: Results, name: str
) -> None:
    assert (
        largest_difference(results[name]["losses"], results["zero1-fp32-none-whole"]["losses"])
        < 1e-5
    )


@pytest.mark.slow
def test_activation_checkpointing_changes_no_bit(results: Results) -> None:
    for stage in STAGES:
        none, full = (results[f"zero{stage}-fp32-{kind}-whole"] for kind in ("none", "full"))
        assert none == full
