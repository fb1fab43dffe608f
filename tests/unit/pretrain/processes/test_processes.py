"""A rank's device, the meeting of ranks, their threads, and what a hang leaves."""

import datetime
import io
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]
from torch.utils import deterministic

from foundation.errors import ConfigError
from foundation.files import await_text
from pretrain.config.engine import Attention, attention_in
from pretrain.config.run import EngineConfig, ModelConfig, RunConfig
from pretrain.distributed.rank_device import gpu_index
from pretrain.distributed.rendezvous import collective_timeout, rendezvous_store
from pretrain.distributed.world import (
    destroy_process_group,
    init_world,
    ranks_on_this_node,
    world_from_environment,
)
from pretrain.kernels.flash_linear_attention import CONFIGURATIONS
from pretrain.kernels.triton.settings import DTYPES
from pretrain.model.attention_backends import backend_for
from pretrain.model.parameters import dtype_of
from pretrain.processes import device
from pretrain.processes.device import set_determinism, set_device_variables, with_precision_of_run
from pretrain.processes.flight_recorder import (
    OWN_FILES,
    dumps,
    set_trace_files,
    write_last_collectives,
)
from pretrain.recovery import environment, start_record
from pretrain.recovery.environment import environment_changes, own_environment
from pretrain.run import set_threads_of_rank
from pretrain.rundir.attempt_files import AttemptFiles
from pretrain.rundir.code_version import CODE_PACKAGES, code_version
from pretrain.rundir.run_dir import RunDir
from pretrain.weights.export import precision_on
from tests.helpers.checkout import ROOT
from tests.helpers.choices import choices_of

GPU = torch.device("cuda", 0)


def run_in(precision: str, **engine) -> RunConfig:
    return RunConfig(engine=EngineConfig(precision=precision, **engine))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "auto"])
def test_a_trained_model_computes_as_its_run_on_a_gpu_and_in_float32_on_a_cpu(precision):
    run = run_in(precision, attention_kernel="plain")
    assert precision_on(GPU, run) == precision.replace("auto", "fp32")
    assert precision_on(torch.device("cpu"), run) == "fp32"


def test_auto_is_fp32_on_a_cpu_or_what_a_run_has_recorded(world, tmp_path, caplog):
    RunDir.create(tmp_path / "run", run_in("bf16"))  # as a GPU would have
    for name, given, precision in (
        ("new", "auto", "fp32"),
        ("new", "bf16", "bf16"),
        ("run", "auto", "bf16"),
        ("run", "fp32", "fp32"),  # a change that the user asks for is logged by the directory
    ):
        with caplog.at_level(logging.INFO):
            resolved = with_precision_of_run(run_in(given), tmp_path / name, world)
            assert resolved == run_in(precision, compile=False)
        assert ("bf16" in caplog.text) == ((name, given) == ("run", "auto"))
        caplog.clear()


def test_a_gpu_compiles_a_new_run_if_it_can_and_an_old_one_stays(world, tmp_path, monkeypatch):
    monkeypatch.setattr(device, "has_bf16", lambda _: True)
    for name, compiles in (("eager", False), ("compiled", True)):
        RunDir.create(tmp_path / name, run_in("bf16", compile=compiles))
    dropping, long = ModelConfig(dropout=0.1), ModelConfig(dropout=0.0, memory_length=100_000)
    for name, asked, model, expected in (
        ("new", "auto", ModelConfig(dropout=0.0), True),
        ("new", False, ModelConfig(dropout=0.0), False),
        ("new", "auto", dropping, False),
        ("new", "auto", long, False),
        ("new", True, long, True),
        ("eager", "auto", ModelConfig(dropout=0.0), False),
        ("eager", True, ModelConfig(dropout=0.0), True),
        ("compiled", "auto", ModelConfig(dropout=0.0), True),
    ):
        run = replace(run_in("auto", compile=asked), model=model)
        resolved = with_precision_of_run(run, tmp_path / name, world)
        assert resolved.engine.compile is expected, (name, asked, model)


@pytest.mark.parametrize(
    ("kernel", "device", "is_bitwise"),
    [
        ("auto", GPU, True),
        ("plain", GPU, True),
        ("atomic", GPU, False),
        ("auto", torch.device("cpu"), False),
    ],
)
def test_a_gpu_repeats_its_bits_unless_told_not_to(monkeypatch, caplog, kernel, device, is_bitwise):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fills = deterministic.fill_uninitialized_memory
    try:
        set_determinism(run_in("bf16", attention_kernel=kernel), device)
        assert torch.are_deterministic_algorithms_enabled() == is_bitwise
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == is_bitwise
        assert ("not bitwise" in caplog.text) == (kernel == "atomic")
    finally:
        torch.use_deterministic_algorithms(False)
        deterministic.fill_uninitialized_memory = fills
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.parametrize(("kernel", "is_bitwise"), [("auto", True), ("atomic", False)])
def test_the_fused_kernel_has_an_order_unless_told_otherwise(monkeypatch, kernel, is_bitwise):
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # else no kernel fits this machine
    path = backend_for(kernel, ModelConfig(), torch.device("cpu"), torch.float32)
    assert path.keywords == {"is_bitwise": is_bitwise}  # type: ignore[attr-defined]


@pytest.mark.parametrize("precision", dict(choices_of(EngineConfig))["precision"])
def test_settings_and_tensors_agree_on_which_precisions_the_fused_kernel_takes(precision):
    run = run_in(precision)
    takes = dtype_of(run.engine.number_format) in DTYPES
    assert (attention_in(run.engine, run.model, on_gpu=True)[0] is Attention.FUSED) == takes


TASK = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
SETTINGS = "expandable_segments:True,pinned_max_round_threshold_mb:1"
GROWING = {"PYTORCH_CUDA_ALLOC_CONF": SETTINGS}


@pytest.mark.parametrize(
    ("given", "caches"),
    [
        ({}, False),
        (TASK, True),
        ({**TASK, "TRITON_CACHE_DIR": "/mine"}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, False),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, False),
    ],
)
def test_a_rank_gets_what_nobody_has_set(tmp_path, given, caches):
    torch._C._accelerator_setAllocatorSettings(SETTINGS)  # which are some that torch knows
    environment = dict(given)
    set_device_variables(environment, tmp_path)
    own = {} if any("ALLOC" in name for name in given) else dict(GROWING)
    cache = tmp_path / f"triton-{os.getuid()}"
    own |= {"TRITON_CACHE_DIR": str(cache)} if caches else {}
    assert environment == {**given, **own}
    assert cache.exists() == caches


def test_an_older_torch_gets_no_setting_that_it_does_not_know(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(device, "version", lambda name: "2.11.0")
    environment: dict[str, str] = {}
    set_device_variables(environment, tmp_path)
    assert environment == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@pytest.mark.parametrize(
    "make",
    [lambda path: path.symlink_to(path.parent), Path.touch, lambda path: os.mkdir(path, 0o777)],
    ids=["link", "file", "open to others"],
)
def test_a_cache_that_another_user_may_have_made_is_not_used(tmp_path: Path, make) -> None:
    mask = os.umask(0)
    make(tmp_path / f"triton-{os.getuid()}")
    os.umask(mask)
    environment = dict(TASK)
    set_device_variables(environment, tmp_path)
    assert "TRITON_CACHE_DIR" not in environment


def met(number: int, file: Path, monkeypatch: pytest.MonkeyPatch) -> list[Store]:
    """The store of each rank of a run of two."""
    monkeypatch.setenv("PRETRAIN_PORT_FILE", str(file))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")  # is not used, and restored afterwards
    stores: list[Store] = []
    second = threading.Thread(target=lambda: stores.append(rendezvous_store(1, 2)))
    second.start()
    time.sleep(0.1)  # it comes before rank 0 has written the file
    first = rendezvous_store(0, 2)
    second.join(30)
    first.set("run", str(number))
    return [first, *stores]


def remembering(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """As on a network file system: a name that was looked up in vain stays missing."""
    missed: set[Any] = set()

    def answer(path: Any, *arguments: Any, **options: Any) -> Any:
        if path in missed:
            raise FileNotFoundError(path)
        try:
            return look_up(path, *arguments, **options)
        except FileNotFoundError:
            missed.add(path)
            raise

    return answer


def test_a_rank_that_looked_for_the_port_too_early_still_finds_it(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "open", remembering(io.open))
    monkeypatch.setattr(os, "stat", remembering(os.stat))
    first, second = met(0, tmp_path / "port", monkeypatch)
    assert second.get("run") == b"0"
    assert first.num_keys() == second.num_keys()


def test_ranks_that_wait_for_the_port_list_nothing_else(tmp_path, monkeypatch):
    """A listing of thousands of logs by each of thousands of ranks would stop a file server."""
    files = AttemptFiles(tmp_path / "logs", 3)
    files.create_meeting()
    files.port.write_text("1\n")
    files.create_meeting()  # the supervisor was killed, and its attempt's number is used again
    for log in files.rank_logs(5):
        log.touch()
    listed: list[int] = []
    names_in = os.listdir
    monkeypatch.setattr(
        os, "listdir", lambda path: (listed.append(len(names_in(path))), names_in(path))[1]
    )
    first, second = met(0, files.port, monkeypatch)
    assert (first.get("run"), second.get("run")) == (b"0", b"0")
    assert (listed[0], max(listed)) == (0, 1)


def test_a_file_that_nobody_writes_is_waited_for_as_long_as_asked(tmp_path):
    with pytest.raises(TimeoutError, match="port"):
        await_text(tmp_path / "port", 0.1)


def test_runs_that_start_together_each_meet_at_their_own_port(tmp_path, monkeypatch):
    runs = [met(number, tmp_path / f"{number}.port", monkeypatch) for number in range(3)]
    found = [[store.get("run") for store in stores] for stores in runs]
    assert found == [[b"0"] * 2, [b"1"] * 2, [b"2"] * 2]


def test_the_watchdog_ends_a_hang_before_any_collective_does_whatever_its_patience():
    for seconds in (15.0, EngineConfig().watchdog_timeout_seconds, 7200.0):
        assert collective_timeout(seconds).total_seconds() > seconds + 24 * 3600  # and a suspension
    assert collective_timeout(0) == datetime.timedelta(minutes=30)


def test_groups_that_deepspeed_creates_have_the_timeout_of_the_run(monkeypatch):
    destroy_process_group()
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    init_world(watchdog_timeout_seconds=1800.0)
    group = dist.new_group([0])
    assert isinstance(group, dist.ProcessGroup)
    options = group._get_backend(torch.device("cpu")).options
    assert options._timeout == collective_timeout(1800.0)
    destroy_process_group()


def test_a_world_size_without_a_rank_is_refused_where_it_would_train_alone():
    for name in ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE"):
        with pytest.raises(ConfigError, match=f"found {name}=2"):
            world_from_environment({name: "2"})
    assert world_from_environment({"WORLD_SIZE": "1"}).world_size == 1


@pytest.mark.parametrize(
    ("local_rank", "visible", "index"),
    [(0, 1, 0), (0, 8, 0), (7, 8, 7), (3, 1, 0), (7, 1, 0), (1, 2, 1)],
)
def test_a_rank_takes_its_own_gpu_whether_the_site_shows_it_one_or_all(local_rank, visible, index):
    assert gpu_index(local_rank, visible) == index


def test_more_ranks_than_gpus_on_a_node_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"^.* 2\b.* 2 .*$"):
        gpu_index(2, 2)


SLURM_TASK = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
SLURM_TASK["MASTER_ADDR"] = "127.0.0.1"
RANK = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.parametrize(
    ("environment", "name", "value"),
    [
        *((RANK, name, value) for name in ("RANK", "WORLD_SIZE") for value in ("abc", "")),
        *((RANK, "MASTER_PORT", value) for value in ("abc", "", "70000", "-1")),
        *((RANK, name, "abc") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")),
        *((RANK, *wrong) for wrong in (("RANK", "5"), ("RANK", "-1"), ("LOCAL_RANK", "-1"))),
        *((SLURM_TASK, name, "abc") for name in SLURM_TASK if name.startswith("SLURM")),
        (SLURM_TASK, "SLURM_STEP_NUM_NODES", "abc"),
    ],
)
def test_an_impossible_rank_variable_is_named_in_one_line(monkeypatch, environment, name, value):
    for each in (*RANK, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(each, raising=False)
    for each, text in {**environment, name: value}.items():
        monkeypatch.setenv(each, text)
    join = ranks_on_this_node if name == "LOCAL_WORLD_SIZE" else init_world
    with pytest.raises(ConfigError, match=name) as raised:
        join()
    assert "\n" not in str(raised.value)
    destroy_process_group()


def test_the_openmp_of_a_command_spins_for_a_thousand_rounds_and_no_longer():
    command, environment = [sys.executable, "-m", "pretrain", "evaluate", "missing"], {**os.environ}
    environment["OMP_DISPLAY_ENV"] = "verbose"
    shown = subprocess.run(command, env=environment, capture_output=True, text=True).stderr
    found = dict(re.findall(r"(\w+) = '(\w+)'", shown))
    assert (found["OMP_WAIT_POLICY"], found["GOMP_SPINCOUNT"]) == ("PASSIVE", "1000")


def test_no_start_is_called_different_for_how_its_threads_wait() -> None:
    found = own_environment(torch.device("cpu"), RunConfig())
    assert not environment_changes({**found, "threads wait": "another"}, found)
    assert environment_changes({**found, "threads": "97"}, found)


def test_a_start_records_the_configurations_of_a_hybrids_kernels(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(environment, "table_name", lambda: "")
    hybrid = ModelConfig(vocab_size=8, layer_kinds=("deltanet",))
    engine = EngineConfig(precision="bf16")
    found = []
    for model, settings in ((hybrid, engine), (ModelConfig(vocab_size=8), engine), (hybrid, None)):
        run = RunConfig(model=model, engine=settings or EngineConfig())
        found.append(own_environment(torch.device("cuda"), run).get("delta rule"))
    monkeypatch.setitem(CONFIGURATIONS, next(iter(CONFIGURATIONS)), ({"BT": 64}, 4, 3))
    run = RunConfig(model=hybrid, engine=engine)
    other = own_environment(torch.device("cuda"), run)["delta rule"]
    assert found[0].startswith("fla-core 0.6.0, configurations ")
    assert found[1:] == [None, "none"]
    assert other not in found


@pytest.mark.parametrize(
    ("before", "now", "changed"),
    [
        ("n1 n1 n2 n2", "n1 n1 n2 n2", None),
        ("n1 n1 n2 n2", "n2 n2 n3 n3", ("n1, n2", "n2, n3")),
        ("n1 n1", "n7 n7", None),  # the same GPUs of one host sum alike
        ("none none", "none none", None),  # gloo
        ("n1 n1", "n1 n2", ("one", "n1, n2")),
    ],
)
def test_a_start_on_other_hosts_is_another_environment_of_nccl(
    before, now, changed, tmp_path, monkeypatch
) -> None:
    destroy_process_group()  # of another test
    world = init_world()
    RunDir.create(tmp_path, RunConfig())
    known = None
    for step, hosts in enumerate((before, now)):
        ranks = [{"torch": "2", "hosts of NCCL": host} for host in hosts.split()]
        monkeypatch.setattr(start_record, "gather_values", lambda *_, ranks=ranks: ranks)
        where = {"world_size": len(ranks), "attempt": "a"}
        start_record.record_start(RunDir(tmp_path), world, RunConfig(), step, {}, where, known)
        (*_, began) = RunDir(tmp_path).ledger.read()
        known = began.environment
    assert began.changes == ({"hosts of NCCL": changed} if changed else {})
    destroy_process_group()


def test_a_rank_takes_the_threads_of_its_environment_else_its_part_of_the_cores(monkeypatch):
    torch.set_num_threads(3)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "5")
    set_threads_of_rank()
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "5", "the user's"
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    assert torch.get_num_threads() == 3, "torch has read the variable itself"
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    set_threads_of_rank()
    assert torch.get_num_threads() == 2
    assert os.environ["TORCHINDUCTOR_COMPILE_THREADS"] == "2"
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3})
    set_threads_of_rank()
    assert torch.get_num_threads() == 1, "bound to one core"


def version_of(copy: Path) -> str:
    code = "from pretrain.rundir.code_version import code_version; print(code_version(), end='')"
    words, environment = [sys.executable, "-c", code], {"PYTHONPATH": str(copy)}
    return subprocess.check_output(words, cwd=copy, env=environment, text=True)


def test_a_copy_of_the_code_has_its_version_and_an_edit_another(tmp_path):
    ours = shutil.ignore_patterns("__pycache__")
    for package in CODE_PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ours)
    assert re.fullmatch(r"[\w.]+\+[0-9a-f]{12}", code_version())
    assert version_of(tmp_path) == code_version()
    with open(tmp_path / "pretrain" / "schedule.py", "a") as file:
        file.write("# a change\n")
    assert version_of(tmp_path) != code_version()


def test_the_collectives_of_a_group_are_written_and_nothing_is_without_any(tmp_path: Path) -> None:
    files = AttemptFiles(tmp_path, 7)
    files.create()
    variables = files.variables
    assert not write_last_collectives(tmp_path, 5, variables)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(2):
            dist.all_reduce(torch.ones(3))
        (path,) = write_last_collectives(tmp_path, 5, variables)
        # To find stacks takes seconds, which a rank that is about to end may not have.
        ((_, early),) = dumps(has_stacks=False)
    finally:
        dist.destroy_process_group()
    assert path == tmp_path / "attempt-7" / "gloo-rank-5"
    assert files.traces() == {"gloo-rank-": [5]}
    for content, has_stacks in ((early, False), (path.read_bytes(), True)):
        records = pickle.loads(content)["entries"][-2:]
        assert [record["profiling_name"] for record in records] == ["gloo:all_reduce"] * 2
        assert all(bool(record.get("frames")) == has_stacks for record in records)


@pytest.mark.parametrize("name", OWN_FILES)
def test_torch_writes_its_own_beside_them_unless_the_user_chose(tmp_path: Path, name: str) -> None:
    environment = AttemptFiles(tmp_path, 7).variables
    set_trace_files(environment, tmp_path)
    assert environment[name] == f"{tmp_path}/attempt-7/nccl-rank-"
    chosen = {name: "/elsewhere/"}
    set_trace_files(chosen, tmp_path)
    assert chosen == {name: "/elsewhere/"}
