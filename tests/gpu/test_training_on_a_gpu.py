"""What only a GPU can show: the fused path is exact, and the loop never waits for the device between its intervals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_pipeline.corpus import Corpus
from data_pipeline.lanes import LaneStream
from pretrain.bench.gpu import CHECKED
from pretrain.bench.gpu_report import correctness
from pretrain.config import DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.distributed import init_world, leave_world
from pretrain.engine import TorchEngine
from pretrain.model.transformer_xl import TransformerXL
from tests.helpers.corpora import make_tiny_corpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_path_is_as_exact_as_plain_operations(dtype: torch.dtype) -> None:
    text, passes = correctness(CHECKED, torch.device("cuda"), dtype)
    assert passes, text


def test_passes_do_not_wait_for_the_device_and_a_step_does_so_once_at_its_end(tmp_path: Path) -> None:
    corpus = Corpus.open(make_tiny_corpus(tmp_path) / "train")
    model = ModelConfig(
        vocab_size=corpus.manifest.vocab_size, num_layers=2, d_model=64, num_heads=2, memory_length=16, dropout=0.1
    )
    run = RunConfig(
        model=model,
        data=DataConfig(lanes=4, segment_length=16),
        optim=OptimConfig(clip_norm=1.0),
        engine=EngineConfig(kind="torch", precision="bf16"),
    )
    world = init_world()
    try:
        engine = TorchEngine(run, TransformerXL(model), world, accumulation_steps=1)
        stream = LaneStream(corpus, 4, 1, 16, range(4))
        memory = None
        for step in range(1, 9):
            if step >= 4:  # by then kernels are compiled, tables made and the memory is full
                torch.cuda.set_sync_debug_mode("error")
            _, memory = engine.forward_backward(next(stream), memory, step)
            torch.cuda.set_sync_debug_mode("default")
            engine.step(1e-3)  # asks whether the gradients' norm may be applied: memories depend on it
    finally:
        torch.cuda.set_sync_debug_mode("default")
        leave_world()
