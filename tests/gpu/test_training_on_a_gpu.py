"""What needs a GPU: the fused path is exact, and steps do not wait for the device."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.attention import errors
from benchmarks.gpu.context import Context
from benchmarks.gpu.exactness import CELLS, resumed_differences
from benchmarks.gpu.kernels import CASES, repeats_its_bits
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


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPU_CORPUS, since a machine without a network may lack what writes shards, or a new one."""
    given = os.environ.get("GPU_CORPUS")
    return Path(given) if given else make_tiny_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_the_fused_path_is_as_exact_as_plain_operations_and_repeats_its_bits(
    name: str, dtype: torch.dtype
) -> None:
    found = errors(CASES[name], torch.device("cuda"), dtype)
    assert all(error["passed"] for error in found.values()), found
    assert repeats_its_bits(CASES[name], torch.device("cuda"), dtype)


@pytest.mark.parametrize("name", CELLS)
def test_deepspeed_saved_beside_training_and_restored_repeats_its_bits(
    name: str, corpus: Path, tmp_path: Path
) -> None:
    context = Context(tmp_path, corpus, is_dry=False, step="stages")
    world = init_world()
    try:
        assert resumed_differences(name, CELLS[name], context, world) == []
    finally:
        destroy_process_group()


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
    corpus: Path,
) -> None:
    training = Corpus.open(corpus / "train")
    model = ModelConfig(
        vocab_size=training.manifest.vocab_size,
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
        stream = LaneStream(training, 4, 1, 16, range(4))
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
def test_training_twice_gives_the_same_bits(corpus: Path, dropout: float) -> None:
    training = Corpus.open(corpus / "train")
    model = ModelConfig(
        vocab_size=training.manifest.vocab_size,
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
        stream, memory = LaneStream(training, 4, 1, 96, range(4)), None
        for step in range(1, 21):
            _, memory = engine.forward_backward(next(stream), memory, step)
            engine.step(1e-3)
        return [weight.detach().cpu() for weight in engine.module.parameters()]

    try:
        first, second = trained(), trained()
    finally:
        destroy_process_group()
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))
