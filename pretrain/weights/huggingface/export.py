"""Writing the directory that `AutoModelForCausalLM.from_pretrained` reads.

DIR/config.json, generation_config.json     settings, and what `generate` does by default
DIR/{configuration,modeling,tokenization}_xl_pretrain.py     code that runs without this project
DIR/model.safetensors      every parameter once, in float32
DIR/tokenizer.model or tokenizer.json, tokenizer_config.json    the tokenizer of the corpus, if
                           transformers has its kind
DIR/README.md              the model card
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from data_pipeline.tokenizer import Tokenizer
from foundation.files import atomic_write, write_json, write_text
from foundation.typed_values import to_tree
from pretrain.config.model import ModelConfig
from pretrain.config.phases import SettingChange
from pretrain.rundir.code_version import code_version
from pretrain.weights.export import (
    HUGGING_FACE_PREFIX,
    HUGGING_FACE_TYPE,
    WEIGHTS,
    TrainedModel,
    new_directory,
    write_weights,
)
from pretrain.weights.huggingface.bundle import Key, bundle, module
from pretrain.weights.huggingface.model_card import model_card
from pretrain.weights.huggingface.tokenizer_files import tokenizer_files

CODE = ("configuration_xl_pretrain", "modeling_xl_pretrain", "tokenization_xl_pretrain")
CLASSES = {
    "AutoConfig": f"{CODE[0]}.XLPretrainConfig",
    "AutoModelForCausalLM": f"{CODE[1]}.XLPretrainForCausalLM",
}
HEADING = """# Copied from the source of xl-pretrain {version}; Apache License 2.0.
# The module that each part comes from stands above it."""


def write_huggingface(
    output: Path,
    trained: TrainedModel,
    tokenizer: Tokenizer,
    evaluation: Mapping[str, Any] | None = None,
    changes: Sequence[SettingChange] = (),
) -> None:
    """Write the whole directory or nothing; `evaluation` and `changes` are for the model card."""
    with new_directory(output) as beside:
        for name, source in code_of_export(trained.config.model).items():
            write_text(beside / f"{name}.py", source)
        tensors = {
            f"{HUGGING_FACE_PREFIX}{name}": parameter.detach().contiguous()
            for name, parameter in trained.module.named_parameters()
        }
        write_weights(beside / WEIGHTS, tensors)
        for name, content in (tokenizer_files(tokenizer) or {}).items():
            with atomic_write(beside / name) as file:
                file.write(content)
        write_json(beside / "generation_config.json", _generation_config(tokenizer.end_id))
        write_text(beside / "README.md", model_card(trained, tokenizer, evaluation, changes))
        write_json(beside / "config.json", _config(trained, tokenizer.end_id))


def code_of_export(model: ModelConfig) -> dict[str, str]:
    """Return the source of the export's three files, by module name."""
    heading = HEADING.format(version=code_version())
    configuration, modeling = (f"{__package__}.{name}" for name in CODE[:2])
    replaced = {
        **dict.fromkeys(
            ("ConfigError", "abbreviated", "adopted_facts", "mixer_facts"), configuration
        ),
        **dict.fromkeys(("DropoutStream", "backend_for", "mixer_class"), modeling),
    }
    facts: dict[str, Key] = {}
    modules: dict[str, Key] = {}
    for mixer in model.mixers_used:
        facts[mixer.kind] = (f"{mixer.package}.facts", type(mixer).__name__)
        modules[mixer.kind] = (f"{mixer.package}.module", mixer.module)
        own = f"{mixer.package}.exported"
        if find_spec(own):  # it replaces definitions of the same names
            replaced |= dict.fromkeys(module(own).definitions, own)
    tables = {CODE[0]: ("FACTS", facts), CODE[1]: ("MIXERS", modules)}
    texts: dict[str, str] = {}
    home: dict[Key, str] = {}
    for name in CODE:
        table, kinds = tables.get(name, ("", {}))
        root = f"{__package__}.{name}"
        text, own = bundle(root, heading, replaced, dict(home), [*kinds.values()])
        lines = (f'{table}["{kind}"] = {class_name}\n' for kind, (_, class_name) in kinds.items())
        texts[name] = "\n\n".join([text, "".join(lines)]) if kinds else text
        home |= dict.fromkeys(own, name)
    return texts


def _config(trained: TrainedModel, end_id: int) -> dict[str, Any]:
    return {
        **to_tree(trained.config.model),
        "architectures": [CLASSES["AutoModelForCausalLM"].rpartition(".")[2]],
        "auto_map": CLASSES,
        "model_type": HUGGING_FACE_TYPE,
        "segment_length": trained.segment_length,
        "trained_keys": trained.trained_keys,
        "document_end_id": end_id,
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "torch_dtype": "float32",
    }


def _generation_config(end_id: int) -> dict[str, Any]:
    """Return defaults of `generate`: as in `pretrain generate`, no end of a document repeats."""
    return {
        "bos_token_id": end_id,
        "eos_token_id": end_id,
        "pad_token_id": end_id,
        "bad_words_ids": [[end_id, end_id]],
    }
