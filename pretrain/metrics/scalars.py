"""Lines of metrics.jsonl as the scalars that dashboards draw. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOT_DRAWN = ("kind", "step", "time", "totals")


def scalars_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return name -> value: `loss` in a line of kind `train` is named `train/loss`."""
    return {
        f"{line['kind']}/{name}": value
        for name, value in line.items()
        if name not in _NOT_DRAWN and value is not None
    }
