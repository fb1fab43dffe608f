"""The weights of an adopted model: read from a Hugging Face directory, and written back."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from foundation.files import write_json
from foundation.typed_values import FileName
from pretrain.checkpoint.pieces import open_tensors
from pretrain.errors import CheckpointError
from pretrain.model.adopted import AdoptedModel
from pretrain.model.transformers_modules import (
    CONFIG,
    configuration,
    empty_inner,
    library,
    read_config,
    read_foreign,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = "inner."  # AdoptedModel's names of parameters begin with it
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


@dataclass(frozen=True)
class _Index:
    """What INDEX has: the file of each tensor."""

    weight_map: dict[str, FileName]


def check_source(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise an error unless the directory still has the model that was adopted."""
    if read_config(directory) != config:
        raise CheckpointError(
            f"{directory / CONFIG} is not the one that was adopted; adopt it again, to a new file"
        )
    _files_of_tensors(directory)


@contextlib.contextmanager
def open_weights(directory: Path, tree: Mapping[str, Any]) -> Iterator[Callable[[str], Tensor]]:
    """Yield a function that reads a parameter of AdoptedModel, by name, from the directory.

    `tree` is the directory's config.json. If its files have other names of tensors than the model,
    transformers converts all of them, in host memory.
    """
    files = _files_of_tensors(directory)
    shapes = {name: parameter.shape for name, parameter in empty_inner(tree).named_parameters()}
    has_all = shapes.keys() <= files.keys()
    converted = {} if has_all else _converted(directory, tree, shapes.keys())
    with contextlib.ExitStack() as stack:
        used = {files[name] for name in shapes} if has_all else ()
        read = {name: stack.enter_context(open_tensors(directory / name)) for name in used}

        def weight(name: str) -> Tensor:
            own = name.removeprefix(PREFIX)
            value = read[files[own]].get_tensor(own) if has_all else converted[own]
            if value.shape != shapes[own] or not value.is_floating_point():
                raise CheckpointError(
                    f"{directory}: {own} has shape {list(value.shape)} of {value.dtype}, "
                    f"transformers expects {list(shapes[own])} of floats"
                )
            return value

        yield weight


def _converted(directory: Path, tree: Mapping[str, Any], names: Set[str]) -> dict[str, Tensor]:
    """Return the parameters as transformers makes them; CheckpointError if any is missing."""
    with library() as transformers:
        config, options = configuration(transformers, tree)
        inner, loading = transformers.AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            **options,
        )
    parameters = {name: parameter.detach() for name, parameter in inner.named_parameters()}
    if missing := sorted({*loading["missing_keys"], *(names - parameters.keys())}):
        raise CheckpointError(f"{directory} has no {missing[0]} ({len(missing)} are missing)")
    return parameters


def _files_of_tensors(directory: Path) -> dict[str, str]:
    """Return the file of each tensor; CheckpointError without safetensors."""
    if (directory / INDEX).is_file():
        files = read_foreign(_Index, directory / INDEX).weight_map
        names = sorted({*files.values()})
        if missing := [name for name in names if not (directory / name).is_file()]:
            raise CheckpointError(f"{directory} has no {missing[0]}, which its {INDEX} names")
        return files
    if not (directory / WEIGHTS).is_file():
        raise CheckpointError(
            f"{directory} has no {WEIGHTS}; weights are read from safetensors only"
        )
    with open_tensors(directory / WEIGHTS) as handle:
        return dict.fromkeys(handle.keys(), WEIGHTS)


def write_back(directory: Path, module: AdoptedModel, source: Path) -> None:
    """Write the model as its own class saves it, with the tokenizer of `source`.

    CheckpointError unless `source` still has the model that was adopted.
    """
    assert module.config.facts is not None
    check_source(source, module.config.facts.config)
    module.inner.save_pretrained(directory)
    for path in directory.glob("*.safetensors"):  # they are made readable by their owner only
        path.chmod(directory.stat().st_mode & 0o666)
    own = module.config.facts.config
    tree = {name: value for name, value in own.items() if name not in ("torch_dtype", "dtype")}
    write_json(directory / CONFIG, {**tree, "dtype": "float32"})
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
