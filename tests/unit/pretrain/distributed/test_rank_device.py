"""Which GPU a rank takes, what is said where there are too few, and what lacks device memory."""

import os

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator, set_accelerator

from foundation.errors import EXIT_NODE_UNUSABLE, ConfigError, NodeError
from pretrain.cli import main
from pretrain.distributed import rank_device
from pretrain.distributed.rank_device import gpu_index
from pretrain.distributed.world import destroy_process_group, init_world, world_from_environment
from pretrain.engines.engine import is_out_of_memory
from tests.gpu_stubs.accelerator import CountingAccelerator
from tests.gpu_stubs.devices import Stub, cuda_functions

JOB = {"PRETRAIN_GPUS": "8", "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3"}
BOUND = {**JOB, "CUDA_VISIBLE_DEVICES": "0"}
ALL = {**JOB, "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}
SLURM = {"SLURM_GPUS_ON_NODE": "8", "RANK": "0", "WORLD_SIZE": "8"}
TOO_OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update"
NOT_READY = "Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized"


def has(monkeypatch, stub: Stub) -> None:
    for name, value in cuda_functions(stub).items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(
    ("environment", "stub", "expected"),
    [
        (JOB, Stub(), "cuda:3"),
        (ALL, Stub(), "cuda:3"),
        (BOUND, Stub(gpus=1), "cuda:0"),
        (JOB, Stub(gpus=1), "cuda:0"),  # bound by cgroups alone
        ({**JOB, "PRETRAIN_GPUS": "0"}, Stub(gpus=0), "cpu"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Stub(gpus=0), "cpu"),
        (JOB, Stub(cuda_error=TOO_OLD), "no usable CUDA.*expected 8.*too old"),
        (JOB, Stub(cuda_error=NOT_READY), "no usable CUDA.*Error 802"),
        (JOB, Stub(gpus=0), "no usable CUDA.*device count 0"),
        (SLURM, Stub(gpus=0), "no usable CUDA.*expected 8 GPUs"),
        ({**JOB, "CUDA_VISIBLE_DEVICES": ""}, Stub(gpus=0), "CUDA_VISIBLE_DEVICES=[,)]"),
        (JOB, Stub(gpus=7), "found 7 GPUs, expected 8"),
        (ALL, Stub(gpus=1), "found 1 GPUs, expected 8"),  # not bound: seven are lost
    ],
)  # fmt: skip
def test_a_rank_of_a_job_takes_its_gpu_or_says_what_its_node_lacks(
    monkeypatch, environment, stub, expected
):
    has(monkeypatch, stub)
    monkeypatch.setattr(rank_device, "driver_version", lambda: "535.104.05")
    if expected in ("cpu", "cuda:0", "cuda:3"):
        assert world_from_environment(environment).device == torch.device(expected)
        return
    with pytest.raises(NodeError, match=expected) as raised:
        world_from_environment(environment)
    text = str(raised.value)
    assert "\n" not in text
    facts = ("device count", "torch.version.cuda", "driver 535.104.05", "CUDA_VISIBLE_DEVICES=")
    assert all(fact in text for fact in facts)


def test_more_ranks_than_gpus_without_a_job_are_the_user_s_mistake():
    with pytest.raises(ConfigError, match="start as many ranks as GPUs"):
        gpu_index(2, 2)


@pytest.mark.parametrize(
    ("stub", "text"),
    [
        (Stub(gpus=0), "no usable CUDA, expected 8 GPUs on this node"),
        (Stub(gpus=8), "no device memory before training: NCCL Cuda failure 2 'out of memory'"),
    ],
)
def test_a_rank_without_its_gpu_ends_by_its_node_s_status_in_one_line(
    monkeypatch, tmp_path, capsys, corpus, stub, text
):
    destroy_process_group()
    for name, value in {**JOB, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    has(monkeypatch, stub)

    def init(*_: object, **__: object) -> None:
        raise torch.distributed.DistBackendError("NCCL Cuda failure 2 'out of memory'")

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    experiment = tmp_path / "tiny.yaml"
    experiment.write_text(f"data: {{path: {corpus.directory.parent}}}\n")
    assert main(["train", str(experiment), f"--run-dir={tmp_path / 'run'}"]) == EXIT_NODE_UNUSABLE
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
    assert not (tmp_path / "run").exists()


def test_deepspeed_takes_the_only_gpu_that_a_bound_task_sees(monkeypatch):
    destroy_process_group()
    for name, value in {**BOUND, "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    has(monkeypatch, Stub(gpus=1))
    init, before = torch.distributed.init_process_group, get_accelerator()
    without_nccl = {"device_id": None}
    monkeypatch.setattr(
        torch.distributed,
        "init_process_group",
        lambda _, **options: init("gloo", **options | without_nccl),
    )
    accelerator = CountingAccelerator(visible=1)
    set_accelerator(accelerator)
    try:
        world = init_world()
        module = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(module.parameters())
        settings = {"train_batch_size": 1, "zero_optimization": {"stage": 1}}
        settings["zero_allow_untested_optimizer"] = True
        deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
        assert init_world().local_rank == world.local_rank == 3
    finally:
        set_accelerator(before)
        destroy_process_group()
    assert accelerator.devices == [0]
    assert os.environ["LOCAL_RANK"] == "3"


NCCL = "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error, NCCL version 2.30.7\n"


@pytest.mark.parametrize(
    ("error", "is_shortage"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("std::bad_alloc"), True),
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might"), True),
        (RuntimeError("CUDA driver error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("CUSOLVER_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError(f"{NCCL}Last error:\nCuda failure 2 'out of memory'"), True),
        (RuntimeError(f"{NCCL}Last error:\nFailed to CUDA calloc async 608 bytes"), True),
        (RuntimeError("HIP out of memory. Tried to allocate"), True),
        (RuntimeError("unable to mmap 64 bytes: Cannot allocate memory (12)"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError(f"{NCCL}Last error:\nCuda failure 802 'system not yet initialized'"), False),
        (RuntimeError(f"{NCCL}Last error:\nError while attaching to shared memory segment"), False),
        (RuntimeError("out of resource: shared memory, Required: 262144"), False),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4711"), False),
        (RuntimeError("Cuda failure 217 'peer access is not supported'"), False),
        (ValueError("the rank ran out of memory yesterday"), False),
    ],
)
def test_no_memory_left_is_recognized_whoever_asked_for_it(error, is_shortage):
    assert is_out_of_memory(error) is is_shortage


def test_no_memory_left_behind_a_compiler_s_error_is_recognized():
    outer = RuntimeError("backend='inductor' raised")
    outer.__cause__ = RuntimeError("Triton Error [CUDA]: out of memory")
    assert is_out_of_memory(outer)
