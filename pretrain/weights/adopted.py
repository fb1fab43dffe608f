"""The weights of an adopted model: read from a Hugging Face directory, and written back."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from foundation.files import read_json, write_json
from foundation.paths import is_plain_name
from pretrain.checkpoint.pieces import open_tensors
from pretrain.errors import CheckpointError
from pretrain.model.adopted import AdoptedModel
from pretrain.model.transformers_modules import (
    CONFIG,
    LARGEST_JSON,
    configuration,
    empty_inner,
    library,
    read_config,
)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PREFIX = "inner."  # AdoptedModel's names of parameters begin with it
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip


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
    files, read = _files_of_tensors(directory), dict[str, Any]()
    names = {name for name, _ in empty_inner(tree).named_parameters()}
    with contextlib.ExitStack() as stack:
        if names <= files.keys():
            for file in {files[name] for name in names}:
                read[file] = stack.enter_context(open_tensors(directory / file))
            yield lambda name: read[files[own := name.removeprefix(PREFIX)]].get_tensor(own)
            return
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
        parameters = dict(inner.named_parameters())
        if missing := sorted({*loading["missing_keys"], *(names - parameters.keys())}):
            raise CheckpointError(f"{directory} has no {missing[0]} ({len(missing)} are missing)")
        yield lambda name: parameters[name.removeprefix(PREFIX)].detach()


def _files_of_tensors(directory: Path) -> dict[str, str]:
    """Return the file of each tensor; CheckpointError without safetensors."""
    if (directory / INDEX).is_file():
        tree = read_json(directory / INDEX, LARGEST_JSON)
        files = tree.get("weight_map") if isinstance(tree, dict) else None
        if not isinstance(files, dict) or not all(map(is_plain_name, files.values())):
            raise CheckpointError(
                f"{directory / INDEX} has no weight_map of file names; fetch the directory again"
            )
        return files
    if not (directory / WEIGHTS).is_file():
        raise CheckpointError(
            f"{directory} has no {WEIGHTS}; weights are read from safetensors only"
        )
    with open_tensors(directory / WEIGHTS) as handle:
        return dict.fromkeys(handle.keys(), WEIGHTS)


def write_back(directory: Path, module: AdoptedModel, source: Path) -> None:
    """Write the model as its own class saves it, with the tokenizer of `source`."""
    assert module.config.facts is not None
    module.inner.save_pretrained(directory)
    for path in directory.glob("*.safetensors"):  # they are made readable by their owner only
        path.chmod(directory.stat().st_mode & 0o666)
    own = module.config.facts.config
    tree = {name: value for name, value in own.items() if name not in ("torch_dtype", "dtype")}
    write_json(directory / CONFIG, {**tree, "dtype": "float32"})
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
