"""Tasks of lm-eval, from local files, on a model of ours and on its export for Hugging Face."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from data_pipeline.tokenizer import Tokenizer
from foundation.errors import ConfigError
from pretrain.cli import main
from pretrain.config.run import DataConfig, RunConfig
from pretrain.evaluation.sampling import Sampling, generate, prompt_tokens
from pretrain.weights.export import TrainedModel, write_export
from pretrain.weights.huggingface.export import write_huggingface
from tests.helpers.corpora import some_texts
from tests.helpers.models import tiny_model


def task_of(kind: str, text: str, target: str, *metrics: str, **more: Any) -> dict[str, Any]:
    task = {"output_type": kind, "doc_to_text": text, "doc_to_target": target, **more}
    return {**task, "metric_list": [{"metric": name} for name in metrics]}


QUESTION, CHOICES = "{{question}}", {"doc_to_choice": "{{choices}}"}
SHORT = {"generation_kwargs": {"until": ["\n"], "max_gen_toks": 6}}
TASKS = {
    "choices": task_of("multiple_choice", QUESTION, "{{answer}}", "acc", "acc_norm", **CHOICES),
    "cloze": task_of("loglikelihood", QUESTION, " {{choices[0]}}", "perplexity", "acc"),
    "rolling": task_of("loglikelihood_rolling", "", "{{text}}", "bits_per_byte", "byte_perplexity"),
    "continued": task_of("generate_until", QUESTION, "{{expected}}", "exact_match", **SHORT),
}


@pytest.fixture(scope="module")
def places(tiny_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """An export of a tiny model, the same for Hugging Face, and the files of the tasks."""
    folder = tmp_path_factory.mktemp("lm-eval")
    tokenizer = Tokenizer.load(tiny_corpus / "tokenizer")
    module = tiny_model(dtype=torch.float32, vocab_size=tokenizer.vocab_size).eval()
    config = RunConfig(model=module.config, data=DataConfig(path=tiny_corpus, segment_length=16))
    write_export(folder / "own", module, config, 7, tiny_corpus)
    lm = TrainedModel(module, config, 7, tiny_corpus)
    write_huggingface(folder / "hf", lm, tokenizer)
    lines = []
    for number, text in enumerate(some_texts(8)):
        choices = [text[30 : 34 + 5 * k] for k in range(4)]
        question = text[:30].rstrip()
        expected = _greedy(lm, tokenizer, question) if number % 2 else "-"
        line = {"question": question, "choices": choices, "answer": number % 4}
        lines.append(json.dumps({**line, "text": text, "expected": expected}) + "\n")
    (folder / "data.jsonl").write_text("".join(lines))
    files = []
    for name, settings in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": f"{folder}/data.jsonl"}}
        task = {"task": name, **data, "test_split": "train", "num_fewshot": 0, **settings}
        (folder / f"{name}.yaml").write_text(json.dumps(task))
        files.append(str(folder / f"{name}.yaml"))
    return {"folder": folder, "tasks": files}


def _greedy(trained: TrainedModel, tokenizer: Tokenizer, question: str) -> str:
    prompt, end = prompt_tokens(tokenizer, question), tokenizer.end_id
    more = {"sampling": Sampling(temperature=0.0), "num_tokens": 6, "segment_length": 16}
    tokens = generate(trained.module, prompt, end_id=end, **more)
    ids = [int(token) for token in tokens]
    ids = ids[: ids.index(tokenizer.end_id)] if tokenizer.end_id in ids else ids
    return tokenizer.decode(ids).split("\n")[0]


@pytest.fixture(scope="module")
def ours(places) -> dict[str, dict[str, Any]]:
    command = ["evaluate", str(places["folder"] / "own"), "--lanes", "3", "--json", "--tasks"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert main([*command, *places["tasks"]]) == 0
    return json.loads(printed.getvalue())["results"]


def test_scores_are_those_of_the_export_in_transformers(places, ours):
    """The harness on the export, with transformers alone and one text at a time."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        each.from_pretrained(places["folder"] / "hf", trust_remote_code=True)
        for each in (AutoModelForCausalLM, AutoTokenizer)
    )

    class ExportLM(TemplateLM):
        eot_token_id = tokenizer.eos_token_id

        def tok_encode(self, string, add_special_tokens=None, **options):
            return tokenizer(string, add_special_tokens=add_special_tokens is not False).input_ids

        @torch.no_grad()
        def _loglikelihood_tokens(self, requests, **options):
            for _, context, continuation in requests:
                logits = model(torch.tensor([context + continuation[:-1]])).logits[0]
                of_text, ids = logits[len(context) - 1 :], torch.tensor(continuation)
                nll = torch.nn.functional.cross_entropy(of_text, ids, reduction="sum")
                yield -nll.item(), bool((of_text.argmax(1) == ids).all())

        def loglikelihood_rolling(self, requests, disable_tqdm=False):
            texts = [tokenizer(each.args[0]).input_ids for each in requests]
            scored = [(("", ""), ids[:1], ids[1:]) for ids in texts]
            return [score for score, _ in self._loglikelihood_tokens(scored)]

        def generate_until(self, requests, disable_tqdm=False):
            for each in requests:
                context, options = each.args
                inputs = tokenizer(context, return_tensors="pt")
                ids = model.generate(**inputs, max_new_tokens=6, do_sample=False)[0]
                start = inputs.input_ids.shape[1]
                text = tokenizer.decode(ids[start:], skip_special_tokens=True)
                yield text.split(options["until"][0])[0]

    more = {"task_manager": TaskManager(include_defaults=False), "bootstrap_iters": 0}
    found = simple_evaluate(ExportLM(), tasks=places["tasks"], **more)
    assert found is not None
    compared = 0
    for name in TASKS:
        for key, value in found["results"][name].items():
            if "," in key and "_stderr" not in key:
                assert ours[name][key] == pytest.approx(value, rel=1e-4), (name, key)
                compared += 1
    assert compared == 7
    assert ours["continued"]["exact_match,none"] == 0.5


def test_the_command_prints_a_table_and_its_options_matter(places, ours, capsys):
    own, files = str(places["folder"] / "own"), places["tasks"]
    assert main(["evaluate", own, "--tasks", *files[:2], "--lanes", "4"]) == 0
    said = capsys.readouterr()
    assert not re.search("WARNING|Tokenizing", said.err), "of libraries, for nobody to act on"
    lines = said.out.splitlines()
    (row,) = (line for line in lines if line.split()[:2] == ["cloze", "perplexity"])
    assert float(row.split()[3]) == pytest.approx(ours["cloze"]["perplexity,none"], rel=1e-5)
    # Without memory a context of one segment is all that is seen: the scores differ.
    command = ["evaluate", own, "--tasks", files[1], "--memory-length", "0", "--limit", "4"]
    assert main([*command, "--segment-length", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]["cloze"]
    assert found["sample_len"] == 4
    assert found["perplexity,none"] != pytest.approx(ours["cloze"]["perplexity,none"])


def test_what_a_task_file_names_as_function_is_imported_only_with_a_flag(places, tmp_path, capsys):
    cloze = (places["folder"] / "cloze.yaml").read_text()
    (tmp_path / "own.py").write_text(
        "import pathlib; pathlib.Path(__file__).with_suffix('.run').touch()\n"
        "def text_of(document): return document['question']\n"
    )
    text = '"doc_to_text": "{{question}}"'
    assert text in cloze
    direct, through = tmp_path / "direct.yaml", tmp_path / "through.yaml"
    direct.write_text(cloze.replace(text, '"doc_to_text": !function own.text_of'))
    through.write_text(f"include: {direct}\n")
    own = str(places["folder"] / "own")
    for file in map(str, (direct, through)):
        assert main(["evaluate", own, "--tasks", file]) == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert "own.text_of" in error
        assert "--run-task-code" in error
    assert not (tmp_path / "own.run").exists()
    assert main(["evaluate", own, "--tasks", str(direct), "--run-task-code"]) == 0
    assert (tmp_path / "own.run").exists()


def test_lm_eval_finds_the_model_by_its_name_and_refuses_unknown_options(places):
    from lm_eval.api.registry import get_model

    import pretrain.evaluation.harness  # noqa: F401

    options = f"run={places['folder'] / 'own'},memory_length=4"
    model = get_model("xl-pretrain").create_from_arg_string(options, {"device": "cpu"})
    assert model.tok_encode("a") == [256, 97]
    with pytest.raises(ConfigError, match="memory_lenght"):
        get_model("xl-pretrain").create_from_arg_string(f"{options},memory_lenght=4")
    with pytest.raises(ConfigError, match="num_beams"):
        model._continued("a", {"num_beams": 4})
