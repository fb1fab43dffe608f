"""The model card of an export, filled in with what is known about the run."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from data_pipeline.tokenizer import MODEL_NAME, Tokenizer
from foundation.paths import path_text
from foundation.typed_values import json_text
from pretrain.config.phases import SettingChange, settings_at, spans_of_phases
from pretrain.costs.flops import model_in_words, parameter_counts
from pretrain.rundir.evaluated_text import EvaluatedText
from pretrain.terminal.text import format_number
from pretrain.weights.export import TrainedModel
from pretrain.weights.huggingface.tokenizer_files import tokenizer_files

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


def model_card(
    trained: TrainedModel,
    tokenizer: Tokenizer,
    evaluation: Mapping[str, Any] | None = None,
    changes: Sequence[SettingChange] = (),
) -> str:
    """Return the card's text; `evaluation` is the latest evaluation's line of metrics, `changes`
    those that resumes made to settings of updates."""
    config, model = trained.config, trained.config.model
    spans = spans_of_phases(config, range(min(trained.step, config.optim.steps)))
    last = settings_at(config, max(0, trained.step - 1), changes)
    training = {
        "steps": f"{trained.step:,}",
        "tokens per step, at the end": f"{config.tokens_per_step:,}",
        "segment length": f"{trained.segment_length:,}",
        "optimizer": f"{last.optim.name}, learning rate {last.optim.learning_rate:g}",
        "seed": str(config.seed),
    }
    for step in dict.fromkeys(change.step for change in changes if change.step < trained.step):
        training[f"changed after step {step:,}"] = "; ".join(
            f"{change.setting}: {json_text(change.old)}, then {json_text(change.new)}"
            for change in changes
            if change.step == step
        )
    for name in ("loss", "perplexity", "bits_per_byte", "bits_per_character"):
        if evaluation is not None and evaluation.get(name) is not None:
            training[f"validation {name.replace('_', ' ')}"] = f"{evaluation[name]:.4f}"
    text = EvaluatedText.of_line(evaluation)
    training["validated on"] = text.description
    training["standard error"] = format_number(text.standard_error, ".4f")
    settings = {
        name: json_text(value)
        for name, value in model.function_settings().items()
        if value not in (False, 0, (), {}, (False,), [False]) or name == "num_layers"
    }
    mixers = sorted(model.mixers_used, key=lambda mixer: mixer.has_rows)
    title = "Transformer-XL" if mixers[0].has_rows else mixers[0].title
    tokenizer_text = f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens"
    needs_sentencepiece = MODEL_NAME in (tokenizer_files(tokenizer) or {})
    return CARD.format(
        name=config.name,
        parameters=parameter_counts(model).total,
        step=trained.step,
        tokens=sum(phase.tokens_per_step * count for phase, count in spans),
        # A path may have characters that end the code span.
        corpus=re.sub(
            r"[^\w.+ -]", "_", path_text(config.data.path).rstrip("/").rpartition("/")[2]
        ),
        model=model_in_words(config),
        memory=", and ".join(mixer.memory_text(model) for mixer in mixers),
        tag=title.lower().replace(" ", "-"),
        requirement=", and sentencepiece for the tokenizer" if needs_sentencepiece else "",
        model_rows=_table({"tokenizer": tokenizer_text, **settings}),
        training_rows=_table(training),
    )


def _table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {rows[name]} |" for name in rows)])
