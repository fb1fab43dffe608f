"""Models of transformers that are adopted: their state, a run, its end and resumes, the export."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_pipeline.builder.build_corpus import build_corpus
from data_pipeline.config import CorpusConfig, TokenizerConfig
from foundation.errors import ConfigError
from pretrain.cli import main
from pretrain.config.model import ModelConfig
from pretrain.model.adopted import AdoptedModel, cache_argument
from pretrain.model.memory import MemoryLayout
from pretrain.model.transformers_modules import library
from pretrain.rundir.run_dir import RunDir
from pretrain.weights.export import load_trained
from pretrain.weights.huggingface.adoption import adopted_model, check_adopted
from tests.helpers.corpora import some_texts, write_jsonl
from tests.helpers.hybrids import RIGHT, WRONG, random_model, save_random

pytestmark = pytest.mark.transformers5
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
    "evaluation.lanes=2", "metrics.tensorboard=false",
)  # fmt: skip


@pytest.fixture(scope="module", params=["qwen3_5_text", "mamba2"])
def adopted_run(request, tmp_path_factory) -> Path:
    """A folder with a checkpoint of Hugging Face, a corpus of its tokens, and an experiment."""
    folder = tmp_path_factory.mktemp(request.param)
    source = save_random(folder / "hf", request.param, RIGHT[request.param])
    build_corpus(
        CorpusConfig(
            input=(write_jsonl(folder / "text.jsonl", some_texts(40)),),
            output=folder / "corpus",
            validation_fraction=0.2,
            tokenizer=TokenizerConfig(path=source),
        )
    )
    command = ["adopt", str(source), "--corpus", str(folder / "corpus"), *SETTINGS]
    assert main([*command, "--output", str(folder / "mine.yaml")]) == 0
    return folder


def train(folder: Path, name: str, *settings: str) -> RunDir:
    command = ["train", str(folder / "mine.yaml"), f"name={name}", "--run-dir", str(folder / name)]
    assert main([*command, "engine.kind=torch", "engine.zero_stage=0", *settings]) == 0
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


def test_a_killed_run_of_two_ranks_resumes_bitwise(adopted_run):
    zero_stage = 2 if adopted_run.name.startswith("mamba2") else 3
    command = ["verify-resume", str(adopted_run / "mine.yaml"), "--steps", "6", "--kill-at", "4"]
    assert main([*command, f"engine.zero_stage={zero_stage}", "engine.micro_batch_lanes=1"]) == 0


def test_a_changed_directory_is_refused(adopted_run, tmp_path, capsys):
    changed = tmp_path / "hf"
    shutil.copytree(adopted_run / "hf", changed)
    tree = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**tree, "initializer_range": 0.5}))
    command = ["train", str(adopted_run / "mine.yaml"), "--run-dir", str(tmp_path / "run")]
    assert main([*command, f"initial_weights={changed}"]) == 2
    assert "not the one that was adopted" in capsys.readouterr().err


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


def test_only_safetensors_are_read(tmp_path):
    source = save_random(tmp_path / "hf", "bamba", RIGHT["bamba"])
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    with pytest.raises(Exception, match="safetensors only"):
        adopted_model(source)


def test_settings_written_by_someone_else_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"model\.adopted: .*write it with `pretrain adopt`"):
        ModelConfig(adopted={"family": "X"})
