"""The settings that are one of several names, read from the dataclasses, so tests miss none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from data_pipeline.setting_tree import settings_of
from pretrain.config.model import ModelConfig


def choices_of(schema: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The path of every setting that is one of several names, and those names."""
    for each in settings_of(schema):
        names = get_args(each.hint) if get_origin(each.hint) is Literal else ()
        if names and all(isinstance(name, str) for name in names):
            yield each.name, tuple(name for name in names if name)


MODEL_CHOICES = [(name, value) for name, values in choices_of(ModelConfig) for value in values]
