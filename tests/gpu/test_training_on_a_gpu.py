"""What needs a GPU: the fused path is exact, and steps do not wait for the device."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest
import torch

from benchmarks.gpu.attention import errors
from benchmarks.gpu.context import Context
from benchmarks.gpu.exactness import CELLS, resume, resumed_differences, trained_twice
from benchmarks.gpu.kernels import CASES, repeats_its_bits
from benchmarks.gpu.report import findings_in
from benchmarks.gpu.startup import recorder
from benchmarks.gpu.training import Trainer, one_rank, small_run
from pretrain.config.choices import EngineKind
from pretrain.config.engine import EngineConfig
from pretrain.costs.zero_buffers import optimizer_of
from pretrain.engines.memory_offload import MemoryOffload
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


@pytest.fixture
def context(corpus: Path, tmp_path: Path) -> Context:
    context = Context(tmp_path, corpus, is_dry=False, step="test")
    context.work.mkdir(parents=True)
    return context


@pytest.mark.parametrize("name", CELLS)
def test_deepspeed_saved_beside_training_and_restored_repeats_its_bits(
    name: str, context: Context
) -> None:
    with one_rank() as world:
        assert resumed_differences(name, CELLS[name], context, world) == []


@pytest.mark.timeout(600)
def test_verify_resume_is_bitwise_at_every_stage_in_bf16(context: Context) -> None:
    resume(context)
    found = findings_in(context.parts)
    assert len(found) == 4
    assert all(each["passed"] for each in found.values()), found


def test_the_last_collectives_are_written_while_the_device_is_blocked(context: Context) -> None:
    recorder(context)
    (found,) = findings_in(context.parts).values()
    assert found["passed"], found


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
    context: Context,
) -> None:
    run = small_run(context, EngineConfig(kind="torch", precision="bf16"))
    with one_rank() as world:
        trainer, memory = Trainer(run, context.corpus, world, context.work), None
        try:
            for step in range(1, 9):
                if step >= 4:  # by then kernels are compiled, tables made and the memory is full
                    torch.cuda.set_sync_debug_mode("error")
                _, memory = trainer.engine.forward_backward(next(trainer.batches), memory, step)
                torch.cuda.set_sync_debug_mode("default")
                # It asks whether the gradients' norm may be applied: memories depend on it.
                trainer.engine.step(1e-3)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", CELLS)
def test_deepspeed_takes_the_optimizer_whose_buffers_are_counted(
    name: str, context: Context
) -> None:
    run = small_run(context, EngineConfig(**CELLS[name]))  # pyright: ignore[reportArgumentType]
    with one_rank() as world:
        engine = Trainer(run, context.corpus, world, context.work).engine
        wrapper = engine._optimizer  # pyright: ignore[reportAttributeAccessIssue]
        assert type(wrapper).__name__ == optimizer_of(run)


@pytest.mark.parametrize("kind", get_args(EngineKind))
def test_training_twice_gives_the_same_bits(context: Context, kind: EngineKind) -> None:
    run = small_run(context, EngineConfig(kind=kind, precision="bf16"))
    with one_rank() as world:
        first, second = trained_twice(run, context, world, steps=20)
    assert first == second
