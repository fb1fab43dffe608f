"""Models of transformers that are adopted: their state, a run, its end and resumes, the export."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from foundation.errors import ConfigError
from pretrain.checkpoint.directory import step_directory
from pretrain.checkpoint.verify import latest_step, verify
from pretrain.cli import main
from pretrain.commands.verify_resume import ELASTIC_TOLERANCE
from pretrain.config.model import ModelConfig
from pretrain.errors import CheckpointError
from pretrain.model.adopted import AdoptedModel, cache_argument
from pretrain.model.memory import MemoryLayout
from pretrain.model.transformers_modules import library
from pretrain.recovery import faults
from pretrain.rundir.compare_runs import (
    STATE_TOLERANCE,
    differing_losses,
    differing_progress,
    differing_values,
    run_differences,
)
from pretrain.rundir.run_dir import RunDir
from pretrain.weights.export import load_trained
from pretrain.weights.huggingface.adoption import adopted_model, check_adopted
from tests.helpers.checkout import ROOT
from tests.helpers.corpora import some_texts, write_jsonl
from tests.helpers.forked_ranks import IMPORTED, ForkedRanks
from tests.helpers.hybrids import RIGHT, SHAPE, WRONG, random_model, save_random

pytestmark = pytest.mark.transformers5
PAGE = ROOT / "docs" / "hybrids.md"
EXACT = 1e-5


@pytest.mark.parametrize("kind", RIGHT)
def test_segments_equal_what_transformers_reads_at_once(kind, tmp_path):
    with random_model(kind, RIGHT[kind], scale=0.0) as model:
        model.save_pretrained(tmp_path)
    adopted = adopted_model(tmp_path)
    tokens = torch.randint(300, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        memory, parts = None, []
        for part in tokens.split([16, 1, 40, 33], dim=1):
            logits, memory = adopted.read(part, memory)
            parts.append(logits)
        alone, _ = adopted.read(tokens[:, 57:])
    assert (torch.cat(parts, dim=1) - expected).abs().max() < EXACT
    assert (alone - expected[:, 57:]).abs().max() > 100 * EXACT  # the memory matters


@pytest.mark.parametrize("kind", RIGHT)
def test_a_family_that_carries_its_state_right_passes_every_check(kind, tmp_path):
    adopted = adopted_model(save_random(tmp_path / "hf", kind, RIGHT[kind]))
    assert [check for check in check_adopted(adopted) if not check.passed] == []


@pytest.mark.parametrize("kind", WRONG)
def test_a_family_that_is_wrong_fails_the_check_that_says_why(kind, tmp_path):
    settings, failing = WRONG[kind]
    adopted = adopted_model(save_random(tmp_path / "hf", kind, settings))
    assert failing in [check.name for check in check_adopted(adopted) if not check.passed]


def test_the_command_passes_and_fails_as_the_checks_do(tmp_path, capsys):
    right = save_random(tmp_path / "right", "bamba", RIGHT["bamba"])
    wrong = save_random(tmp_path / "wrong", "mamba", WRONG["mamba"][0])
    assert main(["check-mixer", "--model", str(right)]) == 0
    assert main(["check-mixer", "--model", str(wrong)]) == 1
    assert "FAILED  segments" in capsys.readouterr().out


def test_gradients_need_a_cache_that_assigns(tmp_path):
    """With the methods of transformers, which copy in place, a backward pass fails."""
    adopted = adopted_model(save_random(tmp_path / "hf", "qwen3_5_text", RIGHT["qwen3_5_text"]))
    tokens = torch.randint(300, (2, 32))
    adopted(tokens, tokens, num_segments=2)[0].mean().backward()
    with library() as transformers:
        cache = transformers.DynamicCache(config=adopted.inner.config)
    options = {cache_argument(adopted.inner): cache, "use_cache": True}
    adopted.inner(input_ids=tokens, **options)
    logits = adopted.inner(input_ids=tokens, **options).logits
    with pytest.raises(RuntimeError, match="inplace"):
        logits.sum().backward()


def test_rows_beyond_the_memory_length_leave_and_positions_stay_small(tmp_path):
    adopted = adopted_model(save_random(tmp_path / "hf", "bamba", RIGHT["bamba"]))
    tokens = torch.randint(300, (2, 40))
    with torch.no_grad():
        _, memory = adopted.read(tokens[:, :24], memory_length=16)
        cut, _ = adopted.read(tokens[:, 24:], memory, memory_length=16)
        far, _ = adopted.read(tokens[:, 24:], memory, memory_length=16, first_position=100_000)
    named = MemoryLayout(adopted.config, 16).named(memory)
    assert named["layers.1.keys"].shape[1] == named["documents"].shape[1] == 16
    assert (cut - far).abs().max() < 0.1 * cut.abs().max()  # angles in float32, at 100,000


def test_half_precision_keeps_angles_in_float32(tmp_path):
    adopted = adopted_model(save_random(tmp_path / "hf", "bamba", RIGHT["bamba"])).bfloat16()
    assert {buffer.dtype for buffer in adopted.buffers()} == {torch.float32}
    assert {parameter.dtype for parameter in adopted.parameters()} == {torch.bfloat16}


SETTINGS = (
    "optim.steps=8", "optim.schedule.warmup_steps=1", "optim.learning_rate=1e-3",
    "data.lanes=4", "data.segment_length=16", "model.memory_length=24", "checkpoint.interval=3",
    "checkpoint.asynchronous=false", "evaluation.lanes=2", "evaluation.max_tokens=500",
    "engine.micro_batch_lanes=1", "metrics.tensorboard=false",
)  # fmt: skip
# Each family's ZeRO stage on two ranks.
ZERO_STAGES = {
    "qwen3_5_text": 3, "qwen3_next": 2, "olmo_hybrid": 1, "mamba2": 2, "falcon_h1": 3,
    "nemotron_h": 3,
}  # fmt: skip


of_one_family = pytest.mark.parametrize("adopted_run", ["mamba2"], indirect=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    IMPORTED.append("tests.helpers.hybrids_imported")  # before the server of ranks starts
    folder = tmp_path_factory.mktemp("corpus")
    source = save_random(folder / "hf", "mamba2", RIGHT["mamba2"])  # all have its tokenizer
    build_corpus(
        CorpusConfig(
            input=(write_jsonl(folder / "text.jsonl", some_texts(40)),),
            output=folder / "corpus",
            validation_fraction=0.2,
            tokenizer=TokenizerConfig(path=source),
        )
    )
    return folder / "corpus"


@pytest.fixture(scope="module", params=ZERO_STAGES)
def adopted_run(request, corpus, tmp_path_factory) -> Path:
    """A folder with a checkpoint of Hugging Face and an experiment."""
    folder = tmp_path_factory.mktemp(request.param)
    source = save_random(folder / "hf", request.param, RIGHT[request.param])
    stage = f"engine.zero_stage={ZERO_STAGES[request.param]}"
    command = ["adopt", str(source), "--corpus", str(corpus), *SETTINGS, stage]
    assert main([*command, "--output", str(folder / "mine.yaml")]) == 0
    return folder


def command_of(folder: Path, name: str) -> list[str]:
    return ["train", str(folder / "mine.yaml"), "--run-dir", str(folder / name)]


def train(folder: Path, name: str, *settings: str) -> RunDir:
    torch_engine = "engine.kind=torch", "engine.zero_stage=0"
    assert main([*command_of(folder, name), *torch_engine, *settings]) == 0
    return RunDir(folder / name)


def train_ranks(folder: Path, name: str, ends: list[int], fault: str = "") -> RunDir:
    """Start a run, or resume it; its ranks end with these statuses."""
    program = partial(main, command_of(folder, name))
    ranks = ForkedRanks(len(ends), program, folder, **{faults.VARIABLE: fault})
    assert ranks.wait() == ends, (folder / "rank-0.log").read_text()
    return RunDir(folder / name)


def test_at_a_rate_of_0_the_weights_come_back_bit_for_bit(adopted_run, tmp_path):
    run = train(adopted_run, "still", "optim.learning_rate=0", "optim.steps=2")
    back = tmp_path / "back"
    assert main(["export", str(run.path), "--format", "huggingface", "--output", str(back)]) == 0
    before, after = (load_file(each / "model.safetensors") for each in (adopted_run / "hf", back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_adopted_model_trains_is_evaluated_and_comes_back(adopted_run, tmp_path, capsys):
    run = train(adopted_run, "whole")
    losses = [line["loss"] for line in run.read_metrics() if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    capsys.readouterr()
    lengths = ["--memory-length", "0", "24", "--json"]
    assert main(["evaluate", str(run.path), *lengths, "--max-tokens", "500"]) == 0
    without, carried = json.loads(capsys.readouterr().out)["results"]
    assert without["loss"] != carried["loss"]
    for line in re.findall(r"^    pretrain (evaluate mine .*)", PAGE.read_text(), re.MULTILINE):
        words = line.replace("mine", str(run.path)).split()
        assert main([*words, "--max-tokens", "500"]) == 0, capsys.readouterr().err
    back = tmp_path / "back"
    assert main(["export", str(run.path), "--format", "huggingface", "--output", str(back)]) == 0
    trained: Any = load_trained(run.path, torch.device("cpu")).module
    assert isinstance(trained, AdoptedModel)
    with library() as transformers:
        theirs = transformers.AutoModelForCausalLM.from_pretrained(back)
        tokenizer = transformers.AutoTokenizer.from_pretrained(back)
    assert type(theirs) is type(trained.inner)
    tokens = torch.randint(300, (2, 40))
    with torch.no_grad():
        assert torch.equal(theirs(tokens).logits, trained.inner(tokens).logits)
    assert tokenizer("a line")["input_ids"]
    source = adopted_run / "hf"
    before, after = (json.loads((each / "config.json").read_text()) for each in (source, back))
    assert {**before, "dtype": "float32"} == after
    assert not list(back.glob("*.py"))
    source.rename(adopted_run / "away")
    command = ["export", str(run.path), "--format", "huggingface"]
    assert main([*command, "--output", str(tmp_path / "without")]) == 2
    (adopted_run / "away").rename(source)
    assert "has no config.json" in capsys.readouterr().err


def test_a_killed_run_resumes_bitwise_and_on_other_ranks_to_rounding(adopted_run):
    whole = train_ranks(adopted_run, "of-two", [0, 0])
    killed = train_ranks(adopted_run, "killed", [-9, -9], fault="sigkill@5")
    assert latest_step(killed.checkpoints) == 3
    shutil.copytree(killed.path, adopted_run / "of-one")
    assert run_differences(whole, train_ranks(adopted_run, "killed", [0, 0]), 8) == []
    of_one = train_ranks(adopted_run, "of-one", [0])
    assert differing_losses(whole, of_one, ELASTIC_TOLERANCE) == []
    ours, theirs = (verify(step_directory(run.checkpoints, 8)) for run in (whole, of_one))
    assert differing_progress(ours, theirs) == []
    # Of tiny gradients in which large ones cancel, more is lost than `verify-resume` allows.
    assert differing_values(ours, theirs, 10 * STATE_TOLERANCE) == []


@of_one_family
def test_a_changed_directory_is_refused(adopted_run, tmp_path, capsys):
    changed = tmp_path / "hf"
    shutil.copytree(adopted_run / "hf", changed)
    tree = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**tree, "initializer_range": 0.5}))
    command = ["train", str(adopted_run / "mine.yaml"), "--run-dir", str(tmp_path / "run")]
    assert main([*command, f"initial_weights={changed}"]) == 2
    assert "not the one that was adopted" in capsys.readouterr().err


@of_one_family
def test_a_corpus_of_another_tokenizer_is_refused(adopted_run, tiny_corpus, capsys):
    command = ["adopt", str(adopted_run / "hf"), "--corpus", str(tiny_corpus), *SETTINGS]
    assert main([*command, "--output", str(adopted_run / "other.yaml")]) == 2
    assert "has another tokenizer" in capsys.readouterr().err


@of_one_family
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("model.num_heads=8", "own family"),
        ("model.isolate_documents=true", "own family"),
        ("initial_weights=null", "needs initial_weights"),
        ("engine.activation_checkpointing=full", "for models of this project"),
    ],
)
def test_settings_of_our_own_family_are_refused(adopted_run, setting, words, tmp_path, capsys):
    assert main(["describe", str(adopted_run / "mine.yaml"), setting]) == 2
    assert words in capsys.readouterr().err


def test_code_of_a_directory_never_runs(tmp_path):
    source = save_random(tmp_path / "hf", "bamba", RIGHT["bamba"])
    tree = json.loads((source / "config.json").read_text())
    (source / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass C: pass\n")
    tree["auto_map"] = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C"}
    for kind in ("bamba", "of_my_own"):
        (source / "config.json").write_text(json.dumps({**tree, "model_type": kind}))
        if kind == "bamba":
            adopted_model(source)
        else:
            with pytest.raises(ConfigError, match="code of its own, which is not run"):
                adopted_model(source)
    assert not (tmp_path / "ran").exists()


def test_a_directory_without_its_weights_is_refused(tmp_path):
    source = save_random(tmp_path / "hf", "bamba", RIGHT["bamba"])
    weights, index = source / "model.safetensors", source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": weights.name, "b": "b.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"has no b\.safetensors"):
        adopted_model(source)
    index.write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))
    with pytest.raises(ConfigError, match="expected a plain file name"):
        adopted_model(source)
    index.unlink()
    tensors = load_file(weights)
    name = "model.layers.0.mamba.A_log"
    for changed in (tensors[name].to(torch.int8), tensors[name][:3].clone()):
        save_file({**tensors, name: changed}, weights)
        with pytest.raises(CheckpointError, match=f"{name} has shape"):
            adopted_model(source)
    weights.rename(source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safetensors only"):
        adopted_model(source)


def test_angles_that_change_in_a_longer_text_are_refused(tmp_path):
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    source = save_random(tmp_path / "hf", "llama", {**SHAPE, "rope_parameters": rope})
    with pytest.raises(ConfigError, match="depend on the length"):
        adopted_model(source)


def test_settings_written_by_someone_else_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"model\.adopted: .*write it with `pretrain adopt`"):
        ModelConfig(adopted={"family": "X"})
