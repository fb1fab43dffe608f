"""Fields of settings: which may change when a run is resumed, and least values. Torch-free.

A setting may change if it does not change which model learns from which tokens. Its field says so
in its metadata. A section's mark holds for all settings in it, except those that have their own.
"""

from __future__ import annotations

import re
from dataclasses import MISSING, field, fields, is_dataclass
from typing import Any, get_type_hints

from data_pipeline.errors import ConfigError
from data_pipeline.yaml_files import abbreviated

_MAY_CHANGE = "may_change"
LONGEST_NAME = 100
_NAME = re.compile(rf"(?![-.])[A-Za-z0-9._+-]{{1,{LONGEST_NAME}}}")


def changeable(default: Any = MISSING, *, default_factory: Any = MISSING) -> Any:
    """A field that may change when a run is resumed."""
    return _field(default, default_factory, may_change=True)


def fixed(default: Any = MISSING, *, default_factory: Any = MISSING) -> Any:
    """A field that must not change: with another value it would be another run."""
    return _field(default, default_factory, may_change=False)


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


def _field(default: Any, default_factory: Any, *, may_change: bool) -> Any:
    return field(
        default=default, default_factory=default_factory, metadata={_MAY_CHANGE: may_change}
    )


def require_at_least(minimum: int, section: str, settings: Any, *names: str) -> None:
    """Raise ConfigError for the first of these settings that is below the minimum."""
    for name in names:
        if (value := getattr(settings, name)) < minimum:
            raise ConfigError(f"{section}.{name}={value:g} must be {minimum} or more")


def require_name(setting: str, name: str) -> None:
    """Raise ConfigError unless `name` can name a directory and a job, and is no option."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{setting}: found {abbreviated(name)}, expected 1 to {LONGEST_NAME} letters, digits "
            "and . _ + -, not beginning with . or -; choose such a name"
        )
