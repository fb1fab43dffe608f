"""`pretrain describe` counts what a run costs; `pretrain new` writes one that trains as it is."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from foundation.settings import load_config
from pretrain.cli import main
from pretrain.config.cluster import load_cluster
from pretrain.config.run import (
    DataConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    PhaseConfig,
    RunConfig,
)
from pretrain.costs.device_memory import Footprint, largest_micro_batch
from pretrain.costs.fitting import advice, cheapest_fit
from pretrain.costs.flops import run_cost, token_flops
from pretrain.costs.run_time import evaluation_flops, run_time
from pretrain.mixers.deltanet import facts as deltanet_facts
from pretrain.rundir.run_dir import RunDir
from pretrain.scaling.new_experiment import TrainingText, experiment_text, new_experiment

MODELS = Path(__file__).parents[4] / "configs" / "models"


def run_config(**engine) -> RunConfig:
    model = ModelConfig(vocab_size=1000, num_layers=4, d_model=64, num_heads=4, memory_length=32)
    return RunConfig(
        model=model, data=DataConfig(lanes=16, segment_length=32), engine=EngineConfig(**engine)
    )


# Those of so small a model would outweigh what is sharded.
SMALL_BUCKETS = {"zero_optimization": {"reduce_bucket_size": 1}}


def wide_run() -> RunConfig:
    """Of mostly weights and moments, so that more ranks help most."""
    run = run_config(precision="bf16", zero_stage=1, deepspeed_extra=SMALL_BUCKETS)
    model = replace(run.model, d_model=512, num_layers=32, memory_length=1)
    return replace(run, model=model, data=replace(run.data, segment_length=1, lanes=64))


def needed_of(run: RunConfig) -> float:
    return Footprint(run, 4, on_gpu=True).device


def said_of(capsys, *arguments: str) -> str:
    """What `describe` prints."""
    assert main(["describe", *arguments]) == 0
    return capsys.readouterr().out


def test_a_hybrid_is_called_by_its_layers(capsys):
    hybrid = ["model.layer_kinds=[deltanet, attention]", "model.num_layers=6", "optim.name=muon"]
    said = said_of(capsys, str(MODELS / "xl_modern_10m.yaml"), *hybrid)
    assert re.search(r"\b1:1 .*DeltaNet", said)


@pytest.mark.parametrize(
    ("gpu", "precision", "peak", "words"),
    [
        ("H100", "fp32", 67e12, "67 TFLOP/s  (fp32; data sheet, dense)"),
        ("H100", "auto", 989e12, "ZeRO-2, bf16 (auto), activation"),
        ("cpu", "auto", 100e9, "ZeRO-2, fp32 (auto), activation"),
    ],
)
def test_time_follows_from_the_peak_of_the_precision(capsys, gpu, precision, peak, words):
    path = MODELS / "wt103-base.yaml"
    options = f"--gpu {gpu} engine.precision={precision} --mfu 0.5 seed=2"
    said = said_of(capsys, str(path), *options.split())
    assert words in said
    is_plain = "attention: plain operations" in said
    assert is_plain == (gpu != "cpu" and "fp32" in precision)
    config = load_config(RunConfig, path)
    flops = token_flops(config.model, config.data.segment_length, config.data.lanes).training
    speed = float(re.search(r"([\d,]+) tokens/s", said)[1].replace(",", ""))
    assert speed == pytest.approx(0.5 * peak / flops, rel=0.01, abs=1)
    assert f": 1 rank ({gpu}{'' if gpu == 'cpu' else ' with 80 GB'})" in said.splitlines()[0]


def test_plain_torch_shards_nothing(capsys):
    said = said_of(capsys, str(MODELS / "xl_modern_10m.yaml"), "engine.kind=torch")
    assert "plain torch, " in said.splitlines()[0]


@pytest.mark.parametrize(
    "hardware",
    [["--cluster", str(MODELS.parent / "clusters" / "8xh100.yaml")], ["--gpu", "A100"]],
    ids=["8 GPUs", "1 GPU"],
)
def test_the_7b_model_does_not_fit_and_what_is_advised_does(capsys, hardware):
    command = [str(MODELS / "xl_modern_7b.yaml"), *hardware]
    said = said_of(capsys, *command)
    (advised,) = re.findall(r"to fit +set ((?:engine\.\w+=\w+ )+)\((\S+) GiB", said)
    said = said_of(capsys, *command, *advised[0].split())
    needed = re.search(r"device memory +(\S+) GiB  per rank, fits in", said)
    assert needed[1] == advised[1], "the same estimate"
    assert "to fit" not in said


def test_the_advised_change_is_the_cheapest_of_those_that_fit():
    run = run_config(precision="bf16", zero_stage=1, deepspeed_extra=SMALL_BUCKETS)
    needed = needed_of(run)
    unchanged = cheapest_fit(run, 4, needed, on_gpu=True)
    assert unchanged.changes == {}
    changes: dict = {}
    costs = []
    for part in (0.9, 0.7, 0.5, 0.4, 0.3, 0.25):
        found = cheapest_fit(run, 4, part * needed, on_gpu=True)
        assert found.bytes <= part * needed
        changes = found.changes
        costs.append(found.cost)
        for name in found.changes:  # none is superfluous
            kept = {key.removeprefix("engine."): value for key, value in found.changes.items()}
            del kept[name.removeprefix("engine.")]
            fewer = replace(run, engine=replace(run.engine, **kept))
            assert needed_of(fewer) > part * needed
    assert costs == sorted(costs)
    assert "engine.offload_optimizer" in changes, "the most expensive change comes last"
    assert "engine.zero_stage=2" in advice(run, 4, 0.9 * needed, True)
    more = advice(wide_run(), 4, 0.04 * needed_of(wide_run()), True)
    assert re.search(r"\b8 .*engine\.zero_stage=3", more)
    assert "engine." not in advice(run, 4, 10.0, True)


def test_evaluations_are_counted_by_phase_and_at_the_end():
    phases = (PhaseConfig(from_step=10, segment_length=64),)
    evaluation, run = EvaluationConfig(interval=5, max_tokens=1000, lanes=4), run_config()
    run = replace(run, data=replace(run.data, phases=phases), evaluation=evaluation)
    run = replace(run, optim=replace(run.optim, steps=25))
    time = run_time(run, 2, 1e9)
    assert time.evaluations == 5
    without = replace(run.model, memory_length=0)

    def flops(length: int, ranks: int, tokens: int = 1000) -> float:
        phase = replace(run, data=replace(run.data, segment_length=length))
        return evaluation_flops(phase, tokens, ranks, [run.model, without])

    between = 2 * flops(32, 2) + 2 * flops(64, 2)
    assert time.evaluation == pytest.approx((between + flops(64, 2, 100_000)) / 1e9)
    assert flops(32, 8) == flops(32, 4), "4 lanes"
    at_the_end = replace(run, evaluation=replace(run.evaluation, interval=0))
    assert run_time(at_the_end, 2, 1e9).evaluations == 1


CLUSTERS = Path(__file__).parents[4] / "configs" / "clusters"


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.name)
def test_as_many_ranks_are_described_as_the_launcher_starts(path, capsys):
    tasks = load_cluster(path).tasks_per_node
    cluster = ["data.lanes=64", "--cluster", str(path), "--nodes", "2+1"]
    said = said_of(capsys, str(MODELS / "wt103-base.yaml"), *cluster)
    assert f"{2 * tasks} ranks" in said.splitlines()[0]


def test_tokens_that_are_asked_for_become_steps(capsys):
    said = said_of(capsys, str(MODELS / "xl_modern_10m.yaml"), "--tokens", "1B", "data.lanes=16")
    steps = round(
        1e9
        / load_config(RunConfig, MODELS / "xl_modern_10m.yaml", ["data.lanes=16"]).tokens_per_step
    )
    assert f"({steps:,} steps, " in said
    assert main(["describe", str(MODELS / "xl_modern_10m.yaml"), "--tokens", "0"]) == 2


def test_dotted_names_in_a_file_are_answered_with_sections(tmp_path, capsys):
    (tmp_path / "dotted.yaml").write_text("optim.schedule.warmup_steps: 3\n")
    assert main(["describe", str(tmp_path / "dotted.yaml")]) == 2
    assert "optim: {schedule: {warmup_steps: ...}}" in capsys.readouterr().err


def test_a_run_directory_is_described_as_its_experiment(tmp_path, capsys):
    experiment = str(MODELS / "enwik8-base.yaml")
    RunDir.create(tmp_path / "run", load_config(RunConfig, Path(experiment)))
    on_gpus = ["--cluster", str(CLUSTERS / "8xh100.yaml"), "--nodes", "2"]
    for more in ([], ["engine.precision=bf16", "data.lanes=32", *on_gpus]):
        expected = said_of(capsys, experiment, "optim.steps=30", *more)
        assert ("16 ranks (H100 with 80 GB)" in expected) == bool(more)
        assert said_of(capsys, str(tmp_path / "run"), "optim.steps=30", *more) == expected
    assert main(["describe", str(tmp_path)]) == 2
    assert "run.json" in capsys.readouterr().err


def test_the_largest_micro_batch_is_the_largest_that_fits():
    run = run_config()
    for lanes in (1, 2, 4):
        smaller = replace(run, engine=replace(run.engine, micro_batch_lanes=lanes))
        capacity = Footprint(smaller, 4).device
        assert largest_micro_batch(run, 4, capacity) == lanes
    assert largest_micro_batch(run, 4, 1000.0) == 0


def test_describe_refuses_data_and_weights_as_train_does(corpus, tmp_path, capsys):
    model = "{num_layers: 1, d_model: 8, num_heads: 1}"
    data = f"{{path: {corpus.directory.parent}, lanes: 1}}"
    (tmp_path / "run.yaml").write_text(f"data: {data}\nmodel: {model}\n")
    run = str(tmp_path / "run.yaml")
    assert main(["describe", run]) == 0
    capsys.readouterr()
    assert main(["describe", run, "data.lanes=100000"]) == 0, "a plan before there is more text"
    note = capsys.readouterr().err
    assert main(["train", run, "--run-dir", str(tmp_path / "run"), "data.lanes=100000"]) == 2
    said = capsys.readouterr().err.splitlines()[-1].partition(": ")[2]
    assert "100000 lanes" in said
    assert said in note
    for setting, message in (
        (f"data.mixture=[{{path: {tmp_path}}}]", f"{tmp_path}"),
        (f"initial_weights={tmp_path}", f"{tmp_path}"),
    ):
        said = []
        for command in (["describe", run], ["train", run, "--run-dir", str(tmp_path / "run")]):
            assert main([*command, setting]) == 2, (command, setting)
            said.append(capsys.readouterr().err.splitlines()[-1].partition(": ")[2])
            assert message in said[-1]
        assert said[0].endswith(said[1]) or said[1].endswith(said[0])
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("parameters", [2e5, 3e6, 1e7, 1e8, 7e9])
@pytest.mark.parametrize("tokens", [3000, 10**7, 10**12])
def test_the_file_reads_back_as_the_run_it_was_written_from(parameters, tokens, tmp_path):
    vocab_size = 300 if parameters < 1e6 else 16_000
    longest = tokens // 40
    text = TrainingText(
        path=Path("/data/a: b"), tokens=tokens, longest_document=longest, vocab_size=vocab_size
    )
    run = new_experiment("mine", text, parameters)
    assert run_cost(run).parameters == pytest.approx(parameters, rel=0.4)
    file = tmp_path / "mine.yaml"
    file.write_text(experiment_text(run, file, text))
    found = load_config(RunConfig, file)
    assert replace(found, model=replace(found.model, vocab_size=vocab_size)) == run
    assert run.data.lanes * longest <= tokens
    assert run.data.segment_length * run.data.lanes <= tokens
    assert run.optim.steps * run.tokens_per_step <= max(12 * tokens, 200 * run.tokens_per_step)
    assert all(" #" not in line or len(line) < 100 for line in file.read_text().splitlines())


def test_with_paper_the_parts_are_the_defaults_and_the_size_is_still_as_asked(tmp_path):
    text = TrainingText(path=Path("c"), tokens=10**8, longest_document=9000, vocab_size=16_000)
    run = new_experiment("mine", text, 3e7, paper=True)
    file = tmp_path / "mine.yaml"
    file.write_text(experiment_text(run, file, text))
    model, plain = load_config(RunConfig, file).model, ModelConfig()
    parts = ("positions", "norm", "norm_position", "feed_forward", "query_key_norm", "z_loss")
    for part in (*parts, "num_key_heads"):
        assert getattr(model, part) == getattr(plain, part), part
    assert new_experiment("mine", text, 3e7).model.norm_position != plain.norm_position
    assert run_cost(run).parameters == pytest.approx(3e7, rel=0.4)
    assert run.optim.learning_rate == 2.5e-4
    assert "the paper's: " not in file.read_text()
    today = experiment_text(new_experiment("mine", text, 3e7), file, text)
    named = re.findall("the paper's: (.*)", today)
    assert named == ["relative", "layernorm", "post", "relu"]


HYBRID = "model.layer_kinds=[deltanet, deltanet, deltanet, attention]"


@pytest.mark.parametrize("steps", [0, 300])
def test_settings_of_the_command_line_are_in_the_file_and_the_size_is_as_asked(steps, tmp_path):
    text = TrainingText(path=Path("c"), tokens=10**7, longest_document=9000, vocab_size=4000)
    overrides = [HYBRID, "optim.name=muon", "optim.schedule={shape: wsd, decay_steps: 7}"]
    overrides.append("data.lanes=4")
    run = new_experiment("mine", text, 3e6, steps=steps, overrides=overrides)
    assert run.model.num_layers % 4 == 0
    assert run_cost(run).parameters == pytest.approx(3e6, rel=0.4)
    file = tmp_path / "mine.yaml"
    file.write_text(experiment_text(run, file, text, overrides))
    found = load_config(RunConfig, file)
    assert found == replace(run, model=replace(run.model, vocab_size=0))
    assert found.model.num_layers == 4 * found.model.num_layers_with_rows
    assert (found.optim.name, found.optim.schedule.decay_steps) == ("muon", 7)
    six = new_experiment("mine", text, 3e6, overrides=["model.num_layers=6"])
    assert six.model.num_layers == 6
    narrow = new_experiment("mine", text, 3e6, overrides=["model.d_model=36"]).model
    assert narrow.num_heads * narrow.head_width == 36


@pytest.mark.parametrize(
    ("shape", "near", "rate"),
    [
        ("num_layers=2 d_model=32 num_heads=2", 1.7e5, 2e-3),
        ("num_layers=12 d_model=768", 8e7, 6e-4),
        ("num_layers=24 d_model=2048", 1e9, 3e-4),
        ("d_model=32", 2.7e5, 2e-3),
        ("d_model=32 num_heads=2", 2.7e5, 2e-3),
        ("num_layers=40", 3e7, 1.2e-3),
    ],
)
def test_a_given_shape_decides_what_follows_from_the_size(shape, near, rate):
    text = TrainingText(path=Path("c"), tokens=10**7, longest_document=9000, vocab_size=4000)
    given = [f"model.{setting}" for setting in shape.split()]
    run = new_experiment("mine", text, None, overrides=given)
    assert run_cost(run).parameters == pytest.approx(near, rel=0.25)
    assert run.optim.learning_rate == rate
    assert run.model.num_heads % run.model.key_heads == 0
    assert {f"{name}={getattr(run.model, name)}" for name in vars(run.model)} >= {*shape.split()}


@pytest.mark.parametrize("steps", [20, 300, 20_000])
def test_a_short_run_is_evaluated_less_often_not_on_less_text(steps):
    text = TrainingText(path=Path("c"), tokens=10**7, longest_document=900, vocab_size=4000)
    for overrides in ([], [HYBRID]):
        run = new_experiment("mine", text, 1e7, False, steps, overrides)
        assert run.evaluation.max_tokens == 100_000
        time = run_time(run, 1, 1.0)
        between = time.evaluation * (1 - 1 / time.evaluations)
        assert 0 <= between <= 0.1 * time.training
        assert (time.evaluations > 1) == (steps > 20)


def test_a_new_experiment_trains_as_it_is(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    home = corpus.directory.parent
    assert main(["new", "tiny.yaml", "--corpus", str(home), "--parameters", "100k"]) == 0
    assert "local tiny.yaml" in capsys.readouterr().out
    steps = ["optim.steps=2", "optim.schedule.warmup_steps=1", "evaluation.max_tokens=100"]
    settings = [*steps, "engine.kind=torch", "metrics.tensorboard=false"]
    assert main(["train", "tiny.yaml", *settings, "--run-dir", "runs/tiny"]) == 0
    assert RunDir.open(tmp_path / "runs" / "tiny").read_metrics()[-1]["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs", "tiny.yaml"]


def test_a_hybrid_is_planned_with_the_kernels_that_are_installed(monkeypatch, capsys) -> None:
    command = ["describe", str(MODELS / "xl_modern_10m.yaml"), "--nodes", "1", "--gpu", "H100"]
    command += ["model.layer_kinds=[deltanet, attention]", "engine.precision=bf16"]
    found = []
    for missing in ("", "flash-linear-attention is not installed here"):
        monkeypatch.setattr(deltanet_facts, "missing_package", lambda missing=missing: missing)
        assert main(command) == 0
        said = capsys.readouterr().out
        found.append(re.findall("delta rule: (.*)", said))
        found.append(float(re.findall(r"activations +([\d.]+) GiB", said)[0]))
    fla, least, chunks, most = found
    assert fla == ["flash-linear-attention"]
    assert chunks == [f"plain operations in chunks ({missing})"]
    assert least < most
