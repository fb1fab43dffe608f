import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest
import torch

from data_pipeline.lanes.prefetcher import Prefetcher
from pretrain.checkpoint.storage_retry import StorageRetry
from pretrain.cli import main
from pretrain.config.run import (
    DataConfig,
    EngineConfig,
    MetricsConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
)
from pretrain.costs.flops import run_cost
from pretrain.engines.engine import StepResult
from pretrain.errors import StorageError
from pretrain.metrics.recorder import MetricsRecorder
from pretrain.reporting.results import results_of
from pretrain.rundir.metrics_file import (
    MetricsSummary,
    TimeSpent,
    cut_measurements_after,
    latest_measurements,
    summarize,
    summarize_file,
)
from pretrain.rundir.run_dir import RunDir
from pretrain.state import TrainState
from pretrain.terminal.text import si
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
    lines = [line for line in run_dir.read_metrics() if line["kind"] == "train"]
    return [(line["step"], line["loss"]) for line in lines]


def scalars_of_tensorboard(run_dir: RunDir, name: str = "loss") -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir.tensorboard)).Reload()
    return [(event.step, event.value) for event in events.Scalars(f"train/{name}")]


def test_every_step_has_one_line_with_the_mean_over_its_slots(world, run_dir):
    recorder = Recorder(world, run_dir)
    recorder.make_step(1.0, 2.0)
    recorder.make_step(3.0, 4.0)
    recorder.metrics.write()
    recorder.make_step(5.0, 5.0)
    recorder.close()
    lines = run_dir.read_metrics()
    found = [(line["step"], line["tokens"], line["loss"]) for line in lines]
    assert found == [(1, 8, 1.5), (2, 16, 3.5), (3, 24, 5.0)]
    assert lines[0]["perplexity"] == pytest.approx(4.4817, abs=1e-4)
    assert "tokens_per_second" not in lines[0]
    assert {"seconds", "tokens_per_second", "data_wait"} <= lines[1].keys()
    assert lines[1]["mfu"] > 0
    assert lines[1]["used_memory_gib"] > 0.05


def test_mfu_and_describe_count_the_same_flops_with_accumulation(world, tmp_path, caplog, capsys):
    """Positions are projected once per forward pass, here of one lane of two; counted is one."""
    caplog.set_level("INFO", "pretrain")
    run = replace(RUN, engine=EngineConfig(kind="torch", micro_batch_lanes=1))
    run_dir = RunDir.create(tmp_path / "slots", run)
    Recorder(world, run_dir, run=run).close()
    flops = f"{si(run_cost(run).flops_per_token)}FLOP"
    assert f"x {flops} per token" in caplog.text
    assert main(["describe", str(run_dir.config_file)]) == 0
    assert flops in capsys.readouterr().out


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
    assert scalars_of_tensorboard(run_dir, "memory_norm/layer.0") == [(2, 6.0)]


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
    assert len(run_dir.read_metrics()) == 4, "the evaluation after step 4 comes again"
    assert scalars_of_tensorboard(run_dir) == losses_of(run_dir)


def test_measurements_outlast_a_full_disk_and_none_is_missing(world, run_dir, caplog):
    patient = RunDir(run_dir.path, StorageRetry(60))
    recorder = Recorder(world, patient)
    with full_disk():
        for loss in (1.0, 2.0):
            recorder.make_step(loss)
            recorder.metrics.write()
        assert str(patient.metrics) in recorder.metrics.unwritten()
    assert caplog.text.count(str(patient.metrics)) == 1
    assert not recorder.metrics.unwritten()
    recorder.make_step(3.0)
    recorder.close()
    assert losses_of(patient) == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert "TensorBoard" in caplog.text
    assert scalars_of_tensorboard(run_dir) == [(3, 3.0)]


def test_once_patience_is_over_the_run_ends_with_the_path_that_cannot_be_written(world, run_dir):
    recorder = Recorder(world, run_dir)
    recorder.make_step(1.0)
    with full_disk(), pytest.raises(StorageError, match=str(run_dir.metrics)):
        recorder.metrics.write()
    recorder.close()


def test_saving_and_evaluating_do_not_count_as_training_time(world, run_dir, monkeypatch):
    """Each interval has its own times, and the run's sums, also after a resume."""
    now = [100.0]  # a clock of our own: on a busy machine any real wait takes longer
    clock = SimpleNamespace(perf_counter=lambda: now[0], time=time.time, monotonic=time.monotonic)
    monkeypatch.setattr("pretrain.metrics.recorder.time", clock)

    def wait(seconds):
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
    resumed = Recorder(world, run_dir, step=2)
    wait(4.0)
    resumed.make_step(1.0)
    resumed.close()
    first, evaluation, last = (line for line in run_dir.read_metrics() if "seconds" in line)
    assert [each["seconds"] for each in (first, evaluation, last)] == pytest.approx([1, 20, 4])
    assert first["save_stall"] == pytest.approx(30.0)
    assert (last["totals"]["training"], last["totals"]["evaluation"]) == pytest.approx((5, 20))


def test_the_log_gets_one_line_per_interval_and_evaluation(world, run_dir, caplog):
    caplog.set_level("INFO", "pretrain")
    recorder = Recorder(world, run_dir)
    recorder.make_step(1.0)
    recorder.make_step(2.0)
    recorder.metrics.write()
    recorder.metrics.write_evaluation(2, {"loss": 1.25, "loss_without_memory": 1.625})
    recorder.close()
    _, interval, evaluation = caplog.messages
    assert {"2/10", "1.5000"} <= set(interval.split())
    assert all(number in evaluation for number in ("1.2500", "1.6250"))
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
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {str(event.get("name")) for event in events}
    assert {name for name in names if name.startswith("step ")} == {"step 2", "step 3"}
    assert str(path) in caplog.text


def test_a_diverged_loss_is_written_and_read_back_without_a_perplexity(world, run_dir):
    recorder = Recorder(world, run_dir)
    for loss in (118.0, 1e6):
        recorder.make_step(loss)
    recorder.close()
    lines = run_dir.read_metrics()
    assert [(line["loss"], line["perplexity"]) for line in lines] == [(118.0, None), (1e6, None)]


def test_intervals_are_summed_and_the_train_loss_is_of_the_last_one_that_has_steps(tmp_path):
    lines = [train_line(step, 9.0 - step) for step in range(1, 8)]
    parts = {"seconds": 2.0, "data_wait": 0.25, "save_stall": 0.5, "stall": 6.0}
    lines[1] |= {**parts, "tokens_per_second": 100.0, "train_loss": 7.5}
    lines[3] |= {"seconds": 3.0, "tokens_per_second": 300.0, "train_loss": 5.5}
    lines[5] |= {"seconds": 3.0, "tokens_per_second": 200.0, "train_loss": None}  # all skipped
    evaluation = {"kind": "evaluation", "step": 4, "loss": 1.0, "seconds": 1.5}
    lines.insert(4, evaluation)
    path = tmp_path / "metrics.jsonl"
    damaged = '{"kind": "train", "stdp": 3, "tokens_per_second": 1.0}\n'
    text = [json.dumps(line) + "\n" for line in lines]
    wrong = {"tokens_per_second": 1.0, "seconds": "2"}
    wrong_types = [json.dumps({**line, **wrong}) + "\n" for line in lines]
    path.write_text(damaged.join(text) + "".join(wrong_types) + '{"kind": "train", "step": 8, "lo')
    assert summarize_file(path) == MetricsSummary(
        step=7,
        train_loss=5.5,
        evaluation=evaluation,
        recent_tokens_per_second=200.0,
        spent=TimeSpent(training=7.5, waiting_for_data=0.5, evaluation=1.5, saving=0.5, stalls=6.0),
    )
    assert summarize_file(tmp_path / "nothing") == MetricsSummary()


def test_lines_whose_totals_another_version_wrote_are_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = train_line(1, train_loss=2.5, tokens_per_second=1e3, seconds=1.0)
    path.write_text(json.dumps(line | {"totals": {"seconds": 1.0, "data_seconds": 0.0}}) + "\n")
    assert cut_measurements_after(path, 1) == 0
    assert summarize_file(path).spent == TimeSpent(training=1.0)


def test_status_reads_only_the_end_of_a_long_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    totals = {"training": 9.0, "evaluation": 3.0}
    line = train_line(7, 2.0, train_loss=2.5, tokens_per_second=1e3, seconds=1.0, totals=totals)
    first = {**line, "totals": {**totals, "evaluation": 2.5}}
    evaluation = {"kind": "evaluation", "step": 7, "loss": 1.0, "seconds": 0.5}
    lines = [*39_900 * [first], evaluation, *100 * [line]]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))

    def bytes_read() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    before = bytes_read()
    found = summarize_file(path)
    assert bytes_read() - before < path.stat().st_size / 50
    assert (found.spent.training, found.spent.evaluation, found.train_loss) == (9.0, 3.0, 2.5)
    assert found.evaluation == evaluation
    with open(path, "a") as file:
        file.write(json.dumps(evaluation) + "\n")
    assert summarize_file(path).spent == TimeSpent(training=9.0, evaluation=3.5)


@pytest.mark.parametrize("interval", [1, 7, 900])
@pytest.mark.parametrize("num_damaged", [0, 2])
def test_the_latest_evaluation_is_found_wherever_it_is_in_the_file(tmp_path, interval, num_damaged):
    path, random = tmp_path / "metrics.jsonl", Random(interval)
    for at in [*(random.sample(range(30, 3000), 3) for _ in range(6)), [30, 31, 3000]]:
        lines, sums, step = [], TimeSpent(), 0
        evaluations = []
        for step in range(1, 3001):
            line = train_line(step)
            if step % interval == 0:
                line |= {"tokens_per_second": 9.0, "seconds": 0.1, "train_loss": 2.0}
                sums.add(line)
                line["totals"] = {name: round(each, 6) for name, each in vars(sums).items()}
            lines.append(json.dumps(line))
            if step in [10, *at]:
                evaluation = {"kind": "evaluation", "step": step, "loss": 1 / step, "seconds": 0.3}
                sums.add(evaluation)
                evaluations.append(evaluation)
                is_damaged = len(evaluations) > 4 - num_damaged
                lines.append(json.dumps(evaluation)[: 30 if is_damaged else None])
        path.write_text("\n".join(lines) + "\n")
        assert summarize_file(path).evaluation == evaluations[-1 - num_damaged]


def test_a_line_longer_than_what_is_read_at_once_is_read_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    norms = {f"grad_norm/layer.{number}": 1.0 for number in range(8000)}
    lines = [train_line(step, 2.0, **norms) for step in (1, 2, 3)]
    assert len(json.dumps(lines[0])) > 200_000
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["step"] for line in latest_measurements(path)] == [3, 2, 1]


def test_the_speed_of_a_run_counts_every_step_and_the_recent_one_five_intervals():
    speeds = [1.0, 9.0, 2.0, 8.0, 3.0, 7.0, 4.0]
    lines = [train_line(step, tokens_per_second=speed) for step, speed in enumerate(speeds, 1)]
    assert summarize(lines).recent_tokens_per_second == 4.0
    assert summarize([]).recent_tokens_per_second is None
    lines = [
        train_line(2, tokens_per_second=64.0, seconds=1.0),
        {"kind": "evaluation", "step": 2, "loss": 1.0, "seconds": 50.0},
        train_line(6, tokens_per_second=1e3, seconds=5.0, save_stall=9.0, stall=9.0),
    ]
    config = RunConfig(model=ModelConfig(vocab_size=50), data=DataConfig(lanes=2, segment_length=8))
    found = results_of(config, summarize(lines), [], None)
    assert found.run_tokens_per_second == 6 * 2 * 8 / 6.0


@pytest.mark.parametrize(
    ("model", "gain"),
    [
        ({}, 0.5),
        ({"memory_length": 0}, None),
        ({"memory_length": 0, "layer_kinds": ("deltanet",)}, 0.5),
    ],
)
def test_only_what_carries_something_from_segment_to_segment_has_a_memory_gain(model, gain):
    line = {"kind": "evaluation", "step": 2, "loss": 1.0, "loss_without_memory": 1.5}
    summary = summarize([train_line(2), {**line, "seconds": 1.0}])
    config = RunConfig(model=ModelConfig(vocab_size=50, **model))
    assert results_of(config, summary, [], None).memory_gain == gain
