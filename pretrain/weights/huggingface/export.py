"""Writing the directory that `AutoModelForCausalLM.from_pretrained` reads.

DIR/config.json, generation_config.json     settings, and what `generate` does by default
DIR/{configuration,modeling,tokenization}_xl_pretrain.py     code that needs nothing of ours
DIR/model.safetensors      every parameter once, in float32; above 5 GB in several files, with an
                           index
DIR/tokenizer.model or tokenizer.json, tokenizer_config.json    the tokenizer of the corpus, if
                           transformers has its kind
DIR/README.md              the model card
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from data_pipeline.config_loader import to_tree
from data_pipeline.files import write_json, write_text
from data_pipeline.tokenizer import Tokenizer
from pretrain.rundir.code_version import code_version
from pretrain.weights.export import WEIGHTS, new_directory, write_weights
from pretrain.weights.huggingface.bundle import Bundle, bundle
from pretrain.weights.huggingface.model_card import model_card
from pretrain.weights.huggingface.tokenizer_files import tokenizer_files
from pretrain.weights.trained_model import TrainedModel

LARGEST_FILE_BYTES = 5 * 10**9
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
    largest_file: int = LARGEST_FILE_BYTES,
) -> None:
    """Write the whole directory or nothing; `evaluation` is the line of the run's latest one."""
    with new_directory(output) as beside:
        for name, source in code_of_export().items():
            write_text(beside / f"{name}.py", source)
        tensors = {
            f"transformer.{name}": parameter.detach().contiguous()
            for name, parameter in trained.module.named_parameters()
        }
        _write_all_weights(beside, tensors, largest_file)
        for name, content in (tokenizer_files(tokenizer) or {}).items():
            (beside / name).write_bytes(content)
        write_json(beside / "generation_config.json", _generation_config(tokenizer.end_id))
        write_text(beside / "README.md", model_card(trained, tokenizer, evaluation))
        write_json(beside / "config.json", _config(trained, tokenizer.end_id))


def code_of_export() -> dict[str, str]:
    """Return the source of the export's modules by name."""
    heading = HEADING.format(version=code_version())
    configuration, modeling, tokenization = (f"{__package__}.{name}" for name in CODE)
    replaced = {
        **dict.fromkeys(("ConfigError", "abbreviated"), configuration),
        **dict.fromkeys(("DropoutStream", "path_for"), modeling),
    }
    bundles: dict[str, Bundle] = {}
    for root in (configuration, modeling, tokenization):
        bundles[root.rpartition(".")[2]] = bundle(root, heading, replaced, dict(bundles))
    return {name: each.text for name, each in bundles.items()}


def _write_all_weights(directory: Path, tensors: Mapping[str, Tensor], largest_file: int) -> None:
    parts = list(parts_of(tensors, largest_file))
    if len(parts) == 1:
        write_weights(directory / WEIGHTS, tensors)
        return
    homes: dict[str, str] = {}
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        write_weights(directory / name, part)
        homes |= dict.fromkeys(part, name)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": homes}
    write_json(directory / f"{WEIGHTS}.index.json", index)


def parts_of(tensors: Mapping[str, Tensor], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors in order, at most `most_bytes` together, or one that is larger."""
    part: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if part and sum(each.nbytes for each in part.values()) + tensor.nbytes > most_bytes:
            yield part
            part = {}
        part[name] = tensor
    yield part


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
