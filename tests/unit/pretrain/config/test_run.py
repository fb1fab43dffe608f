"""A run's settings: what contradicts, what phases change, and what they mean from every place."""

from dataclasses import replace
from pathlib import Path

import pytest

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, MixturePart, TokenizerConfig
from foundation.errors import ConfigError, DataError, UserError
from foundation.settings import load_config
from pretrain.config.phases import (
    describe_border,
    first_step_at,
    lane_seed_at,
    next_border,
    phase_at,
    restarts_lanes,
    run_at,
    runs_of_phases,
    settings_at,
    tokens_of_steps,
)
from pretrain.config.resolve import resolve, with_absolute_paths, with_vocabulary
from pretrain.config.run import (
    DataConfig,
    MetricsConfig,
    ModelConfig,
    OptimConfig,
    PhaseConfig,
    RunConfig,
    ScheduleConfig,
)
from pretrain.errors import CheckpointError
from pretrain.model.transformer_xl import TransformerXL
from pretrain.rundir.changed_settings import describe_rate, refused_changes
from pretrain.rundir.events import SettingsChanged
from pretrain.rundir.history import setting_changes
from pretrain.rundir.run_dir import RunDir
from pretrain.weights.export import write_export
from pretrain.weights.initial_weights import check_initial_weights
from tests.helpers.checkpoints import publish_step
from tests.helpers.corpora import make_tiny_corpus
from tests.helpers.models import TINY

# Settings -> what the message must name.
CONTRADICTIONS = {
    "model.vocab_size=50 model.cutoffs=[20,50]": r"model\.cutoffs=\[20, 50\].* 50 ",
    "model.vocab_size=50 model.cutoffs=[20,10]": r"model\.cutoffs=\[20, 10\]",
    "model.vocab_size=50 model.cutoffs=[10,20] model.d_embed=8 model.div_val=3": r"div_val=3.* 8 ",
    "model.cutoffs=[10] model.tie_projections=[true]": r"model\.tie_projections .* 2,",
    "model.d_model=7": r"model\.d_model=7",
    "model.layer_kinds=[deltanet,deltanet,attention]": r"model\.layer_kinds=.* num_layers=4",
    "model.memory_length=[1,2,3]": r"model\.memory_length=.* num_layers=4",
    "model.memory_length=[]": r"model\.memory_length=.* num_layers=4",
    "model.memory_length=[4,8] model.compressed_length=2": r"model\.memory_length.* \[4, 8\]",
    "model.memory_length=[0,8] model.same_length=true": r"model\.same_length .*memory_length",
    "model.memory_length=0 model.compressed_length=8": r"compressed_length .*memory_length",
    "model.memory_length=2 model.compressed_length=8": r"compression_rate=3.*memory_length=2",
    "model.same_length=true model.compressed_length=8": r"model\.same_length .*compressed_length",
    "model.same_length=true model.memory_tokens=4": r"model\.memory_tokens=4 .*same_length",
    "model.memory_tokens=4": r"optim\.gradient_segments of 2",
    "model.positions=rope model.clamp_length=5": r"model\.clamp_length .*positions=rope",
    "model.positions=alibi model.untie_biases=true": r"model\.untie_biases .*positions=alibi",
    "model.positions=rope model.d_head=33": r"model\.positions=rope .* 33;.*d_head",
    "model.num_heads=4 model.num_key_heads=3": "num_key_heads=3",
    "model.num_heads=4 model.num_key_heads=8": "num_key_heads=8",
    "model.dropout=0.1 engine.compile=true": r"model\.dropout",
    "engine.offload_optimizer=true engine.zero_stage=0": r"engine\.kind",
    "engine.offload_optimizer=true engine.kind=torch": r"engine\.kind",
    "engine.zero_stage=3 engine.kind=torch": r"engine\.kind",
    "checkpoint.local=/nvme checkpoint.local_interval=200": r"checkpoint\.local_interval=200",
    "checkpoint.local=nvme": r"checkpoint\.local.* nvme",
    "data.phases=[{from_step:5}]": r"data\.phases.* 5 ",
    "data.phases=[{from_step:30,lanes:8},{from_step:30,lanes:4}]": r"data\.phases.* \[30, 30\]",
    "metrics.profile_steps=[3,2]": r"metrics\.profile_steps=\[3, 2\]",
    "metrics.profile_steps=[0,2]": r"metrics\.profile_steps=\[0, 2\]",
    "optim.schedule.decay_steps=9": r"optim\.schedule\.decay_steps=9 .* shape=cosine",
    "model.init_std=0": r"model\.init_std=0(\.0)? must",
    "recovery.spike_threshold=1e-320": r"recovery\.spike_threshold=1e-320 .*0 or from 0\.1",
    "engine.watchdog_timeout_seconds=1e-320": r"engine\.watchdog_timeout_seconds=",
    "optim.steps=40 optim.schedule.warmup_steps=80": r"warmup_steps=80 .*warmup_steps=2$",
    "optim.steps=100 optim.schedule={shape:wsd,warmup_steps:80,decay_steps:21}": (
        r"decay_steps=21 .* 20 steps"
    ),
}


@pytest.mark.parametrize("settings", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_refused_by_name(tmp_path, settings: str) -> None:
    (tmp_path / "run.yaml").write_text("name: x\n")
    overrides = [each.replace(":", ": ") for each in settings.split()]
    with pytest.raises(ConfigError, match=CONTRADICTIONS[settings]):
        load_config(RunConfig, tmp_path / "run.yaml", overrides)


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(ConfigError, match="vocab_size=0"):
        TransformerXL(ModelConfig())


def test_odd_widths_are_accepted_where_nothing_is_halved() -> None:
    assert ModelConfig(positions="alibi", d_model=9, num_heads=3).head_width == 3
    assert ModelConfig(positions="rope", d_model=9, num_heads=1, d_head=4).head_width == 4


def test_swiglus_third_matrix_is_paid_for_by_its_width() -> None:
    assert ModelConfig(d_model=768, num_heads=12, feed_forward="swiglu").inner_width == 2048
    assert ModelConfig(d_model=100, feed_forward="swiglu").inner_width == 320
    assert ModelConfig(d_model=100, feed_forward="swiglu", d_inner=7).inner_width == 7


BOOKS = (MixturePart(path="books"),)  # type: ignore[arg-type]
PHASES = (PhaseConfig(from_step=10, mixture=BOOKS), PhaseConfig(from_step=30, lanes=8))
RUN = RunConfig(seed=7, data=DataConfig(lanes=4, phases=PHASES))
LONGER = tuple(PhaseConfig(from_step=at, segment_length=to) for at, to in ((10, 32), (30, 64)))
WIDER = PhaseConfig(from_step=50, lanes=8)
WARM_UP = RunConfig(seed=7, data=DataConfig(lanes=4, segment_length=16, phases=(*LONGER, WIDER)))


def test_a_phase_changes_what_it_names_and_keeps_the_rest():
    assert [run_at(RUN, step).data.lanes for step in (0, 9, 10, 29, 30, 99)] == [4, 4, 4, 4, 8, 8]
    assert [run_at(RUN, step).data.mixture for step in (9, 10, 30)] == [(), BOOKS, BOOKS]
    assert [phase_at(RUN, step) for step in (0, 9, 10, 30)] == [0, 0, 1, 2]
    assert [first_step_at(RUN, step) for step in (9, 10, 29, 31)] == [0, 10, 10, 30]
    assert [lane_seed_at(RUN, step) for step in (9, 10, 30)] == [7, 8, 9]
    assert [next_border(RUN, step) for step in (0, 9, 10, 29, 30, 999)] == [
        10,
        10,
        30,
        30,
        1000,
        1000,
    ]
    assert [run.data.lanes for run in runs_of_phases(RUN)] == [4, 4, 8]
    assert run_at(run_at(RUN, 30), 30) == run_at(RUN, 30)


def test_later_phases_may_change_and_started_ones_may_not(tmp_path):
    run_dir = RunDir.create(tmp_path / "run", RUN)
    publish_step(run_dir.checkpoints, 20)
    later = (PHASES[0], PhaseConfig(from_step=20, lanes=2))
    run_dir.refuse_other_run(replace(RUN, data=replace(RUN.data, phases=later)))
    earlier = replace(RUN, data=replace(RUN.data, phases=PHASES[1:]))
    with pytest.raises(ConfigError, match="before step 20"):
        run_dir.refuse_other_run(earlier)
    run_dir.refuse_other_run(replace(RUN, optim=OptimConfig(steps=2000)))


def test_a_phase_of_another_segment_length_alone_continues_its_lanes():
    lengths = [run_at(WARM_UP, step).data.segment_length for step in (0, 9, 10, 30, 50)]
    assert lengths == [16, 16, 32, 64, 64]
    assert [next_border(WARM_UP, step) for step in (0, 10, 30, 50)] == [10, 30, 50, 1000]
    assert [step for step in range(60) if restarts_lanes(WARM_UP, step)] == [50]
    assert [lane_seed_at(WARM_UP, step) for step in (9, 10, 49, 50)] == [7, 7, 7, 10]


def test_tokens_are_counted_by_the_lanes_and_segments_of_each_phase():
    assert tokens_of_steps(WARM_UP, range(60)) == 4 * (10 * 16 + 20 * 32 + 20 * 64) + 10 * 8 * 64
    assert tokens_of_steps(WARM_UP, range(45, 52)) == 5 * 4 * 64 + 2 * 8 * 64
    assert tokens_of_steps(WARM_UP, range(5)) == 5 * 4 * 16
    assert tokens_of_steps(WARM_UP, range(60, 60)) == 0


def test_every_path_of_a_run_becomes_absolute(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    parts = (MixturePart(path=Path("a")), MixturePart(path=Path("b")))
    later = PhaseConfig(from_step=5, mixture=(MixturePart(path=Path("c")),))
    run = RunConfig(
        initial_weights=Path("w"), data=DataConfig(path=Path("d"), mixture=parts, phases=(later,))
    )
    found = with_absolute_paths(run)
    paths = [found.initial_weights, found.data.path, *(part.path for part in found.data.mixture)]
    paths += [part.path for part in found.data.phases[0].mixture]
    assert paths == [tmp_path / name for name in "wdabc"]


def test_what_a_small_corpus_cannot_serve_is_rejected_before_training(tmp_path: Path) -> None:
    for name, length in (("a", 20), ("b", 40)):
        (tmp_path / f"{name}.txt").write_text("x" * length)
    tokenizer = TokenizerConfig(kind="bytes")
    text = (tmp_path / "a.txt", tmp_path / "b.txt")
    built = CorpusConfig(input=text, output=tmp_path / "c", tokenizer=tokenizer)
    build_corpus(replace(built, validation_fraction=0))
    with pytest.raises(DataError, match="validation"):
        resolve(RunConfig(data=DataConfig(path=tmp_path / "c", lanes=1, segment_length=62)))
    (tmp_path / "v.txt").write_text("y" * 5)
    build_corpus(replace(built, output=tmp_path / "d", validation_input=(tmp_path / "v.txt",)))
    with pytest.raises(DataError, match=r"62 .* 16 .*data\.lanes=1"):
        resolve(RunConfig(data=DataConfig(path=tmp_path / "d")))
    fitting = DataConfig(path=tmp_path / "d", lanes=1, segment_length=62)
    (shard,) = (tmp_path / "d" / "train").glob("*.mds")
    shard.write_bytes(bytes(shard.stat().st_size))
    # No shard is read: each rank reads its own later. Files in configs/models have a vocabulary.
    for vocab_size in (0, 32_000):
        run = RunConfig(model=ModelConfig(vocab_size=vocab_size), data=fitting)
        assert resolve(run).model.vocab_size == with_vocabulary(run).model.vocab_size == 257


def test_a_missing_corpus_is_named_by_its_absolute_path(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RunConfig(data=DataConfig(path=Path("p")))
    with pytest.raises(ConfigError, match=f"{tmp_path}/p"):
        with_vocabulary(run)
    with pytest.raises(DataError, match=f"{tmp_path}/p/train"):
        resolve(run)


LOST_AFTER_OTHERS = (MixturePart(path=Path("c")), MixturePart(path=Path("lost")))


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"path": Path("lost")}, "data.path"),
        ({"mixture": LOST_AFTER_OTHERS}, "data.mixture.1.path"),
        (
            {
                "mixture": LOST_AFTER_OTHERS[:1],
                "phases": (
                    PhaseConfig(from_step=5, lanes=1),
                    PhaseConfig(from_step=6, mixture=LOST_AFTER_OTHERS),
                    PhaseConfig(from_step=7, segment_length=8),
                ),
            },
            "data.phases.1.mixture.1.path",
        ),
        ({"mixture": (MixturePart(path=Path("c"), repeat=1e-9),)}, "data.mixture"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_named_with_its_setting(
    tmp_path: Path, monkeypatch, settings: dict, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_corpus(tmp_path / "c")
    data = DataConfig(**{"path": Path("c"), "lanes": 1, "segment_length": 16, **settings})
    with pytest.raises(UserError) as error:
        resolve(RunConfig(data=data))
    assert str(error.value).startswith(f"{name}: ")


MODEL = replace(TINY, d_inner=0, positions="rope")


@pytest.fixture
def exported(tmp_path: Path) -> RunConfig:
    """A run that starts from the export of an equal one."""
    run = RunConfig(model=MODEL, data=DataConfig(path=tmp_path / "data"))
    write_export(tmp_path / "export", TransformerXL(MODEL), run, 5, tmp_path)
    return replace(run, initial_weights=tmp_path / "export")


# What leaves names and shapes of the weights as they are, and whether it computes the same.
@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"norm_position": "pre"}, False),
        ({"feed_forward": "gelu"}, False),
        ({"positions": "alibi"}, False),
        ({"num_heads": 4}, False),
        ({"same_length": True}, False),
        ({"isolate_documents": True}, False),
        ({}, True),
        ({"dropout": 0.3, "attention_dropout": 0.2, "init_std": 0.5, "z_loss": 1e-4}, True),
        ({"memory_length": 64}, True),
        ({"d_head": 8, "d_inner": 64, "d_embed": 16, "num_key_heads": 2}, True),
        ({"compression_rate": 2}, True),
        ({"rope_extension": "yarn"}, True),
    ],
    ids=str,
)
def test_initial_weights_of_another_function_alone_are_refused(exported, change, is_same):
    other = replace(exported, model=replace(MODEL, **change))
    if is_same:
        check_initial_weights(other)
        return
    (name,) = change
    there, here = getattr(MODEL, name), getattr(other.model, name)
    with pytest.raises(CheckpointError, match=rf"model\.{name} is {there}, .* {here};"):
        check_initial_weights(other)


def test_settings_that_resumes_change_are_a_function_of_the_step(tmp_path):
    """From an older step on a change replaces later ones of its setting; the first value stays."""
    ledger = [
        SettingsChanged(changes={"optim.steps": (900, 1000)}),  # of an earlier version
        SettingsChanged(changes={"optim.learning_rate": (1.0, 2.0)}, step=12),
        SettingsChanged(changes={"metrics.interval": (1, 2)}, step=14),
        SettingsChanged(changes={"optim.betas": ([0.9, 0.999], [0.8, 0.9])}, step=20),
        SettingsChanged(changes={"optim.learning_rate": (2.0, 3.0)}, step=16),
        SettingsChanged(changes={"optim.learning_rate": (3.0, 4.0)}, step=16),
    ]
    latest = replace(RUN, optim=OptimConfig(learning_rate=4.0, betas=(0.8, 0.9)))
    changes = setting_changes(ledger)
    runs = [settings_at(latest, step, changes).optim for step in (0, 11, 12, 15, 16, 19, 20, 99)]
    assert [optim.learning_rate for optim in runs] == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 4.0, 4.0]
    assert [optim.betas for optim in runs] == [(0.9, 0.999)] * 6 + [(0.8, 0.9)] * 2
    assert {optim.steps for optim in runs} == {1000}
    borders = [next_border(latest, step, changes) for step in (0, 10, 12, 16, 20, 30)]
    assert borders == [10, 12, 16, 20, 30, 1000], "with those of the phases"
    said = "optim.betas [0.9, 0.999] -> [0.8, 0.9] from step 20"
    assert describe_border(latest, 20, changes) == said
    # A return to what held at an older step leaves nothing of the change.
    undone = [*ledger, SettingsChanged(changes={"optim.learning_rate": (4.0, 1.0)}, step=8)]
    assert [change.setting for change in setting_changes(undone)] == ["optim.steps", "optim.betas"]


def test_a_rate_given_at_an_older_step_replaces_all_later_changes_of_the_rate(tmp_path, caplog):
    """A user went from cosine to constant and more steps at 300, then back to 200 with a rate."""
    optim = OptimConfig(steps=300, learning_rate=1e-3)
    constant = replace(optim, steps=400, schedule=ScheduleConfig(shape="constant"))
    run_dir = RunDir.create(tmp_path / "run", replace(RUN, optim=optim))
    run_dir.change_settings(replace(RUN, optim=replace(constant, weight_decay=0.1)), 300)
    latest = replace(constant, weight_decay=0.1, learning_rate=2e-3)
    run_dir.change_settings(replace(RUN, optim=latest), 200)
    held, _, after = (run_dir.settings_at(step).optim for step in (199, 200, 300))
    assert (held, after) == (optim, latest)
    assert run_dir.settings_at(200).optim == replace(latest, weight_decay=0.0)
    assert "learning rate of step 201: 0.002, 7.9 times the last one, 0.000255" in caplog.text
    # Another change at that step moves no rate: the line is about the settings that hold there.
    caplog.clear()
    metrics = MetricsConfig(interval=3)
    run_dir.change_settings(replace(RUN, optim=latest, metrics=metrics), 100)
    assert "learning rate" not in caplog.text


FINISHED = OptimConfig(steps=220, learning_rate=2e-3, schedule=ScheduleConfig(final_fraction=0.15))


@pytest.mark.parametrize(
    ("step", "change", "said"),
    [
        (
            220,
            {"steps": 400},
            "learning rate of step 221: 0.00102, 3.4 times the last one, 0.0003;",
        ),
        (150, {"steps": 400}, "times the last one"),
        (220, {"steps": 219}, "220 -> 219 (it has made 220)"),
        (220, {"steps": 400, "learning_rate": 1e-3}, ""),
        (220, {"steps": 400, "schedule": ScheduleConfig(shape="constant")}, ""),
        (60, {"steps": 219}, ""),
        (5, {"steps": 400}, ""),
        (0, {"steps": 400}, ""),
    ],
)
def test_more_steps_alone_may_not_raise_the_rate_steeply(step, change, said):
    before = replace(RUN, optim=FINISHED)
    after = replace(RUN, optim=replace(FINISHED, **change))
    refused = refused_changes(before, after, step, before).get("optim.steps", "")
    assert said in refused
    assert bool(said) is bool(refused)


def test_the_rate_of_a_file_may_rise_steeply_only_if_a_command_says_so():
    """As when the file of a run's start takes back a lower rate, given at a resume."""
    low = replace(RUN, optim=replace(FINISHED, learning_rate=5e-4))
    refused = refused_changes(low, replace(RUN, optim=FINISHED), 100, low, ["name=tiny"])
    assert "4 times the last one" in refused["optim.learning_rate"]
    given = ["optim.learning_rate=2e-3"]
    assert not refused_changes(low, replace(RUN, optim=FINISHED), 100, low, given)
    assert not refused_changes(replace(RUN, optim=FINISHED), low, 100, low, [])


@pytest.mark.parametrize(
    ("shape", "steps", "rate"),
    [
        ("cosine", 220, ""),
        ("linear", 221, ""),  # 1.02 times the last one
        ("constant", 220, "learning rate of step 221: 0.002, 6.7 times the last one, 0.0003"),
        ("wsd", 400, "learning rate of step 221: 0.002, 6.7 times the last one, 0.0003"),
    ],
)
def test_the_next_rate_is_said_beside_the_last_one_if_a_change_moves_it(shape, steps, rate):
    before = replace(RUN, optim=FINISHED)
    schedule = replace(FINISHED.schedule, shape=shape)
    after = replace(RUN, optim=replace(FINISHED, steps=steps, schedule=schedule))
    assert describe_rate(before, after, 220) == rate
