"""What needs a GPU: the fused path is exact, and steps do not wait for the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.gpu import CHECKED, errors
from data_pipeline.corpora.corpus import Corpus
from data_pipeline.lanes.lane_stream import LaneStream
from pretrain.config.run import DataConfig, EngineConfig, ModelConfig, OptimConfig, RunConfig
from pretrain.distributed.world import destroy_process_group, init_world
from pretrain.engines.engine import TorchEngine
from pretrain.engines.memory_offload import MemoryOffload
from pretrain.model.transformer_xl import TransformerXL
from pretrain.processes.determinism import set_determinism
from tests.helpers.corpora import make_tiny_corpus

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_fused_path_is_as_exact_as_plain_operations(dtype: torch.dtype) -> None:
    found = list(errors(CHECKED, torch.device("cuda"), dtype))
    assert all(error.passes for error in found), found


def test_offloaded_memories_leave_room_on_the_device_and_change_no_bit() -> None:
    num_slots, shape = 12, (4, 1024, 256)
    device, megabytes = torch.device("cuda"), 4 * 1024 * 256 * 4 // 2**20
    weight = torch.randn(256, 256, device=device) / 16

    def run(is_on: bool) -> tuple[list[torch.Tensor], int]:
        offload = MemoryOffload(device, is_on)
        memories: list[tuple[torch.Tensor, ...]] = [
            (torch.full(shape, float(slot), device="cpu" if is_on else device),)
            for slot in range(num_slots)
        ]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(5):
            for slot in range(num_slots):
                fetched = offload.fetch(slot, memories[slot])
                assert fetched is not None
                memories[slot] = offload.store(slot, (torch.tanh(fetched[0] @ weight + slot),))
        offload.wait()
        assert all(memory[0].is_pinned() for memory in memories if is_on)
        peak = torch.cuda.max_memory_allocated() - before
        return [memory[0].cpu() for memory in memories], peak // 2**20

    (kept, _), (offloaded, peak) = run(is_on=False), run(is_on=True)
    assert all(torch.equal(left, right) for left, right in zip(kept, offloaded, strict=True))
    assert peak < num_slots // 2 * megabytes, f"{peak} MiB for memories of {megabytes} MiB each"


def test_passes_do_not_wait_for_the_device_and_a_step_does_so_once_at_its_end(
    tmp_path: Path,
) -> None:
    corpus = Corpus.open(make_tiny_corpus(tmp_path) / "train")
    model = ModelConfig(
        vocab_size=corpus.manifest.vocab_size,
        num_layers=2,
        d_model=64,
        num_heads=2,
        memory_length=16,
        dropout=0.1,
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
            engine.step(
                1e-3
            )  # asks whether the gradients' norm may be applied: memories depend on it
    finally:
        torch.cuda.set_sync_debug_mode("default")
        destroy_process_group()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_training_twice_gives_the_same_bits(tmp_path: Path, dropout: float) -> None:
    corpus = Corpus.open(make_tiny_corpus(tmp_path) / "train")
    model = ModelConfig(
        vocab_size=corpus.manifest.vocab_size,
        num_layers=2,
        d_model=256,
        num_heads=4,
        memory_length=96,
        dropout=dropout,
        attention_dropout=dropout,
    )
    run = RunConfig(
        model=model,
        data=DataConfig(lanes=4, segment_length=96),
        engine=EngineConfig(kind="torch", precision="bf16"),
    )
    world = init_world()
    set_determinism(run, world.device)

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(1)
        engine = TorchEngine(run, TransformerXL(model), world, accumulation_steps=1)
        stream, memory = LaneStream(corpus, 4, 1, 96, range(4)), None
        for step in range(1, 21):
            _, memory = engine.forward_backward(next(stream), memory, step)
            engine.step(1e-3)
        return [weight.detach().cpu() for weight in engine.module.parameters()]

    try:
        first, second = trained(), trained()
    finally:
        destroy_process_group()
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
