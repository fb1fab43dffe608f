"""Every setting is explained in one place, and names and numbers are taken as people write them."""

from pathlib import Path

import pytest

from data_pipeline.cli import main as data_pipeline
from data_pipeline.config import CorpusConfig
from docs import settings_page
from foundation.errors import ConfigError
from foundation.settings import load_config, parse_config, settings_of
from foundation.sizes import parse_size
from launcher.cli import main as launcher
from pretrain.cli import main as pretrain
from pretrain.config.cluster import ClusterConfig
from pretrain.config.run import RunConfig

SCHEMAS = (RunConfig, CorpusConfig, ClusterConfig)
CORPUS = {"input": ["a"], "output": "b"}
CORPUS_FILES = sorted((Path(__file__).parents[3] / "configs" / "data").glob("*.yaml"))


def test_every_setting_and_section_is_explained_in_one_sentence():
    for schema in SCHEMAS:
        for setting in settings_of(schema):
            assert setting.meaning.endswith("."), f"{setting.name} has no docstring below its field"
            assert "\n" not in setting.meaning, setting.name


def test_the_shipped_files_of_corpora_need_only_input_and_output():
    assert len(CORPUS_FILES) >= 3
    for path in CORPUS_FILES:
        config = load_config(CorpusConfig, path, ["input=[a]", "output=b"])
        assert (config.input, config.output) == ((Path("a"),), Path("b"))
        for wrong in ("input=[]", "tokenizer.kind=wordpiece"):
            with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
                load_config(CorpusConfig, path, ["input=[a]", "output=b", wrong])


def test_the_settings_page_is_what_its_command_writes():
    written = settings_page.PATH.read_text()
    assert written == settings_page.page(), "run: python -m docs.settings_page"


@pytest.mark.parametrize(
    ("tree", "answer"),
    [
        ({"learning_rate": 1e-3}, "'optim.learning_rate'"),
        ({"optim": {"lr": 1e-3}}, "here it is optim.learning_rate"),
        ({"optim": {"xyz": 1e-3}}, "betas, clip_norm,"),
        ({"weight_decay": 0.1}, "'optim.weight_decay'"),
        ({"schedule": "cosine"}, "'optim.schedule'"),
        ({"optim": {"schedule": 3}}, "shape, warmup_steps"),
        ({"model": {"num_hed": 2}}, "'model.num_heads'"),
        ({"checkpoint": {"every": 2}}, "here it is interval, in checkpoint"),
        ({"optimizer": {"eps": 1}}, "optimizer.eps: unknown setting; here it is optim.epsilon"),
        ({"model": {"normalization": 1}}, "here it is model.norm"),
        ({"training": {"seq_len": 8}}, "training.seq_len: unknown setting; here it is data.seg"),
        ({"train": {"steps": 8}}, "train.steps: unknown setting; did you mean 'optim.steps'?"),
        ({"activation_checkpoint": {"mode": 1}}, "here it is engine.activation_checkpointing"),
        ({"optimizer": "adamw"}, "here it is optim.name"),
        ({"engine": {"cpu_offload": True}}, "here it is engine.offload_optimizer"),
        ({"partition": "gpu"}, "here it is in the cluster file"),
        ({"optim": {"lanes": 8}}, "'data.lanes' or 'evaluation.lanes'"),
        ({"interval": 8}, "'checkpoint.interval' or 'evaluation.interval' or 'metrics.interval'"),
    ],
)  # fmt: skip
def test_a_misspelt_name_or_one_of_another_section_is_answered_with_the_setting_meant(tree, answer):
    with pytest.raises(ConfigError) as caught:
        parse_config(RunConfig, tree, "file")
    assert answer in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "unit", "number"),
    [
        ("4k", "tokens", 4000), ("200K", "parameters", 200_000), ("8KB", "bytes", 8000),
        ("10M", "parameters", 10**7), ("1.5B", "tokens", 15 * 10**8),
        ("2G", "tokens", 2 * 10**9), ("1T", "tokens", 10**12), ("4Ki", "tokens", 4096),
        ("1_000k", "tokens", 10**6), ("12", "steps", 12), ("0.5", "tokens", 0.5),
        ("2GiB", "bytes", 1 << 31), ("2GB", "bytes", 2 * 10**9), ("8Mi", "bytes", 1 << 23),
        ("10kB", "bytes", 10**4), ("7B", "bytes", 7), ("2GiB", "tokens", None),
        ("4q", "tokens", None), ("k", "tokens", None), ("-4k", "tokens", None),
    ],
)  # fmt: skip
def test_sizes_are_numbers_with_a_prefix(text, unit, number):
    assert parse_size(text, unit) == number


def test_settings_with_a_unit_take_sizes_and_others_do_not():
    tree = {"model": {"vocab_size": "16k", "cutoffs": ["2k", 1e4]}, "optim": {"steps": "1.5k"}}
    run = parse_config(RunConfig, tree, "file")
    assert (run.model.vocab_size, run.optim.steps) == (16_000, 1500)
    assert run.model.cutoffs == (2000, 10_000)
    corpus = parse_config(CorpusConfig, {**CORPUS, "shard_bytes": "4MiB"}, "file")
    assert corpus.shard_bytes == 4 << 20
    for tree in ({"seed": "4k"}, {"optim": {"steps": "1.2345k"}}):
        with pytest.raises(ConfigError):
            parse_config(RunConfig, tree, "file")


@pytest.mark.parametrize(
    ("schema", "tree", "units"),
    [
        *((RunConfig, {"data": {"lanes": text}}, "4k or 10M")
          for text in ("10q", "20GB", "1m", "4kB", "1,000k")),
        (RunConfig, {"engine": {"watchdog_timeout_seconds": "30m"}}, "seconds"),
        (RunConfig, {"optim": {"betas": [0.9]}}, "optim.betas"),
        (CorpusConfig, {**CORPUS, "shard_bytes": "8Q"}, "8MiB or 2GB"),
    ],
)  # fmt: skip
def test_a_number_with_an_unknown_unit_is_told_which_there_are(schema, tree, units):
    with pytest.raises(ConfigError, match=units):
        parse_config(schema, tree, "file")


def test_each_setting_of_another_systems_section_has_its_answer():
    tree = {"training": {"steps": 1, "seq_len": 8, "foo": 1}, "metrics": {"log_freq": 1}}
    with pytest.raises(ConfigError) as caught:
        parse_config(RunConfig, tree, "file")
    assert str(caught.value).splitlines() == [
        "file: 4 problems",
        "  metrics.log_freq: unknown setting; here it is metrics.interval",
        "  training.steps: unknown setting; did you mean 'optim.steps'?",
        "  training.seq_len: unknown setting; here it is data.segment_length",
        "  training.foo: unknown setting",
    ]


def test_every_program_prints_its_settings_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for program, prefix, expected in (
        (pretrain, "", "data.phases[].from_step = required"),
        (pretrain, "optim.schedule", "optim.schedule.warmup_steps = 0"),
        (pretrain, "rate", "optim.learning_rate = 0.00025"),
        (pretrain, "engine.precision", "auto, fp32, bf16 or fp16; a resume may change it"),
        (data_pipeline, "vocab", "tokenizer.vocab_size = 16384"),
        (data_pipeline, "tokenizer", "tokenizer.vocab_size = 16384"),
        (launcher, "time", "time_limit = 24:00:00"),
        (pretrain, "model.mixers.deltanet.largest_write", "model.mixers = {}"),
        (pretrain, "training.lr", "optim.learning_rate = 0.00025"),
    ):
        assert program(["settings", *([prefix] if prefix else [])]) == 0
        out = capsys.readouterr().out
        assert expected in out
        assert max(map(len, out.splitlines())) <= 80
    for wrong, hint in (("optm", "'optim'"), ("model.num_layrs", "'model.num_layers'")):
        assert pretrain(["settings", wrong]) == 2
        assert hint in capsys.readouterr().err
