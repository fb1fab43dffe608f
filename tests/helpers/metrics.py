"""Lines of metrics.jsonl as training writes them."""

from typing import Any


def train_line(step: int, loss: float | None = 1.0, **more: Any) -> dict[str, Any]:
    """The line of a step, with `more` in it or instead of what it has."""
    usual = {"tokens": 8 * step, "learning_rate": 0.1, "grad_norm": 1.0, "skipped": False}
    return {"kind": "train", "step": step, "loss": loss, **usual, **more}
