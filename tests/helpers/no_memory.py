"""A run that finds no memory, once at each of the places:
`python -m tests.helpers.no_memory PLACE[,PLACE] EXPERIMENT --run-dir RUN KEY=VALUE ...`
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from pretrain.checkpoint.checkpointer import Checkpointer
from pretrain.cli import main
from pretrain.engines.engine import TorchEngine
from tests.helpers.memory_limit import memory_limit


def too_much(*_: Any) -> None:
    torch.empty(1 << 60, dtype=torch.uint8)


def in_backward(engine: TorchEngine, *_: Any) -> None:
    next(engine.module.parameters()).register_hook(too_much)


def run_out_at(place: str) -> None:
    """In the first call; of saves because later threads may get the stacks of ended ones."""
    match place:
        case "save":
            where, name, act = Checkpointer, "save", None
        case "backward":
            where, name, act = TorchEngine, "forward_backward", in_backward
        case _:
            where, name, act = TorchEngine, place, too_much
    real = getattr(where, name)

    def calling(*arguments: Any, **options: Any) -> Any:
        setattr(where, name, real)
        with contextlib.nullcontext() if act else memory_limit(1 << 20):
            if act:
                act(*arguments)
            return real(*arguments, **options)

    setattr(where, name, calling)


if __name__ == "__main__":
    for each in sys.argv[1].split(","):
        run_out_at(each)
    sys.exit(main(["train", *sys.argv[2:]]))
