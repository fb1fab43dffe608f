"""Writing the directory that `AutoModelForCausalLM.from_pretrained` reads.

DIR/config.json, generation_config.json     settings, and what `generate` does by default
DIR/{configuration,modeling,tokenization}_xl_pretrain.py     code that needs nothing of ours
DIR/model.safetensors      every parameter once, in float32
DIR/tokenizer.model or tokenizer.json, tokenizer_config.json    the tokenizer of the corpus, if
                           transformers has its kind
DIR/README.md              the model card

One Python file out of all the definitions that a module needs from our own packages.

An export must run without this project and compute what it computes. So it gets the project's own
source, copied definition by definition: there is no second implementation to keep equal.

The tokenizer of an export, as far as transformers has its kind.

The model card of an export, filled in with what is known about the run.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from data_pipeline.tokenizer import MODEL_NAME, Tokenizer
from foundation.files import atomic_write, read_text, write_json, write_text
from foundation.paths import path_text
from foundation.settings import assert_never
from foundation.typed_values import json_text, to_tree
from pretrain.config.phases import spans_of_phases
from pretrain.costs.flops import model_in_words, parameter_counts
from pretrain.rundir.code_version import code_version
from pretrain.weights.export import WEIGHTS, TrainedModel, new_directory, write_weights

ROOT = Path(__file__).parents[3]  # the folder of our packages
OWN = ("foundation", "data_pipeline", "pretrain")

Key = tuple[str, str]  # a module, and a name that it defines
Import = tuple[str, str]  # ("import", "numpy as np"), or ("from torch import", "nn")
OWN_CLASS = "XLPretrainTokenizer"
CONFIG_NAME = "tokenizer_config.json"
CARD = """---
library_name: transformers
pipeline_tag: text-generation
tags:
- {tag}
- xl-pretrain
---

# {name}

A language model of {parameters:,} parameters, trained with xl-pretrain
for {step:,} steps on {tokens:,} tokens of the corpus `{corpus}`: {model}.
It reads text in segments. From one segment to the next, {memory}.

License, intended use and limitations are for whoever publishes the model to state here.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("DIRECTORY", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("DIRECTORY", trust_remote_code=True)
inputs = tokenizer("The ", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=50)[0], skip_special_tokens=True))
```

The code in this directory needs torch, transformers and numpy{requirement}. It has no dropout and
no fused kernels for GPUs. A text of any length can be read, in linear time: `model(input_ids,
mems=mems)` returns `logits`, and `mems` for what follows. Padding belongs to the right of a text;
`generate` takes prompts of equal length.

## Model

{model_rows}

## Training

{training_rows}
"""
CODE = ("configuration_xl_pretrain", "modeling_xl_pretrain", "tokenization_xl_pretrain")
CLASSES = {
    "AutoConfig": f"{CODE[0]}.XLPretrainConfig",
    "AutoModelForCausalLM": f"{CODE[1]}.XLPretrainForCausalLM",
}
HEADING = """# Copied from the source of xl-pretrain {version}; Apache License 2.0.
# The module that each part comes from stands above it."""


@dataclass(frozen=True)
class Definition:
    """A function, class or value at the top of a module."""

    line: int
    source: str  # with decorators and the comment above
    uses: frozenset[str]  # names


@dataclass(frozen=True)
class Module:
    """A module of ours."""

    docstring: str
    definitions: dict[str, Definition]
    imports: dict[str, Import]  # of other packages, by the name bound here
    own: dict[str, Key]  # the names that come from our packages


def bundle(
    root: str, heading: str, replaced: Mapping[str, str], home: Mapping[Key, str]
) -> tuple[str, list[Key]]:
    """Return module `root` with all that it needs of ours, and which definitions that are.

    `replaced` has names that another module defines for all -> that module. `home` has definitions
    -> the module of the directory to import them from.
    """
    needed: dict[Key, None] = {}
    waiting = [(root, name) for name in module(root).definitions]
    while waiting:
        key = waiting.pop()
        if key not in needed:
            needed[key] = None
            read = module(key[0])
            for name in sorted(_definition(key).uses) if key not in home else ():
                used = (key[0], name) if name in read.definitions else read.own.get(name)
                waiting += [(replaced.get(used[1], used[0]), used[1])] if used else []
    own = [key for key in needed if key not in home]
    names = [name for _, name in own]
    assert len(names) == len(set(names)), sorted(name for name in names if names.count(name) > 1)
    own.sort(key=lambda key: (_depth(key[0]), key[0], _definition(key).line))
    used_imports = {(f"from .{home[key]} import", key[1]) for key in needed if key in home}
    for key in own:
        imports = module(key[0]).imports
        used_imports |= {imports[name] for name in _definition(key).uses & imports.keys()}
    statements: dict[str, list[str]] = {}
    for how, name in sorted(used_imports):
        statements.setdefault(how, []).append(name)
    parts = [
        f'{heading}\n\n"""{module(root).docstring}\n"""\n',
        "from __future__ import annotations\n",
        "\n".join(f"{how} {', '.join(names)}" for how, names in statements.items()),
    ]
    for key, before in zip(own, [("", ""), *own], strict=False):
        mark = "" if key[0] == before[0] else f"# {key[0]}\n\n\n"
        parts.append(f"\n\n{mark}{_definition(key).source}")
    return "\n".join(parts) + "\n", own


def _definition(key: Key) -> Definition:
    return module(key[0]).definitions[key[1]]


@cache
def _depth(name: str) -> int:
    """Return the length of the longest chain of imports below a module: what it uses is lower."""
    return 1 + max((_depth(used) for used, _ in module(name).own.values()), default=0)


@cache
def module(name: str) -> Module:
    """Read a module of ours, `pretrain.model.memory` for example."""
    text = read_text(ROOT / (name.replace(".", "/") + ".py"))
    tree, lines = ast.parse(text), text.splitlines()
    read = Module(ast.get_docstring(tree) or "", {}, {}, {})
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                read.imports[bound] = ("import", ast.unparse(alias))
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            for alias in node.names:
                if node.module.split(".")[0] in OWN:
                    assert not alias.asname, f"{name} renames {alias.name}"
                    read.own[alias.name] = (node.module, alias.name)
                else:
                    how = f"from {node.module} import"
                    read.imports[alias.asname or alias.name] = (how, ast.unparse(alias))
        else:
            first = min([node.lineno, *(x.lineno for x in getattr(node, "decorator_list", []))]) - 1
            while first and lines[first - 1].startswith("#"):
                first -= 1
            uses = frozenset(_names_in(node))
            source = "\n".join(lines[first : node.end_lineno])
            targets = getattr(node, "targets", [getattr(node, "target", ast.Pass())])
            defined = [name for target in targets for name in _names_in(target)]
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                defined = [node.name]
            elif isinstance(node, ast.Try):  # an import that may fail
                imports = [each for each in node.body if isinstance(each, ast.Import)]
                defined = [alias.name for each in imports for alias in each.names]
            for each in defined:
                read.definitions[each] = Definition(node.lineno, source, uses)
    return read


def _names_in(node: ast.AST) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes] | None:
    """Return files by name; None if transformers has no such tokenizer."""
    match tokenizer.kind:
        case "unigram" | "bpe" | "sentencepiece":
            return {MODEL_NAME: tokenizer.model, CONFIG_NAME: _own_config(tokenizer)}
        case "bytes":
            return {CONFIG_NAME: _own_config(tokenizer)}
        case "huggingface":
            return {
                "tokenizer.json": _with_document_end(tokenizer),
                CONFIG_NAME: _json(_fast_config(str(tokenizer.options["end_token"]))),
            }
        case "tiktoken" | "words" | "characters" | "unknown":
            return None
        case _:
            assert_never(tokenizer.kind)


def _own_config(tokenizer: Tokenizer) -> bytes:
    auto_map = {"AutoTokenizer": [f"tokenization_xl_pretrain.{OWN_CLASS}", None]}
    end_id = tokenizer.end_id
    return _json({"tokenizer_class": OWN_CLASS, "auto_map": auto_map, "document_end_id": end_id})


def _fast_config(end_token: str) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": end_token,
        "eos_token": end_token,
        "split_special_tokens": True,  # what looks like a special token in a text is text
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
        "model_input_names": ["input_ids", "attention_mask"],  # all that the model takes
    }


def _with_document_end(tokenizer: Tokenizer) -> bytes:
    """Return the user's tokenizer.json with the end of a document, and no other, before a text."""
    tree, end = json.loads(tokenizer.model), str(tokenizer.options["end_token"])

    def piece(kind: str, name: str, sequence: int = 0) -> dict[str, Any]:
        return {kind: {"id": name, "type_id": sequence}}

    single = [piece("SpecialToken", end), piece("Sequence", "A")]
    tree["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, piece("Sequence", "B", 1)],
        "special_tokens": {end: {"id": end, "ids": [tokenizer.end_id], "tokens": [end]}},
    }
    return _json(tree)


def _json(tree: Any) -> bytes:
    return json_text(tree, indent=1, ensure_ascii=False).encode()


def model_card(
    trained: TrainedModel, tokenizer: Tokenizer, evaluation: Mapping[str, Any] | None = None
) -> str:
    """Return the text; `evaluation` is the line of the run's latest one."""
    config, model = trained.config, trained.config.model
    spans = spans_of_phases(config, range(min(trained.step, config.optim.steps)))
    training = {
        "steps": f"{trained.step:,}",
        "tokens per step, at the end": f"{config.tokens_per_step:,}",
        "segment length": f"{trained.segment_length:,}",
        "optimizer": f"{config.optim.name}, learning rate {config.optim.learning_rate:g}",
        "seed": str(config.seed),
    }
    for name in ("loss", "perplexity", "bits_per_byte", "bits_per_character"):
        if evaluation is not None and evaluation.get(name) is not None:
            training[f"validation {name.replace('_', ' ')}"] = f"{evaluation[name]:.4f}"
    settings = {
        name: json_text(value)
        for name, value in model.function_settings().items()
        if value not in (False, 0, ()) or name == "num_layers"
    }
    up_to = "" if isinstance(model.memory_length, int) else "up to "
    memory = (
        f"attention remembers {up_to}{model.longest_memory:,} tokens of hidden states per layer"
    )
    if model.num_deltanet_layers:
        memory = "Gated DeltaNet carries a state of fixed size" + (
            f", and {memory}" if model.num_attention_layers else ""
        )
    tokenizer_text = f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens"
    needs_sentencepiece = MODEL_NAME in (tokenizer_files(tokenizer) or {})
    return CARD.format(
        name=config.name,
        parameters=parameter_counts(model).total,
        step=trained.step,
        tokens=sum(phase.tokens_per_step * count for phase, count in spans),
        # Of whoever started the run: nothing that ends the code span.
        corpus=re.sub(
            r"[^\w.+ -]", "_", path_text(config.data.path).rstrip("/").rpartition("/")[2]
        ),
        model=model_in_words(config),
        memory=memory,
        tag="gated-deltanet" if model.num_deltanet_layers else "transformer-xl",
        requirement=", and sentencepiece for the tokenizer" if needs_sentencepiece else "",
        model_rows=_table({"tokenizer": tokenizer_text, **settings}),
        training_rows=_table(training),
    )


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {rows[name]} |" for name in rows)])


def write_huggingface(
    output: Path,
    trained: TrainedModel,
    tokenizer: Tokenizer,
    evaluation: Mapping[str, Any] | None = None,
) -> None:
    """Write the whole directory or nothing; `evaluation` is the line of the run's latest one."""
    with new_directory(output) as beside:
        for name, source in code_of_export().items():
            write_text(beside / f"{name}.py", source)
        tensors = {
            f"transformer.{name}": parameter.detach().contiguous()
            for name, parameter in trained.module.named_parameters()
        }
        write_weights(beside / WEIGHTS, tensors)
        for name, content in (tokenizer_files(tokenizer) or {}).items():
            with atomic_write(beside / name) as file:
                file.write(content)
        write_json(beside / "generation_config.json", _generation_config(tokenizer.end_id))
        write_text(beside / "README.md", model_card(trained, tokenizer, evaluation))
        write_json(beside / "config.json", _config(trained, tokenizer.end_id))


def code_of_export() -> dict[str, str]:
    """Return the source of the export's modules by name."""
    heading = HEADING.format(version=code_version())
    configuration, modeling = (f"{__package__}.{name}" for name in CODE[:2])
    replaced = {
        **dict.fromkeys(("ConfigError", "abbreviated"), configuration),
        **dict.fromkeys(("DropoutStream", "backend_for", "delta_rule_for"), modeling),
    }
    texts: dict[str, str] = {}
    home: dict[Key, str] = {}
    for name in CODE:
        root = f"{__package__}.{name}"
        texts[name], own = bundle(root, heading, replaced, dict(home))
        home |= dict.fromkeys(own, name)
    return texts


def _config(trained: TrainedModel, end_id: int) -> dict[str, Any]:
    return {
        **to_tree(trained.config.model),
        "architectures": [CLASSES["AutoModelForCausalLM"].rpartition(".")[2]],
        "auto_map": CLASSES,
        "model_type": "xl-pretrain",
        "segment_length": trained.segment_length,
        "trained_keys": trained.trained_keys,
        "document_end_id": end_id,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "torch_dtype": "float32",
    }


def _generation_config(end_id: int) -> dict[str, Any]:
    """As `pretrain generate`: no document is empty, so its end never follows another's."""
    return {
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "bad_words_ids": [[end_id, end_id]],
    }
