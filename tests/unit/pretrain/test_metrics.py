from __future__ import annotations

import gzip
import json
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from data_pipeline.lanes.lane_stream import Prefetcher
from foundation.errors import ConfigError
from foundation.retry import Patience, StorageError
from pretrain.cli import main
from pretrain.config.data import DataConfig
from pretrain.config.engine import EngineConfig
from pretrain.config.model import ModelConfig
from pretrain.config.optim import OptimConfig
from pretrain.config.run import MetricsConfig, RunConfig
from pretrain.costs.flops import cost_of
from pretrain.engines.engine import StepResult
from pretrain.metrics.recorder import MetricsRecorder
from pretrain.metrics.writers import MetricsFile
from pretrain.rundir.run_dir import RunDir
from pretrain.state import TrainState
from pretrain.terminal.text import counted, perplexity, si
from tests.helpers.full_disk import full_disk
from tests.helpers.metrics import train_line

RUN = RunConfig(
    model=ModelConfig(vocab_size=50, num_layers=1, d_model=8, num_heads=2, memory_length=4),
    data=DataConfig(lanes=2, segment_length=4),
    optim=OptimConfig(steps=10),
    metrics=MetricsConfig(interval=2),
)


class Recorder:
    """A run that makes steps whose losses are known."""

    def __init__(self, world, run_dir: RunDir, step: int = 0, run: RunConfig = RUN) -> None:
        self.state = TrainState(step=step, tokens_seen=step * RUN.tokens_per_step)
        self.prefetcher = Prefetcher(iter(()))
        self.metrics = MetricsRecorder(
            run, run_dir, world, self.state, self.prefetcher, torch.nn.Identity()
        )

    def make_step(self, *slot_losses: float, grad_norm: float | None = 0.5) -> None:
        for loss in slot_losses:
            self.metrics.add_loss(torch.tensor(loss))
        self.state.step += 1
        self.state.tokens_seen += RUN.tokens_per_step
        self.metrics.end_step(
            self.state, StepResult(grad_norm=grad_norm, skipped=False), learning_rate=1e-3
        )

    def close(self) -> None:
        self.metrics.close()
        self.prefetcher.close()


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return RunDir.create(tmp_path / "run", RUN)


def losses_of(run_dir: RunDir) -> list[tuple[int, float]]:
    return [
        (line["step"], line["loss"]) for line in run_dir.read_metrics() if line["kind"] == "train"
    ]


def scalars_of_tensorboard(run_dir: RunDir) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir.tensorboard)).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


def test_every_step_has_one_line_with_the_mean_over_its_slots(world, run_dir):
    recorder = Recorder(world, run_dir)
    recorder.make_step(1.0, 2.0)
    recorder.make_step(3.0, 4.0)
    recorder.metrics.write()
    recorder.make_step(5.0, 5.0)
    recorder.close()
    lines = run_dir.read_metrics()
    assert [(line["step"], line["tokens"], line["loss"]) for line in lines] == [
        (1, 8, 1.5),
        (2, 16, 3.5),
        (3, 24, 5.0),
    ]
    assert lines[0]["perplexity"] == pytest.approx(4.4817, abs=1e-4)
    assert "tokens_per_second" not in lines[0]
    assert {"seconds", "tokens_per_second", "mfu", "data_wait", "used_memory_gib"} <= lines[
        1
    ].keys()
    assert lines[1]["mfu"] > 0
    assert lines[1]["used_memory_gib"] > 0.05


def test_mfu_describe_and_reports_count_the_same_flops_with_accumulation(
    world, tmp_path, caplog, capsys
):
    """Positions are projected once per forward pass, here of one lane of two; counted is one."""
    caplog.set_level("INFO", "pretrain")
    run = replace(RUN, engine=EngineConfig(kind="torch", micro_batch_lanes=1))
    run_dir = RunDir.create(tmp_path / "slots", run)
    Recorder(world, run_dir, run=run).close()
    (said,) = caplog.messages
    assert main(["describe", str(run_dir.config_file)]) == 0
    described = re.search(r"FLOPs per token +(.+?FLOP)", capsys.readouterr().out)
    assert described is not None
    assert said.startswith(f"MFU = tokens/s x {described[1]} per token")
    assert described[1] == f"{si(cost_of(run).flops_per_token)}FLOP"


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_memorys_norm_is_the_mean_over_the_rows_of_all_lanes(world, run_dir, num_slots):
    recorder = Recorder(world, run_dir)
    recorder.make_step(1.0)
    recorder.metrics.write()
    rows_BMD = torch.zeros(2, 3, 8)
    rows_BMD[0, :, 0], rows_BMD[1, :, 1] = 5.0, 7.0
    slots = zip(rows_BMD.chunk(num_slots), torch.zeros(2, 3).chunk(num_slots), strict=True)
    recorder.state.memories = list(slots)
    recorder.make_step(1.0)
    recorder.metrics.write()
    recorder.state.memories = [(rows * torch.inf, more) for rows, more in recorder.state.memories]
    recorder.make_step(1.0)
    recorder.close()
    norms = [line.get("memory_norm/layer.0", "no memory") for line in run_dir.read_metrics()]
    assert norms == ["no memory", 6.0, None]


def test_a_steps_loss_does_not_depend_on_where_intervals_begin(world, tmp_path):
    generator = torch.Generator().manual_seed(1)
    losses = torch.rand(6, 3, generator=generator).tolist()
    recorded = []
    for interval in (1, 2, 6):
        run_dir = RunDir.create(tmp_path / f"every-{interval}", RUN)
        recorder = Recorder(world, run_dir)
        for number, slots in enumerate(losses, start=1):
            recorder.make_step(*slots)
            if number % interval == 0:
                recorder.metrics.write()
        recorder.close()
        recorded.append([(step, loss.hex()) for step, loss in losses_of(run_dir)])
    assert recorded[0] == recorded[1] == recorded[2]
    assert len(recorded[0]) == 6


def test_a_resumed_run_has_every_step_once_in_file_and_tensorboard(world, run_dir):
    first = Recorder(world, run_dir)
    for loss in (1.0, 2.0, 3.0, 4.0):
        first.make_step(loss)
    first.metrics.write()
    first.metrics.write_evaluation(4, {"loss": 9.0})
    first.close()
    with open(run_dir.metrics, "a") as file:
        file.write('{"kind": "train", "step": 5, "lo')  # killed while it wrote
    second = Recorder(world, run_dir, step=2)
    for loss in (30.0, 40.0):
        second.make_step(loss)
    second.close()
    assert losses_of(run_dir) == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]
    assert all(line["kind"] == "train" for line in run_dir.read_metrics()), (
        "the evaluation after step 4 comes again"
    )

    assert scalars_of_tensorboard(run_dir) == losses_of(run_dir)


def test_measurements_outlast_a_full_disk_in_memory_and_then_nothing_is_missing(
    world, run_dir, caplog
):
    patient = RunDir(run_dir.path, Patience(60))
    recorder = Recorder(world, patient)
    with full_disk():
        for loss in (1.0, 2.0):
            recorder.make_step(loss)
            recorder.metrics.write()
        assert recorder.metrics.unwritten() == f"{patient.metrics}: File too large"
    warning = f"{patient.metrics}: File too large; training continues, keeps metrics in memory"
    assert caplog.text.count(warning) == 1
    assert not recorder.metrics.unwritten()
    recorder.make_step(3.0)
    recorder.close()
    assert losses_of(patient) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert "TensorBoard lacks these steps" in caplog.text
    assert scalars_of_tensorboard(run_dir) == [(3, 3.0)]


def test_once_patience_is_over_the_run_ends_with_the_path_that_cannot_be_written(world, run_dir):
    recorder = Recorder(world, run_dir)
    recorder.make_step(1.0)
    problem = f"{run_dir.metrics}: File too large; allow larger"
    with full_disk(), pytest.raises(StorageError, match=problem):
        recorder.metrics.write()
    recorder.close()


def test_saving_and_evaluating_do_not_count_as_training_time(world, run_dir, monkeypatch):
    now = [100.0]  # a clock of our own: on a busy machine any real wait takes longer
    clock = SimpleNamespace(perf_counter=lambda: now[0], time=time.time)
    monkeypatch.setattr("pretrain.metrics.recorder.time", clock)

    def wait(seconds: float) -> None:
        now[0] += seconds

    recorder = Recorder(world, run_dir)
    recorder.make_step(1.0)
    wait(1.0)
    with recorder.metrics.saving():
        wait(30.0)
    recorder.make_step(1.0)
    recorder.metrics.write()
    wait(20.0)
    recorder.metrics.write_evaluation(2, {"loss": 1.0})
    recorder.make_step(1.0)
    wait(2.0)
    recorder.close()
    first, evaluation, last = (line for line in run_dir.read_metrics() if "seconds" in line)
    assert first["seconds"] == pytest.approx(1.0)
    assert last["seconds"] == pytest.approx(2.0)
    assert evaluation["seconds"] == pytest.approx(20.0)
    assert first["save_stall"] == pytest.approx(30.0)


def test_the_log_gets_one_line_per_interval_and_evaluation(world, run_dir, caplog):
    caplog.set_level("INFO", "pretrain")
    recorder = Recorder(world, run_dir)
    recorder.make_step(1.0)
    recorder.make_step(2.0)
    recorder.metrics.write()
    values = {"loss": 1.25, "bits_per_byte": 0.75, "loss_without_memory": 1.5}
    recorder.metrics.write_evaluation(2, values)
    recorder.close()
    _, interval, evaluation = caplog.messages
    assert interval.startswith("step  2/10  train loss 1.5000  ")
    assert evaluation.endswith("1.2500  ppl 3.5  0.750 bits/byte  (1.5000 without memory)")
    assert [line.get("train_loss") for line in run_dir.read_metrics()] == [None, 1.5, None]


def test_only_the_requested_steps_are_profiled(world, run_dir, caplog):
    caplog.set_level("INFO", "pretrain")
    profiled = replace(RUN, metrics=replace(RUN.metrics, profile_steps=(2, 3)))
    recorder = Recorder(world, run_dir, run=profiled)
    for step in range(1, 6):
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(8) @ torch.ones(8)
        recorder.make_step(1.0)
    recorder.close()
    path = run_dir.traces / "steps-00000002-00000003.json.gz"
    names = {
        event.get("name") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    }
    assert {name for name in names if str(name).startswith("step ")} == {"step 2", "step 3"}
    assert str(path) in caplog.text


@pytest.mark.parametrize("steps", [(3, 2), (0, 2), (-1, 4)])
def test_steps_that_cannot_be_profiled_are_errors(steps):
    with pytest.raises(ConfigError, match="profile_steps"):
        MetricsConfig(profile_steps=steps)


@pytest.mark.parametrize("loss", [118.0, 1e6])
def test_a_diverged_loss_is_written_and_read_back_without_a_perplexity(world, run_dir, loss):
    recorder = Recorder(world, run_dir)
    recorder.make_step(loss)
    recorder.close()
    (line,) = run_dir.read_metrics()
    assert line["loss"] == loss
    assert line["perplexity"] is None


def test_numbers_for_people():
    assert si(8.123e6) == "8.12 M"
    assert si(1.5) == "1.5 "
    assert [si(5.04 * 1000**power) for power in range(5, 11)] == [
        f"5.04 {prefix}" for prefix in "PEZYRQ"
    ]
    assert si(5e34) == "5e+04 Q"
    assert si(999.7e3) == "1 M"
    assert [counted(count, "rank") for count in (0, 1, 2, 1000)] == [
        "0 ranks",
        "1 rank",
        "2 ranks",
        "1,000 ranks",
    ]
    assert perplexity(0.0) == 1.0


def test_an_interval_ends_with_the_runs_sums_also_after_a_resume(run_dir):
    def interval(step: int, seconds: float) -> dict:
        return train_line(step, tokens_per_second=1.0, seconds=seconds, stall=0.5)

    def append(first_step: int, *lines: dict) -> dict:
        MetricsFile(run_dir, first_step, may_write=lambda: None).append(lines)
        return run_dir.read_metrics()[-1]["totals"]

    evaluation = {"kind": "evaluation", "step": 1, "loss": 1.0, "seconds": 0.25}
    assert append(0, interval(1, 2.0), evaluation, interval(2, 3.0))["training"] == 5.0
    resumed = append(1, interval(2, 4.0))
    assert (resumed["training"], resumed["stalls"]) == (6.0, 1.0)
    assert resumed["evaluation"] == 0.25
