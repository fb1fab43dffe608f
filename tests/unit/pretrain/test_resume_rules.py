from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, get_type_hints

import pytest

from pretrain.config.resume_rules import changeable, fixed, may_change
from pretrain.config.run import RunConfig

FIXED = ("name", "seed", "initial_weights", "engine.kind",
         "data.lanes", "data.segment_length", "data.mixture")  # fmt: skip
FIXED_SECTIONS = ("model.", "optim.")
CHANGEABLE = ("optim.steps",)


def settings_of(schema: Any, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for each in fields(schema):
        if is_dataclass(hints[each.name]):
            yield from settings_of(hints[each.name], f"{prefix}{each.name}.")
        else:
            yield f"{prefix}{each.name}"


@pytest.mark.parametrize("key", list(settings_of(RunConfig)))
def test_every_setting_says_whether_it_may_change_when_a_run_is_resumed(key):
    is_fixed = key in FIXED or (key.startswith(FIXED_SECTIONS) and key not in CHANGEABLE)
    assert may_change(RunConfig, key) is not is_fixed


def test_a_setting_without_a_mark_is_an_error_and_the_innermost_mark_counts():
    @dataclass(frozen=True)
    class Inner:
        plain: int = 1
        pinned: int = fixed(2)

    @dataclass(frozen=True)
    class Outer:
        inner: Inner = changeable(default_factory=Inner)
        extra: dict[str, int] = changeable(default_factory=dict)
        unmarked: int = field(default=3)

    Outer.__annotations__ = {"inner": Inner, "extra": dict[str, int], "unmarked": int}
    assert may_change(Outer, "inner.plain")
    assert not may_change(Outer, "inner.pinned")
    assert may_change(Outer, "extra.zero_optimization.stage")
    with pytest.raises(KeyError, match="unmarked: found neither"):
        may_change(Outer, "unmarked")
