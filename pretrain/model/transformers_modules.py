"""Modules of transformers, built from the config.json of a model that was adopted.

Someone else's directory is read as JSON and safetensors alone: no code in it is run, and nothing is
fetched.
"""

import contextlib
import importlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from foundation.errors import ConfigError, shown
from foundation.files import read_value, write_json

CONFIG = "config.json"
LARGEST_JSON = 1 << 26
LONGEST_REASON = 300
OLDEST = (5, 23)  # first version whose cache lets all kinds of layers start from a state
KERNELS = ("fla", "mamba_ssm", "causal_conv1d")  # transformers would run them also on a CPU


@contextlib.contextmanager
def library() -> Iterator[Any]:
    """Yield transformers without a network, and on a CPU without kernels for GPUs.

    ConfigError if it is missing or too old.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    hidden = []
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, which it imports, warns
        hidden = [*{*KERNELS} - sys.modules.keys()]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    try:
        transformers: Any = importlib.import_module("transformers")
        version = transformers.__version__
        if tuple(map(int, version.split(".")[:2])) < OLDEST:
            raise ConfigError(
                f"found transformers {version}; models of others need {OLDEST[0]}.{OLDEST[1]} or "
                "later: docs/hybrids.md says how to install it"
            )
        transformers.logging.set_verbosity(logging.CRITICAL)  # its errors are raised, too
        transformers.logging.disable_progress_bar()
        yield transformers
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def read_config(directory: Path) -> dict[str, Any]:
    """Return a directory's config.json; ConfigError if it is not a model that can be adopted."""
    path = directory / CONFIG
    if not path.is_file():
        raise ConfigError(f"{directory} has no {CONFIG}; expected a checkpoint of Hugging Face")
    tree = read_foreign(dict[str, Any], path)
    if not isinstance(tree.get("model_type"), str):
        raise ConfigError(f"{path} names no model_type; expected a checkpoint of Hugging Face")
    if tree.get("quantization_config"):
        raise ConfigError(f"{path}: found quantized weights, expected whole ones to train")
    return tree


def read_foreign(kind: Any, path: Path) -> Any:
    """Return a JSON file of someone else as a value of a type; ConfigError if it is not."""
    try:
        return read_value(kind, path, LARGEST_JSON, is_open=True)
    except ValueError as error:
        raise ConfigError(f"{path} is corrupted ({error}); fetch the directory again") from None


def empty_inner(tree: Mapping[str, Any]) -> nn.Module:
    """Return the module of transformers for a config.json, with parameters on `meta`."""
    with library() as transformers, _parameters_on_meta():
        if (kind := tree["model_type"]) not in transformers.CONFIG_MAPPING:
            own = " and asks for code of its own, which is not run" if "auto_map" in tree else ""
            raise ConfigError(
                f"{CONFIG}: transformers {transformers.__version__} has no model_type "
                f"{shown(kind)}{own}; use a version that has it"
            )
        try:
            config, options = configuration(transformers, tree)
            inner = transformers.AutoModelForCausalLM.from_config(config, **options)
            inner.tie_weights()
        except Exception as error:  # someone else wrote the settings: any error may come
            raise ConfigError(
                f"{CONFIG}: transformers {transformers.__version__} cannot build it: "
                f"{reason(error)}"
            ) from None
    made = type(inner).__name__
    named = tree.get("architectures") or made
    if (first := named[0] if isinstance(named, list) else named) != made:
        raise ConfigError(
            f"{CONFIG} is of a {shown(first)}, but transformers makes a {made}; save that one, and "
            "adopt it"
        )
    kept = [name for name, _ in inner.named_buffers() if name in inner.state_dict()]
    if kept:
        raise ConfigError(
            f"{made} keeps {kept[0]}, which is no parameter: checkpoints of a run would not have it"
        )
    return inner


def reason(error: Exception) -> str:
    """Return an error of transformers as the end of a line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:LONGEST_REASON]}"


def configuration(transformers: Any, tree: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the configuration as transformers reads it, and what else it takes to build it."""
    with tempfile.TemporaryDirectory() as folder:
        write_json(Path(folder) / CONFIG, tree)
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kinds = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in kinds:
        raise ValueError("no causal language model has such a configuration")
    # config.json could name a kernel from elsewhere.
    attention = "sdpa" if kinds[type(config)]._supports_sdpa else "eager"
    options = {"attn_implementation": attention, "dtype": torch.float32}
    return config, {**options, "trust_remote_code": False}


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put each parameter on `meta` when a module registers it; buffers are computed as usual."""
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def fill_parameters(inner: nn.Module, value_of: Callable[[str, torch.Size], Tensor]) -> None:
    """Replace each parameter on `meta` and register it again, which ZeRO-3's hook needs."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
    for path, module in inner.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if parameter not in made:
                value = value_of(f"{path}.{name}" if path else name, parameter.shape)
                made[parameter] = nn.Parameter(value, parameter.requires_grad)
            setattr(module, name, made[parameter])


def new_cache(inner: Any) -> Any:
    """Return an empty cache of transformers for a module."""
    with library() as transformers:
        return transformers.DynamicCache(config=inner.config)
