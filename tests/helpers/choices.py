"""The settings that are one of several names, or a list of them, so that tests miss none."""

from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

from foundation.settings import settings_of
from pretrain.config.mixer import kinds_here
from pretrain.config.run import ModelConfig


def choices_of(schema: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The path of every setting that is one of several names or a list of them, and those names."""
    for each in settings_of(schema):
        hint = get_args(each.hint)[0] if is_list(each.hint) else each.hint
        names = get_args(hint) if get_origin(hint) is Literal else ()
        if names and all(isinstance(name, str) for name in names):
            yield each.name, tuple(name for name in names if name)


def is_list(hint: Any) -> bool:
    return get_origin(hint) is tuple


HINTS = {each.name: each.hint for each in settings_of(ModelConfig)}
MODEL_CHOICES: list[tuple[str, Any]] = [
    (name, (value,) if is_list(HINTS[name]) else value)
    for name, values in choices_of(ModelConfig)
    for value in values
]
MODEL_CHOICES += [("layer_kinds", (kind,)) for kind in kinds_here()]
