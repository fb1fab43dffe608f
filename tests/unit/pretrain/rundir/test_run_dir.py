import json
import math
import os
import re
import socket
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.config import MixturePart
from foundation.errors import ConfigError, UserError
from foundation.settings import settings_of
from foundation.typed_values import json_text, to_tree
from pretrain.checkpoint.directory import INDEX
from pretrain.checkpoint.facts import Destination
from pretrain.checkpoint.storage_retry import StorageRetry
from pretrain.cli import main
from pretrain.config.resolve import with_absolute_paths
from pretrain.config.run import (
    EngineConfig,
    MetricsConfig,
    ModelConfig,
    OptimConfig,
    RunConfig,
    why_fixed,
)
from pretrain.rundir.events import (
    AttemptReason,
    Branched,
    Canceled,
    Forecast,
    GaveUp,
    Interrupted,
    JobEnded,
    JobEndReason,
    JobStarted,
    Mirrored,
    NextAction,
    NodeReplaced,
    NodesUnready,
    Outcome,
    OutOfMemory,
    Published,
    ReplacedBecause,
    Requested,
    Restored,
    ResumeFrom,
    Rewind,
    SettingsChanged,
    Slowdown,
    Spike,
    Submitted,
    SupervisorKilled,
    TrainingBegan,
    TrainingEnded,
    UnresolvedSpike,
)
from pretrain.rundir.heartbeat import HeartbeatRecord, read_heartbeats
from pretrain.rundir.history import find_events, interruptions, num_attempts, without_refused_jobs
from pretrain.rundir.ledger import EVENTS, Ledger
from pretrain.rundir.lock import Fence, read_lock
from pretrain.rundir.metrics_file import (
    cut_measurements_after,
    parse_measurement,
    read_measurements,
)
from pretrain.rundir.run_dir import RunDir
from tests.helpers.checkpoints import publish_step
from tests.helpers.full_disk import full_disk
from tests.helpers.jobs import attempt_ended
from tests.helpers.metrics import train_line

MEASURED = train_line(1)
RUN = RunConfig(name="first", model=ModelConfig(vocab_size=300))


def resume_error(path: Path, config: RunConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        RunDir.create_or_resume(path, config)
    return str(caught.value)


def test_a_new_directory_holds_identity_and_resolved_settings_and_is_opened_again(tmp_path, caplog):
    caplog.set_level("INFO", "pretrain")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        RunDir.open(tmp_path)
    created = RunDir.create(tmp_path / "deep/run", RUN)
    opened = RunDir.create_or_resume(tmp_path / "deep/run", RUN)
    assert not caplog.messages
    assert opened.config == RUN
    assert opened.identity == created.identity
    assert opened.identity.name == "first"


def test_a_run_that_was_killed_while_its_directory_was_made_starts_again(tmp_path):
    for name in ("checkpoints", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / ".config.yaml.14035.tmp").touch()
    (tmp_path / "checkpoints/step-00000003").mkdir()
    assert "(checkpoints)" in resume_error(tmp_path, RUN)
    (tmp_path / "checkpoints/step-00000003").rmdir()
    assert RunDir.create_or_resume(tmp_path, RUN).config == RUN
    (tmp_path / "run.json").unlink()
    (tmp_path / "checkpoints").rmdir()
    assert RunDir.create_or_resume(tmp_path, RUN).identity.name == "first"


def test_a_changed_setting_that_changes_the_model_is_refused_and_nothing_is_written(tmp_path):
    run_dir = RunDir.create(tmp_path, RUN)
    model, metrics = replace(RUN.model, d_model=64), MetricsConfig(interval=3)
    changed = replace(RUN, model=model, seed=2, metrics=metrics)
    message = resume_error(tmp_path, changed)
    assert "model.d_model: 128 -> 64 (the weights are of this model)" in message
    assert "seed: 1 -> 2" in message
    assert "metrics.interval" not in message
    assert run_dir.config == RUN
    assert run_dir.ledger.read() == []


FIXED = {"name", "seed", "initial_weights", "engine.kind", "data.lanes", "data.segment_length"}
FIXED |= {"optim.name", "optim.gradient_segments", "optim.ema_decay"}


def test_what_another_model_or_other_tokens_follow_from_may_not_change_in_a_resume():
    for key in (each.name.replace("[]", "") for each in settings_of(RunConfig)):
        section = key.partition(".")[0]
        if key in ("data", "optim", "model"):
            continue  # of which some settings may change
        is_fixed = section == "model" or key.startswith("data.mixture") or key in FIXED
        assert bool(why_fixed(key)) is is_fixed, key
    assert not why_fixed("engine.deepspeed_extra.zero_optimization.stage")


def test_harmless_changes_are_logged_kept_and_entered_in_the_ledger(tmp_path, caplog):
    caplog.set_level("INFO", "pretrain")
    run_dir = RunDir.create(tmp_path, RUN)
    changed = replace(
        RUN,
        metrics=MetricsConfig(interval=3),
        engine=EngineConfig(zero_stage=3, deepspeed_extra={"prescale_gradients": True}),
        optim=OptimConfig(steps=2000),
    )
    RunDir.create_or_resume(tmp_path, changed).change_settings(changed, step=0)
    assert any("optim.steps: 1000 -> 2000" in message for message in caplog.messages)
    assert len(caplog.messages) == 4
    assert run_dir.config == changed
    (event,) = find_events(run_dir.ledger.read(), SettingsChanged)
    assert event.changes["metrics.interval"] == (10, 3)


def test_a_path_is_the_same_setting_relative_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mixture = (MixturePart(path=Path("books"), weight=1.0),)
    run = replace(RUN, data=replace(RUN.data, mixture=mixture))
    RunDir.create(tmp_path / "run", run).refuse_other_run(with_absolute_paths(run))


def test_an_identity_of_another_format_is_refused(tmp_path):
    RunDir.create(tmp_path, RUN)
    identity = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**identity, "format": 99, "new": 1}))
    with pytest.raises(ConfigError, match="99"):
        RunDir.open(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        *(b"", b"{", b"[]", b"\xff", b'{"nbme": "x"}', b'{"a": 1, "b": 2}', b'{"format": 2}'),
        b'{"created": "", "format": 2, "id": "\\ud800", "name": "fuzz"}',
        None,
    ],
)
def test_a_damaged_identity_is_refused_with_the_way_to_write_it_again(tmp_path, damage):
    lost = RunDir.create(tmp_path, RUN).identity
    (tmp_path / "run.json").unlink()
    if damage is not None:
        (tmp_path / "run.json").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"^.*run\.json.*index\.json.*$"):
        RunDir.open(tmp_path)
    (tmp_path / "run.json").write_text(json.dumps({"name": lost.name, "id": lost.id}))
    assert RunDir.open(tmp_path).identity == replace(lost, created="")


def test_lost_settings_can_be_written_again_from_a_checkpoint(tmp_path):
    run_dir = RunDir.create(tmp_path, RUN)
    step = publish_step(run_dir.checkpoints, 7, run=run_dir.identity.id, config=to_tree(RUN))
    run_dir.config_file.unlink()
    with pytest.raises(ConfigError, match=r"index\.json.*\"config\""):
        RunDir.create_or_resume(tmp_path, RUN)
    run_dir.config_file.write_text(json.dumps(json.loads((step / INDEX).read_text())["config"]))
    assert RunDir.create_or_resume(tmp_path, RUN).config == RUN


def test_cut_metrics_keep_every_step_up_to_the_resume_and_report_gaps(tmp_path, caplog):
    run_dir = RunDir.create(tmp_path, RUN)
    lines = [json.dumps(MEASURED | {"step": step}) + "\n" for step in (1, 2, 3, 3, 4)]
    run_dir.metrics.write_text("".join(lines) + '{"kind": "train", "st')
    assert cut_measurements_after(run_dir.metrics, 3) == 2
    assert run_dir.metrics.read_text() == "".join(lines[:4])
    assert cut_measurements_after(run_dir.metrics, 3) == 0
    assert not caplog.messages
    assert cut_measurements_after(run_dir.metrics, 5) == 0
    [warning] = caplog.messages
    assert "step 3, expected 5" in warning
    assert cut_measurements_after(run_dir.metrics, 0) == 4
    assert run_dir.metrics.read_text() == ""


def test_no_flipped_bit_of_a_key_makes_a_line_that_readers_trip_over(tmp_path, caplog):
    line = json.dumps(MEASURED).encode() + b"\n"
    keys = [at for found in re.finditer(rb'"(\w+)":', line) for at in range(*found.span(1))]
    flipped = [line[:at] + bytes([line[at] ^ 1 << bit]) + line[at + 1 :]
               for at in keys for bit in range(8)]  # fmt: skip
    assert len(flipped) > 250
    assert all(parse_measurement(each) is None for each in flipped)
    assert parse_measurement(line) == MEASURED
    assert parse_measurement(json.dumps(MEASURED | {"totals": 3.0}).encode()) is None
    for other in (b"[]", b"{}", b"3", b'{"kind": []}', b"\xff", b'{"kind": "train", "step": true}'):
        assert parse_measurement(other) is None


@pytest.mark.parametrize(
    "name", ["checkpoints", "heartbeats", "ledger.jsonl", "logs", "metrics.jsonl", "tensorboard"]
)
def test_a_run_whose_parts_lead_out_of_its_directory_is_not_resumed(tmp_path, name):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to(tmp_path / "elsewhere")
    run_dir = RunDir(tmp_path / "run")
    with pytest.raises(ConfigError, match=f"{name} is a link"), run_dir.locked("launcher"):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["run", name]


SPIKE = Spike(13, 15, 9.0, 3.0)
REWIND = Rewind(spike=SPIKE, to_step=10, segments=(12, 25))
FINISHED = TrainingEnded(outcome=Outcome.FINISHED, step=7)
OUT_OF_MEMORY = OutOfMemory(rank=0, micro_batch_lanes=4)
RETRY = attempt_ended(attempt_number=3, without_progress=1)
START, RESUME = TrainingBegan(step=0, world_size=1), TrainingBegan(step=10, world_size=1)
JOB_STARTED = JobStarted(job="17", restart=0, nodes=("n1",), step=0)
PREEMPTED = JobEnded(job="17", restart=0, reason=JobEndReason.PREEMPTED, requeued=True)
NODE_FAILED = replace(PREEMPTED, reason=JobEndReason.NODE_FAILED, node="n2", requeued=False)
NODE_LOST = replace(PREEMPTED, reason=JobEndReason.FIRST_NODE_LOST, step=0, step_before=0)
HALVED = replace(RETRY, reason=AttemptReason.OUT_OF_MEMORY)
REFUSED = replace(RETRY, next=NextAction.REFUSED)
REPLACED = NodeReplaced(job="17", node="n2", spare="n3", reason=ReplacedBecause.NODE_FAILED)
BLAMED = replace(REPLACED, reason=ReplacedBecause.RANKS_FAILED)
KILLED_SUPERVISOR = SupervisorKilled(job="17", restart=0, step_before=0, step=10)
LOST = "the processes were killed, or their node went down"
KILLED = "rank 1 was killed by SIGKILL"


EXAMPLES = [
    START,
    RESUME,
    REPLACED,
    replace(FINISHED, outcome=Outcome.STOPPED, tokens_of_corpora={"a": 3}),
    FINISHED,
    TrainingEnded(outcome=Outcome.PHASE_FINISHED, step=7),
    SettingsChanged(changes={"optim.steps": (10, 20)}, step=9),
    Requested(request="evaluate"),
    Branched(step=9, origin="/runs/tiny", windows=((4, 16),)),
    Forecast(sha256="ab" * 32, file="card.yaml"),
    OutOfMemory(rank=3, micro_batch_lanes=8),
    Slowdown(step=4, seconds=20.1, rank=1),
    Slowdown(step=4, rank=2, seconds=1.0, ratio=2.25),
    REWIND,
    replace(REWIND, spike=Spike(1, 2)),
    replace(RESUME, changes={"torch": ("2.11", "2.15")}, local=True),
    Published(step=9, attempt="a", destination=Destination.NODES),
    ResumeFrom(step=0),
    ResumeFrom(),
    Mirrored(step=9, url="s3://b/x", seconds=1.5),
    Mirrored(step=9, url="s3://b/x", problem="no bucket"),
    Restored(step=9, url="s3://b/x"),
    GaveUp(spike=SPIKE),
    GaveUp(spike=Spike(1, 30, skipped=29)),
    GaveUp(spike=Spike(30, 30)),
    GaveUp(spike=Spike(9, 30, problem="rank 1 has NaN or inf in layers.0.norm (weight)")),
    UnresolvedSpike(spike=SPIKE, before=10),
    UnresolvedSpike(spike=SPIKE),
    RETRY,
    replace(RETRY, reason=AttemptReason.HANG),
    replace(RETRY, next=NextAction.GIVE_UP, without_progress=3),
    Interrupted(signal="SIGINT", step=10),
    Interrupted(signal="SIGTERM", step=0),
    Submitted(job="17", job_name="books"),
    Canceled(job="17"),
    JOB_STARTED,
    PREEMPTED,
    NODE_FAILED,
    replace(NODE_FAILED, is_final=True),
    KILLED_SUPERVISOR,
    NodesUnready(job="17", problems={"n2": "does not respond in 60 s"}),
    replace(NODE_FAILED, reason=JobEndReason.SUPERVISOR_FAILED, message="KeyError: 'x'"),
    replace(RETRY, reason=AttemptReason.SITE_FAILED, without_progress=0, next=NextAction.GIVE_UP),
]
SENTENCES = Path(__file__).parents[3] / "data" / "ledger-sentences.txt"  # one for each of them


def test_events_are_read_back_as_they_were_and_described_as_recorded(tmp_path):
    assert {type(event) for event in EXAMPLES} == set(EVENTS.values())
    ledger = Ledger(tmp_path / "ledger.jsonl")
    for event in EXAMPLES:
        ledger.append(event)
    found = ledger.read()
    assert found == EXAMPLES
    assert min(event.time for event in found) > 1.7e9
    assert "".join(f"{event.description}\n" for event in found) == SENTENCES.read_text()
    lines = [json.loads(line) for line in ledger.path.read_text().splitlines()]
    assert [line["event"] for line in lines] == [event.name() for event in EXAMPLES]
    assert not any(None in line.values() for line in lines)


def test_a_start_removes_what_killed_processes_had_begun_to_write(tmp_path):
    run_dir = RunDir.create(tmp_path / "run", RunConfig())
    left = [run_dir.path / ".attempt.17.tmp", run_dir.checkpoints / ".mirror.json.9.tmp"]
    others = [run_dir.path / ".notes.tmp", run_dir.path / "attempt.17.tmp"]
    for path in (*left, *others):
        path.write_text("half")
    RunDir.create_or_resume(run_dir.path, run_dir.config)
    assert [path.exists() for path in (*left, *others)] == [False, False, True, True]


def test_nan_of_an_older_version_is_read_and_becomes_null_at_the_next_start(tmp_path):
    path, line = tmp_path / "metrics.jsonl", json.dumps(train_line(1, math.nan, extra=math.inf))
    path.write_text(f"{line}\n{json.dumps(train_line(2))}\n")
    assert "NaN" in line
    before = list(read_measurements(path))
    assert cut_measurements_after(path, 2) == 0
    assert list(read_measurements(path)) == before
    assert [each["loss"] for each in before] == [None, 1.0]
    assert "Infinity" not in path.read_text()
    assert "NaN" not in path.read_text()
    assert json_text({"a": [1.5, -math.inf], "b": math.nan}) == '{"a": [1.5, null], "b": null}'


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_special_file_for_ledger_or_metrics_is_one_line(tmp_path, kind):
    run_dir = RunDir(tmp_path)
    for path in (run_dir.ledger.path, run_dir.metrics, run_dir.path / "attempt"):
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    for read in (
        run_dir.ledger.read,
        run_dir.read_metrics,
        lambda: cut_measurements_after(run_dir.metrics, 3),
        Fence(tmp_path, "1").check,
    ):
        with pytest.raises(UserError, match=r"^.*pipe.*$"):
            read()


def test_an_event_that_an_act_waits_for_outlasts_a_full_disk(tmp_path):
    path = tmp_path / "ledger.jsonl"
    waiting: list[float] = []
    began = time.time()
    with full_disk() as free_space:
        retry = StorageRetry(60, lambda: (waiting.append(time.time()), free_space()))
        Ledger(path, retry).append(FINISHED)
    (event,) = Ledger(path).read()
    assert event == FINISHED
    assert len(waiting) == 1
    assert began - 0.01 < event.time <= waiting[0], "when it happened, not when it was written"


def test_an_event_that_nothing_waits_for_is_logged_where_it_cannot_be_written(tmp_path, caplog):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with full_disk():
        ledger.append_if_possible(TrainingEnded(outcome=Outcome.FINISHED, step=6))
    assert "step 6" in caplog.text
    assert ledger.read() == []


def test_an_event_that_a_full_disk_cuts_short_leaves_the_others_whole(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(START)
    before = ledger.path.read_bytes()
    with full_disk(len(before) + 10), pytest.raises(OSError):
        ledger.append(FINISHED)
    assert ledger.path.read_bytes() == before


@pytest.mark.parametrize("trap", ["link", "pipe"])
def test_an_event_is_appended_through_no_link_and_waits_for_no_pipe(tmp_path, trap):
    path, precious = tmp_path / "ledger.jsonl", tmp_path / "precious"
    precious.write_text("mine\n")
    path.symlink_to(precious) if trap == "link" else os.mkfifo(path)
    with pytest.raises(UserError, match=trap):
        Ledger(path).append(FINISHED)
    assert precious.read_text() == "mine\n"


@pytest.mark.parametrize(
    "damaged",
    [
        b'{"event": "tor',
        b'{"time": "2026-11-22T00:00:00+00:00", "event": "something_new"}',
        b'{"time": "2026-11-22T00:00:00+00:00", "event": "restored", "url": "", "step": "seven"}',
        b'{"time": "2026-11-22T00:00:00+00:00", "event": "restored", "url": ""}',
        b'{"time": "2026-11-22T00:00:00+00:00", "event": "restored", "url": "", "step": 7, "x": 1}',
        b'{"time": 7, "event": "restored", "url": "", "step": 7}',
        b'{"time": "2026-11-22T00:00:00+00:00", "event": "job_ended", "job": "1", "restart": 0,'
        b' "reason": "bored", "requeued": true}',
        b'{"time": "0001-01-01T00:00:00+12:00", "event": "restored", "url": "", "step": 7}',
        b'{"time": "9999-12-31T23:59:59-12:00", "event": "restored", "url": "", "step": 7}',
        b"[1]",
        b"\xff\xfe",
    ],
)
def test_lines_that_are_not_events_are_skipped_with_one_warning(tmp_path, caplog, damaged):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(START)
    with open(ledger.path, "ab") as file:
        file.write(damaged + b"\n")
    ledger.append(FINISHED)
    assert ledger.read() == [START, FINISHED]
    (record,) = caplog.records
    assert record.getMessage().endswith("in line 2")


def test_attempts_are_starts_and_those_that_ended_before_one():
    begun = [START, RETRY, RESUME, RETRY]
    assert num_attempts(begun, is_running=False) == 2
    assert num_attempts([*begun, RETRY], is_running=False) == 3
    assert num_attempts(begun, is_running=True) == 3
    assert num_attempts([*begun, RESUME], is_running=True) == 3


@pytest.mark.parametrize(
    ("ledger", "is_running", "causes"),
    [
        ([START, FINISHED], False, []),
        ([START, RETRY, RESUME, FINISHED], False, [KILLED]),
        ([START, RESUME, FINISHED], False, [LOST]),
        ([START], True, []),
        ([START], False, [LOST]),
        ([START, replace(FINISHED, outcome=Outcome.PHASE_FINISHED), RESUME], True, []),
        ([START, REWIND, RESUME], True, []),
        ([START, OUT_OF_MEMORY, RESUME], True, [OUT_OF_MEMORY.description]),
        ([START, OUT_OF_MEMORY, HALVED, RESUME], True, [HALVED.cause]),
        ([START, GaveUp(spike=SPIKE), REFUSED], False, [str(SPIKE)]),
        ([JOB_STARTED, START, NODE_FAILED, JOB_STARTED, RESUME], True, [NODE_FAILED.cause]),
        ([JOB_STARTED, START, NODE_LOST, JOB_STARTED, RESUME], True, [NODE_LOST.cause]),
        ([JOB_STARTED, START, RETRY, REPLACED, RESUME], True, [REPLACED.description]),
        ([JOB_STARTED, START, RETRY, BLAMED, RESUME], True, [f"{KILLED}; {BLAMED.description}"]),
        ([JOB_STARTED, START, RETRY, RESUME, REPLACED], True, [KILLED]),
        ([START, KILLED_SUPERVISOR, JOB_STARTED, RESUME], True, ["its supervisor was killed"]),
        (
            [JOB_STARTED, replace(NODE_FAILED, reason=JobEndReason.FORGOTTEN), JOB_STARTED]
            + [replace(START, attempt=f"{NODE_FAILED.job}.{NODE_FAILED.restart}.0.ab")],
            False,
            ["the Slurm controller forgot its start", LOST],
        ),
        ([START, Interrupted(signal="SIGINT", step=0)], False, []),
        ([START, Canceled(job="17"), replace(START, attempt="17.0.0.ab")], False, []),
        ([START, replace(PREEMPTED, reason=JobEndReason.CANCELED)], False, []),
    ],
)
def test_every_interruption_is_found_once_also_those_nobody_could_write(ledger, is_running, causes):
    found = interruptions(ledger, is_running)
    assert [each.description for each in found] == causes
    assert all(each.is_failure for each in found)


def test_preemption_interrupts_a_run_but_is_no_failure():
    ledger = [JOB_STARTED, START, TrainingEnded(outcome=Outcome.STOPPED, step=4), PREEMPTED]
    (found,) = interruptions(ledger, is_running=False)
    assert (found.description, found.is_failure, found.step) == ("preempted", False, 4)


def test_a_job_that_found_the_run_in_use_leaves_no_events():
    ended = replace(PREEMPTED, job="18", reason=JobEndReason.RUN_IN_USE, other_job="17")
    second = [replace(JOB_STARTED, job="18"), ended]
    assert without_refused_jobs([JOB_STARTED, START, *second]) == [JOB_STARTED, START]


def test_a_damaged_heartbeat_is_skipped(tmp_path):
    record = HeartbeatRecord(
        rank=1, time=1.5, written=2.5, step=3, phase="train", hostname="n1", pid=4
    )
    (tmp_path / "ranks-from-00000.jsonl").write_text(f"{{\n{json.dumps(vars(record))}\n{{")
    (tmp_path / "ranks-from-00002.jsonl").write_bytes(b"\xff")
    assert read_heartbeats(tmp_path) == [record]
    assert record.is_alive is None


def test_a_lock_names_its_holder_and_whether_it_is_still_held(tmp_path):
    path = tmp_path / "launcher.lock"
    assert read_lock(path) is None
    with RunDir(tmp_path).locked("launcher"):
        held = read_lock(path)
    assert (held.pid, held.holder, held.hostname) == (os.getpid(), "launcher", socket.gethostname())
    assert (held.is_held, read_lock(path).is_held) == (True, False)
    path.write_text('{"pid": 17, "holder": "launcher", "hostname": "another-host"}\n')
    assert (read_lock(path).hostname, read_lock(path).is_held) == ("another-host", None)


@pytest.mark.parametrize(
    "read", [lambda path: Ledger(path).read(), lambda path: list(read_measurements(path))]
)
def test_holes_of_a_file_are_not_read(tmp_path, read):
    path = tmp_path / "holes.jsonl"
    with open(path, "wb") as file:
        file.truncate(40 << 30)
    tracemalloc.start()
    assert not read(path)
    assert tracemalloc.get_traced_memory()[1] < 32 << 20
    tracemalloc.stop()


def test_training_into_what_others_may_write_is_refused(tmp_path, capsys):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o777)
    assert main(["train", str(tmp_path / "a.yaml"), "--run-dir", str(run_dir)]) == 2
    error = capsys.readouterr().err
    assert "chmod" in error
    assert not list(run_dir.iterdir())
