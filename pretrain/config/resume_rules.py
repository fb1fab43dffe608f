"""Fields of settings that say whether they may change when a run is resumed. Torch-free.

A setting may change if it does not change which model learns from which tokens. Its field says so
in its metadata. A section's mark holds for all settings in it, except those that have their own.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

from foundation.settings import setting

_MAY_CHANGE = "may_change"


def changeable(*default_and_range: Any, **options: Any) -> Any:
    """A field that may change when a run is resumed; the arguments are those of `setting`."""
    return setting(*default_and_range, metadata={_MAY_CHANGE: True}, **options)


def fixed(*default_and_range: Any, **options: Any) -> Any:
    """A field that must not change: with another value it would be another run."""
    return setting(*default_and_range, metadata={_MAY_CHANGE: False}, **options)


def may_change(schema: Any, key: str) -> bool:
    """Whether the setting `key`, such as `optim.steps`, of a `schema` may change.

    KeyError if neither it nor a section that it is in is marked.
    """
    mark: bool | None = None
    for name in key.split("."):
        known = {each.name: each for each in fields(schema)} if is_dataclass(schema) else {}
        if name not in known:
            break  # a key of a setting that is a mapping: the setting's mark holds
        mark = known[name].metadata.get(_MAY_CHANGE, mark)
        schema = get_type_hints(schema)[name]
    if mark is None:
        raise KeyError(f"{key}: found neither changeable() nor fixed(); mark the field")
    return mark
