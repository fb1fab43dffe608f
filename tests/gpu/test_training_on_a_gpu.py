"""What needs a GPU: the fused path is exact, and steps do not wait for the device."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.findings import Context
from benchmarks.gpu.resume import CELLS, resumed_differences
from benchmarks.gpu.training import Trainer, forget, one_rank, small_run
from pretrain.config.model import EngineKind
from pretrain.config.run import EngineConfig
from pretrain.costs.device_memory import deepspeed_optimizer
from pretrain.engines.memory_offload import MemoryOffload
from pretrain.mixers.deltanet.delta_rule import DeltaInputs, delta_rule_by_step, fla_delta_rule
from pretrain.mixers.deltanet.module import normalized
from pretrain.processes.flight_recorder import write_last_collectives
from pretrain.rundir.attempt_files import AttemptFiles
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.fused_attention_cases import CASES, Case, errors_of
from tests.unit.pretrain.model.test_model_parts import random_inputs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPU_CORPUS, since a machine without a network may lack what writes shards, or a new one."""
    given = os.environ.get("GPU_CORPUS")
    return Path(given) if given else make_tiny_corpus(tmp_path_factory.mktemp("corpus"))


# Those with the interpreter's own layout of keys, or a table of tiles, are not for a GPU.
FUSED = {
    name: replace(case, H=width)
    for name, case in CASES.items()
    if case.dtype is torch.float32 and case.key_strides is None and not case.from_table
    for width in [case.H if case.H > 24 else 64]
} | {"long": Case(N=1, L=600, M=500, H=128, deterministic=True)}
TOLERANCE = {torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", FUSED)
def test_the_fused_kernels_agree_with_float64(name: str, dtype: torch.dtype) -> None:
    found = errors_of(replace(FUSED[name], dtype=dtype, device="cuda"))
    assert all(error < TOLERANCE[dtype] for error in found.values()), found


@pytest.fixture
def context(corpus: Path, tmp_path: Path) -> Context:
    paths = {"out": tmp_path, "results": tmp_path / "results.jsonl", "corpus": corpus}
    context = Context(**paths, step="s", device_name="GPU")
    context.work.mkdir(parents=True)
    return context


@pytest.mark.parametrize("name", CELLS)
def test_deepspeed_saved_beside_training_and_restored_repeats_its_bits(name: str, context: Context):
    with one_rank() as world:
        assert resumed_differences(name, context, world) == []


def test_the_last_collectives_are_written_while_the_device_is_blocked(tmp_path: Path) -> None:
    with one_rank() as world:
        ones = torch.ones(3, device=world.device)
        dist.all_reduce(ones)
        torch.cuda.synchronize()
        torch.cuda._sleep(10_000_000_000)  # cycles: about five seconds
        work = dist.all_reduce(ones, async_op=True)
        AttemptFiles(tmp_path, 0).create()
        start = time.monotonic()
        paths = write_last_collectives(tmp_path, 0, {})
        assert time.monotonic() - start < 5.0, "the watchdog waits no longer"
        assert work is not None
        work.wait()
    records = {path.name: pickle.loads(path.read_bytes())["entries"] for path in paths}
    assert len(records["nccl-rank-0"]) >= 2


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


def test_passes_do_not_wait_for_the_device_and_a_step_does_so_once_at_its_end(context: Context):
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


@pytest.mark.parametrize("is_isolated", [False, True])
def test_fla_computes_the_delta_rule_with_its_gradients(is_isolated: bool) -> None:
    pytest.importorskip("fla")
    inputs, state_BNHX = random_inputs(200, (5, 6, 71, 128) if is_isolated else None)
    names = [each.name for each in fields(DeltaInputs) if each.name != "documents_BL"]
    if inputs.documents_BL is not None:
        inputs = replace(inputs, documents_BL=inputs.documents_BL.cuda())

    def outputs(rule: Callable[..., Any], half: torch.dtype, exact: torch.dtype) -> list[Any]:
        types = dict.fromkeys(names[:3], half) | dict.fromkeys(names[3:], exact)
        leaves = {
            name: getattr(inputs, name).bfloat16().to("cuda", dtype).requires_grad_()
            for name, dtype in types.items()
        }
        state = state_BNHX.to("cuda", exact).requires_grad_()
        found = rule(replace(inputs, **leaves), state)
        loss = sum((each.double() * each.detach().double().sin()).sum() for each in found)
        assert isinstance(loss, torch.Tensor)
        return [*found, *torch.autograd.grad(loss, (*leaves.values(), state))]

    found = outputs(fla_delta_rule, torch.bfloat16, torch.float32)
    double = (torch.float64, torch.float64)
    expected = outputs(lambda each, state: delta_rule_by_step(normalized(each), state), *double)
    for left, right in zip(found, expected, strict=True):
        assert (left.double() - right).norm() < 0.02 * right.norm()


@pytest.mark.parametrize("name", CELLS)
def test_deepspeed_takes_the_optimizer_whose_buffers_are_counted(name: str, context: Context):
    engine, model = CELLS[name]
    run = small_run(context, EngineConfig(**engine), **model)
    with one_rank() as world:
        engine = Trainer(run, context.corpus, world, context.work).engine
        wrapper = engine._optimizer  # pyright: ignore[reportAttributeAccessIssue]
        assert type(wrapper).__name__ == deepspeed_optimizer(run)


@pytest.mark.parametrize("kind", get_args(EngineKind))
def test_training_twice_gives_the_same_bits(context: Context, kind: EngineKind) -> None:
    run, found = small_run(context, EngineConfig(kind=kind, precision="bf16")), []
    with one_rank() as world:
        for _ in range(2):
            trainer = Trainer(run, context.corpus, world, context.work)
            found.append((trainer.steps(20), trainer.bits()))
            trainer.engine.close()
            del trainer
            forget(context.device)
    assert found[0] == found[1]
