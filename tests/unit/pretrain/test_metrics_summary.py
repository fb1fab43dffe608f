from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

from pretrain.config.data import DataConfig
from pretrain.config.model import ModelConfig
from pretrain.config.run import RunConfig
from pretrain.reporting.results import results_of
from pretrain.rundir.metrics_file import (
    MetricsSummary,
    TimeSpent,
    cut_measurements_after,
    latest_measurements,
    summarize,
    summarize_file,
)
from tests.helpers.metrics import train_line


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
    wrong_types = [
        json.dumps({**line, "tokens_per_second": 1.0, "seconds": "2"}) + "\n" for line in lines
    ]
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
