"""Losses of a few tiny models in float64; a refactor must leave `losses.json` as it is.

`python -m tests.golden.record_losses` writes the file again; such a commit says which numerics
changed and why.
"""

import json
from pathlib import Path
from typing import Any

from pretrain.model.dropout import DropoutStream
from tests.helpers.models import VARIANTS, random_starts, random_tokens, stream_nll, tiny_model

LOSSES = Path(__file__).with_name("losses.json")

CASES: dict[str, dict[str, Any]] = {
    **VARIANTS,
    "same_length": {"same_length": True},
    "dropout": {"dropout": 0.2, "attention_dropout": 0.1},
}


def losses_of(case: str) -> list[float]:
    """The mean loss of each of three segments with memory and document starts."""
    model = tiny_model(**CASES[case])
    stream_BT, starts_BT = random_tokens(3, 31), random_starts(3, 31)
    dropout = DropoutStream(seed=1, step=2, lanes=[4, 5, 6]) if case == "dropout" else None
    nll_BT, _ = stream_nll(model, stream_BT, [10, 10, 10], starts_BT, dropout)
    return [part.mean().item() for part in nll_BT.split(10, dim=1)]


if __name__ == "__main__":
    LOSSES.write_text(json.dumps({case: losses_of(case) for case in CASES}, indent=1) + "\n")
