"""An export for Hugging Face, read by transformers itself: the same logits, text and tokens."""

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.tokenizer import Tokenizer
from pretrain.cli import main
from pretrain.config.phases import SettingChange
from pretrain.config.run import DataConfig, OptimConfig, RunConfig
from pretrain.evaluation.sampling import Sampling, generate, prompt_tokens
from pretrain.model.cached import new_stream
from pretrain.model.transformer_xl import TransformerXL
from pretrain.weights.export import TrainedModel, write_export
from pretrain.weights.huggingface.export import write_huggingface
from pretrain.weights.huggingface.model_card import model_card
from tests.helpers.corpora import make_tiny_corpus, some_texts
from tests.helpers.models import VARIANTS, tiny_model

SEGMENT = 5
BYTES = Tokenizer("bytes")
END = BYTES.end_id


def trained_model(**options: Any) -> TrainedModel:
    """A tiny model of bytes whose weights are large enough for every part to matter."""
    module = tiny_model(dtype=torch.float32, **{"vocab_size": BYTES.vocab_size, **options}).eval()
    data = DataConfig(path=Path("/data/books"), segment_length=SEGMENT)
    optim = OptimConfig(gradient_segments=2)
    run = RunConfig(name="tiny", model=module.config, data=data, optim=optim)
    return TrainedModel(module, run, 7, Path())


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any, Path]]:
    """Our module of a variant, what transformers reads of its export, and the directory."""
    folder, made = tmp_path_factory.mktemp("huggingface"), {}

    def export(variant: str) -> tuple[Any, Any, Path]:
        if variant not in made:
            trained, output = trained_model(**VARIANTS[variant]), folder / variant
            write_huggingface(output, trained, BYTES)
            made[variant] = (trained.module, load(output), output)
        return made[variant]

    return export


def load(directory: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True, **options)


def some_tokens(rows: int, length: int) -> torch.Tensor:
    """Tokens with ends of documents, also next to borders of segments."""
    tokens = torch.randint(END, (rows, length), generator=torch.Generator().manual_seed(3))
    tokens[:, [3, SEGMENT - 1, 2 * SEGMENT]] = END
    return tokens


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_has_the_same_logits_over_several_segments_bit_for_bit(variant, exported):
    ours, theirs, _ = exported(variant)
    tokens, memory, mems, parts = some_tokens(2, 4 * SEGMENT), None, None, []
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == END
    for start in range(0, tokens.shape[1], SEGMENT):
        part = slice(start, start + SEGMENT)
        expected, memory = ours.logits_BLV(tokens[:, part], memory, starts[:, part])
        found = theirs(tokens[:, part], mems=mems)
        mems = found.mems
        assert torch.equal(found.logits, expected)
        parts.append(expected)
    # A long input is read in segments, too; of padding on the right nothing is seen.
    mask = torch.ones_like(tokens)
    mask[:, -2:] = 0
    assert torch.equal(theirs(tokens, attention_mask=mask).logits, torch.cat(parts, dim=1))
    last = theirs(tokens, logits_to_keep=SEGMENT + 2).logits
    assert last.shape[1] == SEGMENT + 2
    assert torch.allclose(last, torch.cat(parts, dim=1)[:, -SEGMENT - 2 :], atol=1e-5)


@torch.no_grad()
def test_rotations_are_stretched_for_more_keys_than_in_training_as_ours(exported):
    *_, directory = exported("rope")
    settings = {"memory_length": 24, "rope_extension": "yarn"}
    theirs, plain = load(directory, **settings), load(directory, memory_length=24)
    trained = trained_model(**VARIANTS["rope"], rope_extension="yarn")
    assert trained.trained_keys == theirs.config.trained_keys == (SEGMENT + 8,) * 2
    stream, tokens = new_stream(trained.module, 24, SEGMENT), some_tokens(2, 6 * SEGMENT)
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 1:] = tokens[:, :-1] == END
    parts = zip(tokens.split(SEGMENT, 1), starts.split(SEGMENT, 1), strict=True)
    expected = torch.cat([stream.logits_BLV(*part) for part in parts], dim=1)
    found = theirs(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, plain(tokens).logits, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    "variant", ["adaptive_div2", "rope", "isolated", "compressive", "deltanet", "memory_tokens"]
)
def test_generate_has_the_tokens_of_ours_without_sampling(variant, exported):
    ours, theirs, _ = exported(variant)
    prompt = prompt_tokens(BYTES, "The old clock")
    options = {"sampling": Sampling(temperature=0.0), "num_tokens": 20, "end_id": END}
    tokens = generate(ours, prompt, segment_length=SEGMENT, **options)
    expected = [*prompt, *(int(each) for each in tokens)]
    inputs = torch.tensor([prompt])
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": -1}
    found = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
    assert found[0].tolist() == expected
    found = theirs.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False)
    length = found.shape[1]
    assert found[0].tolist() == expected[:length]  # it ends with a document, or after 20 tokens


@pytest.mark.parametrize("variant", ["compressive", "deltanet_alone"])
def test_beams_keep_their_own_memories(variant, exported):
    theirs = load(exported(variant)[2], memory_length=64)  # all of the text
    inputs = torch.tensor([prompt_tokens(BYTES, text) for text in ("the river", "a lantern")])
    options = {"max_new_tokens": 12, "num_beams": 4, "do_sample": False}
    options |= {"attention_mask": torch.ones_like(inputs), "return_dict_in_generate": True}
    found = theirs.generate(inputs, output_scores=True, **options)
    scores = theirs.compute_transition_scores(found.sequences, found.scores, found.beam_indices)
    tokens = found.sequences
    # The score of each beam is that of its text, read as one.
    logits = theirs(tokens).logits[:, inputs.shape[1] - 1 : -1]
    read = logits.gather(2, tokens[:, inputs.shape[1] :, None]).squeeze(2)
    count = (scores != 0).sum(1)
    assert torch.all(count > 4)
    for of_beam, of_text, length in zip(scores, read, count, strict=True):
        assert torch.allclose(of_beam[:length], of_text[:length], atol=1e-4)


def test_padding_that_would_be_remembered_is_refused(exported):
    _, theirs, _ = exported("plain")
    tokens, mask = some_tokens(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[1, 0] = 0
    with pytest.raises(ValueError, match="padding"):
        theirs(tokens, attention_mask=mask)
    with pytest.raises(ValueError, match="equal length"):
        theirs.generate(tokens, attention_mask=mask.flip(1), max_new_tokens=1)


def test_a_longer_memory_and_the_loss_are_those_of_the_model(exported):
    ours, _, directory = exported("plain")
    theirs, tokens = load(directory, memory_length=16), some_tokens(2, 4 * SEGMENT + 1)
    memory, nll = None, []
    for start in range(0, 4 * SEGMENT, SEGMENT):
        part = tokens[:, start : start + SEGMENT + 1]
        each, memory = ours(part[:, :-1], part[:, 1:], memory, memory_length=16)
        nll.append(each)
    found = theirs(tokens, labels=tokens)
    assert found.loss.item() == pytest.approx(torch.cat(nll, dim=1).mean().item(), rel=1e-5)
    found.loss.backward()
    assert theirs.transformer.layers[0].attention.query_weight.grad.abs().sum() > 0


def test_a_frozen_model_passes_gradients_to_what_is_added_behind_its_embedding(exported):
    theirs = load(exported("plain")[2])
    assert theirs.get_input_embeddings() is theirs.transformer.embedding
    theirs.requires_grad_(False)
    theirs.enable_input_require_grads()  # as LoRA with checkpointing does
    assert theirs(some_tokens(1, 3 * SEGMENT)).logits.requires_grad


@pytest.mark.parametrize("variant", ["adaptive_div2", "compressive"])
def test_trainer_trains_evaluates_and_takes_the_best_of_an_export(
    variant, exported, tmp_path, capfd
):
    from transformers import Trainer, TrainingArguments

    theirs, tokens = load(exported(variant)[2]), some_tokens(8, 4 * SEGMENT)
    labels = tokens.clone()
    labels[:, 0] = -100  # Trainer divides by the number of labels, of which the first predicts none
    rows = [{"input_ids": a, "labels": b} for a, b in zip(tokens, labels, strict=True)]
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4}
    options |= {"per_device_eval_batch_size": 3, "eval_strategy": "steps", "eval_steps": 2}
    options |= {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    options |= {"logging_steps": 1, "report_to": "none", "use_cpu": True, "learning_rate": 1e-3}
    arguments = TrainingArguments(output_dir=str(tmp_path / "trained"), **options)
    trainer = Trainer(
        model=theirs, args=arguments, train_dataset=rows, eval_dataset=rows,
        compute_metrics=lambda of: {"shape": of.predictions.shape},
    )  # fmt: skip

    def loss() -> float:
        with torch.no_grad():
            return theirs(tokens, labels=labels).loss.item()

    before = loss()
    trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert losses[0] == pytest.approx(before, rel=1e-3), "the mean over both batches of the step"
    evaluated = [line["eval_loss"] for line in trainer.state.log_history if "eval_loss" in line]
    assert min(evaluated) == pytest.approx(loss(), rel=1e-5), "the best one is loaded again"
    assert loss() < before
    predicted = trainer.predict(rows)
    assert predicted.predictions.shape == (8, 4 * SEGMENT, theirs.config.vocab_size)
    assert predicted.metrics["test_loss"] == pytest.approx(loss(), rel=1e-5)
    assert "missing keys" not in capfd.readouterr().err


def test_what_transformers_saves_again_has_the_same_weights(exported, tmp_path):
    _, theirs, _ = exported("adaptive_div2")
    theirs.save_pretrained(tmp_path / "again")
    again, tokens = load(tmp_path / "again"), some_tokens(1, 12)
    assert torch.equal(again(tokens).logits, theirs(tokens).logits)
    assert again.num_parameters() == theirs.num_parameters()


TEXTS = (
    "",
    "the river",
    " two  spaces ",
    "a\n\nb\n",
    "</s> is text",
    "caf\u00e9 \u2192 \U0001f600",
)
TEXTS += ("\u2581x",)


@pytest.mark.parametrize("kind", ["bytes", "bpe", "unigram"])
def test_the_tokenizer_has_the_ids_and_texts_of_the_corpus(kind, tmp_path):
    ours = Tokenizer.load(make_tiny_corpus(tmp_path / "corpus", vocabulary=kind) / "tokenizer")
    check_tokenizer(ours, tmp_path)


def test_a_tokenizer_json_keeps_its_ids_and_adds_only_the_end_of_a_document(tmp_path):
    from tokenizers import ByteLevelBPETokenizer
    from tokenizers.processors import RobertaProcessing

    theirs = ByteLevelBPETokenizer()
    theirs.train_from_iterator(some_texts(), vocab_size=300, special_tokens=["<s>", "</s>"])
    theirs.post_processor = RobertaProcessing(("</s>", 1), ("<s>", 0))
    theirs.save(str(tmp_path / "tokenizer.json"))
    model = (tmp_path / "tokenizer.json").read_bytes()
    check_tokenizer(Tokenizer("huggingface", model, {"end_token": "</s>"}), tmp_path)


def test_a_tokenizer_that_transformers_has_not_is_left_out(tmp_path):
    words = Tokenizer("words", b"<eos>\n<unk>\na", {"end_token": "<eos>"})
    write_huggingface(tmp_path / "out", trained_model(), words)
    assert not list((tmp_path / "out").glob("tokenizer*"))


def check_tokenizer(ours: Tokenizer, tmp_path: Path) -> None:
    """Compare with what transformers reads of an export, and of what it saves again."""
    from transformers import AutoTokenizer

    trained = trained_model(vocab_size=ours.vocab_size)
    write_huggingface(tmp_path / "out", trained, ours)
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert (len(theirs), theirs.eos_token_id) == (ours.vocab_size, ours.end_id)
    for text in (*TEXTS, *some_texts(3)):
        ids = theirs(text)["input_ids"]
        assert ids == prompt_tokens(ours, text)
        assert theirs(text, add_special_tokens=False)["input_ids"] == ours.encode(text).tolist()
        assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
        assert theirs.decode(ids) == theirs.eos_token + ours.decode(ids)
    assert theirs.decode(theirs(TEXTS[3]).input_ids, skip_special_tokens=True) == TEXTS[3]
    inputs = theirs(TEXTS[1], return_tensors="pt")
    found = load(tmp_path / "out").generate(**inputs, max_new_tokens=2, do_sample=False)
    assert found[0].tolist()[:-2] == inputs.input_ids[0].tolist()
    theirs.save_pretrained(tmp_path / "again")
    again = AutoTokenizer.from_pretrained(tmp_path / "again", trust_remote_code=True)
    assert again(TEXTS[5])["input_ids"] == theirs(TEXTS[5])["input_ids"]


def test_the_code_of_an_export_imports_nothing_of_ours_and_has_every_name(exported):
    _, theirs, directory = exported("plain")
    assert type(theirs).__module__.startswith("transformers_modules.")
    assert not isinstance(theirs.transformer, TransformerXL)
    known = {"torch", "transformers", "numpy", "sentencepiece", *sys.stdlib_module_names}
    for path in directory.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= known
            elif isinstance(node, ast.ImportFrom) and not node.level:
                assert str(node.module).split(".")[0] in known
    rules = ["ruff", "check", "--isolated", "--select", "F", directory]
    subprocess.run([sys.executable, "-m", *rules], check=True, capture_output=True)


def test_the_command_writes_what_generate_prints_and_ours_refuse_it(tiny_corpus, tmp_path, capsys):
    from transformers import AutoTokenizer

    trained = trained_model()
    config = replace(trained.config, data=replace(trained.config.data, path=tiny_corpus))
    own, output = tmp_path / "own", tmp_path / "out"
    write_export(own, trained.module, config, 7, tiny_corpus)
    assert main(["export", str(own), "--format", "huggingface", "--output", str(output)]) == 0
    options = ["--prompt", "Our captain", "--tokens", "30", "--temperature", "0"]
    capsys.readouterr()
    assert main(["generate", str(own), *options]) == 0
    expected = capsys.readouterr().out.removesuffix("\n")
    tokenizer = AutoTokenizer.from_pretrained(output, trust_remote_code=True)
    inputs = tokenizer("Our captain", return_tensors="pt")
    found = load(output).generate(**inputs, max_new_tokens=30, do_sample=False)
    text = tokenizer.decode(found[0], skip_special_tokens=True)
    assert len(text) > len("Our captain")
    assert expected.startswith(text)
    capsys.readouterr()  # transformers 5 shows its progress
    assert main(["generate", str(output), "--tokens", "1"]) == 2
    error = capsys.readouterr().err
    assert "--format" in error
    assert len(error.splitlines()) == 1


def test_a_foreign_path_does_not_leave_its_code_span_in_the_model_card(exported):
    trained = trained_model(positions="rope")
    path = Path("/x/y`\n\n<img src=x onerror=alert(1)>\n# Heading")
    data = replace(trained.config.data, path=path)
    trained = replace(trained, config=replace(trained.config, data=data))
    card = model_card(trained, BYTES)
    assert "`y____img src_x onerror_alert_1____ Heading`" in card
    assert not {"<", ">"} & set(card)


def test_the_model_card_has_the_facts_of_the_run(exported):
    trained = trained_model(positions="rope")
    card = model_card(trained, BYTES, {"loss": 1.5, "bits_per_byte": 2.25, "perplexity": None})
    count = sum(each.numel() for each in trained.module.parameters())
    tokens = 7 * trained.config.tokens_per_step
    facts = ("# tiny\n", f" {count:,} parameters", "`books`", " 2 layers", " 7 steps ")
    facts += (f" {tokens:,} tokens", '| positions | "rope" |', "| 1.5000 |", "| 2.2500 |")
    assert [fact for fact in facts if fact not in card] == []
    rate = "optim.learning_rate"
    changes = [SettingChange(step, rate, 3e-3, 1e-3) for step in (5, 7)]
    changes.append(SettingChange(5, "optim.clip_norm", 1.0, 0.5))
    row = "| changed after step 5 | optim.learning_rate: 0.003, then 0.001; optim.clip_norm: 1.0, "
    assert row + "then 0.5 |" in model_card(trained, BYTES, changes=changes)
    assert "after step 7 |" not in model_card(trained, BYTES, changes=changes)
    hybrid = trained_model(layer_kinds=("deltanet", "attention"))
    assert "1:1 Gated DeltaNet" in model_card(hybrid, BYTES)
    assert (exported("plain")[2] / "README.md").read_text().startswith("---\nlibrary_name")
