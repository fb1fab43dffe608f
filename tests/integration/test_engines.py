"""Every ZeRO stage, precision and activation checkpointing against plain torch; resuming.

Each cell is one training on two ranks: a step in it fails, it is saved twice, and the rest of it is
repeated from the first save. Stages meet each precision, way to keep activations, offload and
compilation; ZeRO-3, which partitions parameters, meets every model that is another to an engine.
"""

from itertools import product
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch

from pretrain.checkpoint.index import Checkpoint
from pretrain.checkpoint.load import load_weights
from pretrain.config.run import ModelConfig
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.engine_cells import (
    HALF,
    STAGES,
    STEPS,
    Results,
    assert_layers_agree,
    assert_resumed_bitwise,
    cell,
    engine_settings,
    findings_of,
    largest_difference,
    plain_torch,
    saved,
    train_cells,
    whole_and_resumed,
)
from tests.helpers.engine_worker import MODEL

# bf16: the two engines round gradients at different places (DeepSpeed sums them over ranks in fp32
# from bf16 values).
TOLERANCE = {"fp32": 1e-5, "bf16": 3e-2}
NORMS = {"fp32": 1e-4, "bf16": 2e-1}
LAYERS = {"fp32": 1e-4, "bf16": 5e-2}

# What differs between models in the eyes of an engine: parameters that lie elsewhere, are shared,
# or learn from a loss of their own.
MODERN: dict[str, Any] = {
    "positions": "rope", "norm": "rmsnorm", "feed_forward": "swiglu", "num_key_heads": 1,
    "query_key_norm": True, "attention_sinks": True, "softmax_scaling": "log_length",
    "z_loss": 1e-3,
}  # fmt: skip
ADAPTIVE = {"cutoffs": (40, 100), "div_val": 2, "tie_projections": (False, True, True)}
COMPILES = {"compile": True}
DELTANET = {"layer_kinds": ("deltanet", "attention"), "isolate_documents": True}
# Few lengths of a memory that fills, each of which is compiled.
COMPILED = {"dropout": 0.0, "memory_length": 8}
MODELS: dict[str, dict[str, Any]] = {
    "paper": {},
    "sdpa": {
        "model": {"positions": "rope", "num_key_heads": 1, "attention_dropout": 0.0},
        "engine": {"attention_kernel": "sdpa"},
    },
    "modern": {"model": MODERN},
    "adaptive": {"model": {**ADAPTIVE, "positions": "t5", "base_width": 8}},
    "compressive": {"model": {"compressed_length": 6}},
    "deltanet": {"model": DELTANET},
    # Segments of a step that teach each other through rows, states and memory tokens.
    "segments": {
        "model": {"layer_kinds": ("deltanet", "attention"), "memory_tokens": 2},
        "optim": {"gradient_segments": 3},
    },
    # Compressed rows as well, which the elastic chain of test_elastic.py leaves out.
    "ema": {
        "model": {"compressed_length": 6, "isolate_documents": True},
        "optim": {"ema_decay": 0.9},
    },
    "compiled": {"model": {**MODERN, **COMPILED}, "engine": COMPILES},
    "compiled-deltanet": {"model": {**DELTANET, **COMPILED}, "engine": COMPILES},
    "compiled-compressive": {"model": {"compressed_length": 6, **COMPILED}, "engine": COMPILES},
}

CHUNKS = {"logits_chunk_tokens": 6}
ONE_SLOT = {**CHUNKS, "micro_batch_lanes": 4}
OFFLOAD = {"offload_optimizer": True}
CELLS: list[tuple[int, str, str, str, dict[str, Any]]] = [
    (0, "fp32", "full", "paper", CHUNKS),
    (0, "fp32", "none", "compiled", {}),
    (0, "bf16", "selective", "compressive", {}),
    (1, "fp32", "selective", "adaptive", OFFLOAD),
    (1, "fp32", "full", "compiled", {}),
    (1, "bf16", "none", "deltanet", CHUNKS),
    (2, "fp32", "none", "ema", {}),
    (2, "fp32", "selective", "compiled-compressive", {}),
    (2, "bf16", "full", "modern", OFFLOAD),
    (3, "fp32", "none", "modern", {}),
    (3, "fp32", "selective", "sdpa", OFFLOAD),
    (3, "fp32", "full", "compiled-deltanet", {}),
    *((3, "fp32", "full", model, ONE_SLOT) for model in ("compressive", "deltanet", "segments")),
    (3, "bf16", "selective", "paper", {}),
    (3, "bf16", "full", "adaptive", CHUNKS),
]
FAILED = 3  # the step whose loss is NaN, on one of the ranks


def name_of(stage: int, precision: str, checkpointing: str, model: str, *_: Any) -> str:
    return f"zero{stage}-{precision}-{checkpointing}-{model}"


NAMES = {name_of(*each): each for each in CELLS}
EVERY_CELL = pytest.mark.parametrize("name", NAMES)
FAULT = {"step": FAILED, "kind": "nan"}
COMMON: dict[str, Any] = {"faults": [FAULT], "skips": [FAILED], "measure_at": [FAILED - 1]}


def settings_of(model: str) -> dict[str, Any]:
    return {"model": {}, **MODELS[model], **COMMON}


def all_cells() -> list[dict[str, Any]]:
    cells = []
    for stage, precision, checkpointing, model, engine in CELLS:
        settings = settings_of(model)
        own = settings.pop("engine", {})
        engine = {**engine_settings(stage, precision, checkpointing), **engine, **own}
        name = name_of(stage, precision, checkpointing, model)
        cells += whole_and_resumed(name, engine, **settings)
    for stage, precision in zip(STAGES, ("fp32", "bf16") * 2, strict=True):
        # Gradients above the limit, by every way DeepSpeed updates weights.
        limited = {"recovery": {"skip_grad_norm": 1e-6}, "skips": [1, 2], "until": 2}
        cells.append(cell(f"limited-zero{stage}", engine_settings(stage, precision), **limited))
    cells.append(cell("torch-on-two", plain_torch("fp32", micro=2), **COMMON))
    for model, precision in dict.fromkeys((each[3], each[1]) for each in CELLS):
        settings = settings_of(model)
        settings.pop("engine", None)
        plain = plain_torch(precision)
        cells.append(cell(f"torch-{precision}-{model}", plain, ranks=1, **settings))
    for stage, name in ON_ONE.items():
        settings = settings_of(NAMES[name][3])
        found = {"resume": name, "resume_at": HALF, "save_at": [STEPS]}
        engine = engine_settings(stage, "fp32", "full", micro=4)
        cells.append(cell(f"zero{stage}-on-one", engine, ranks=1, **settings, **found))
    return cells


EMA = "zero2-fp32-none-ema"
ON_ONE = {0: "zero3-fp32-none-modern", 3: "zero1-fp32-selective-adaptive", 1: EMA}


def test_the_cells_are_every_pair_that_matters() -> None:
    kinds = ("none", "selective", "full")
    assert {each[:2] for each in CELLS} == set(product(STAGES, TOLERANCE))
    assert {(each[0], each[2]) for each in CELLS} == set(product(STAGES, kinds))
    assert {each[1:3] for each in CELLS} == set(product(TOLERANCE, kinds))
    assert {each[0] for each in CELLS if "compiled" in each[3]} == set(STAGES)
    assert {each[0] for each in CELLS if each[4] == OFFLOAD} == {1, 2, 3}
    assert {each[3] for each in CELLS if each[0] == 3} >= MODELS.keys() - {
        "ema", "compiled", "compiled-compressive"
    }  # fmt: skip


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def results(tiny_corpus: Path, output: Path) -> Results:
    """Losses and norms by cell and step: plain torch on one rank, everything else on two."""
    return train_cells(tiny_corpus, output, all_cells())


@pytest.mark.slow
@EVERY_CELL
def test_each_cell_agrees_with_plain_torch_on_one_process(results: Results, name: str) -> None:
    """Also after a skipped step, and step by step: a gradient that is wrong by a factor hardly
    changes Adam's losses, but its norm.
    """
    _, precision, _, model, _ = NAMES[name]
    found, plain = results[name], results[f"torch-{precision}-{model}"]
    assert len(found["losses"]) == STEPS
    assert largest_difference(found["losses"], plain["losses"]) < TOLERANCE[precision]
    assert largest_difference(found["norms"], plain["norms"]) < NORMS[precision]
    assert_layers_agree(found, plain, LAYERS[precision])


@pytest.mark.slow
def test_plain_torch_averages_over_slots_and_ranks(results: Results) -> None:
    found, plain = results["torch-on-two"], results["torch-fp32-paper"]
    assert largest_difference(found["losses"], plain["losses"]) < TOLERANCE["fp32"]
    assert largest_difference(found["norms"], plain["norms"]) < NORMS["fp32"]


@pytest.mark.slow
@EVERY_CELL
def test_all_ranks_skip_the_same_step_and_no_bit_of_the_engine_changes(results: Results, name: str):
    """The worker compares the bits; this checks that only the injected loss is NaN."""
    losses = results[name]["losses"]
    assert [step for step, loss in losses.items() if isnan(loss)] == [FAILED]


@pytest.mark.slow
@EVERY_CELL
def test_a_resumed_cell_repeats_the_whole_one_bitwise(results: Results, output: Path, name: str):
    """Where ZeRO shards, from the files of its own rank alone."""
    assert_resumed_bitwise(results, output, name)
    if NAMES[name][0]:
        assert findings_of(output, f"{name}-resumed")["opened"] == [[0], [1]]


@pytest.mark.slow
@pytest.mark.parametrize("stage", ON_ONE)
def test_another_world_size_and_stage_continue_with_the_same_losses(results: Results, stage: int):
    found, expected = results[f"zero{stage}-on-one"], results[ON_ONE[stage]]
    assert largest_difference(found["losses"], expected["losses"]) < TOLERANCE["fp32"]


@pytest.mark.slow
def test_an_ema_resumes_at_another_world_size_and_stage(results: Results, output: Path) -> None:
    whole, on_one = (saved(output, name, STEPS) for name in (EMA, "zero1-on-one"))
    emas, others = (weights_of(each, ema=True) for each in (whole, on_one))
    weights = weights_of(whole, ema=False)
    assert all(torch.allclose(emas[name], others[name], rtol=0, atol=1e-5) for name in emas)
    assert max(float((emas[name] - weights[name]).abs().max()) for name in emas) > 1e-3


def weights_of(found: Checkpoint, ema: bool) -> dict[str, torch.Tensor]:
    module = TransformerXL(ModelConfig(**MODEL, **MODELS["ema"]["model"]))
    load_weights(module, found, ema)
    return dict(module.state_dict())
