"""The sides of `python -m benchmarks peers`, each in a process of its own: their code and ours.

Their code is imported from a checkout and is not changed on disk. What today's torch needs is
patched in the process that imports it, and each patch is reported. For all sides, models and
weights have the original's names.
"""

from __future__ import annotations

import importlib
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from pretrain.config.run import OptimConfig
from pretrain.distributed.threads import keep_freed_memory
from pretrain.model.cached import Stream, new_stream
from pretrain.weights.original import import_state
from tests.helpers.original_settings import config_of_original

Weights = dict[str, np.ndarray]
CLIP_NORM = 0.25


@dataclass(frozen=True)
class Case:
    """One model, by the original's names of its settings, and how it is trained."""

    name: str
    model: Mapping[str, Any]
    segment_length: int
    lanes: int
    dropout: float = 0.0
    learning_rate: float = 2.5e-4
    dtype: str = "float32"
    init_std: float = 0.02
    device: str = "cpu"


class Side(Protocol):
    """What one side can do with a case's model; tokens and targets are [B, L]."""

    def load(self, case: Case, weights: Weights | None) -> None:
        """Build the model with these weights, or with random ones."""
        ...

    def weights(self) -> Weights:
        """Return the weights under the original's names."""
        ...

    def train(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Take a training step that carries memory over; return the mean loss."""
        ...

    def evaluate(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Return the mean loss of a segment, with memory carried over."""
        ...


def serve(connection: Connection, name: str, checkout: Path | None, threads: int) -> None:
    """Answer requests (method, arguments) with (True, result) until one fails: (False, message)."""
    torch.set_num_threads(threads)
    try:
        worker = Worker(*SIDES[name](checkout))
        connection.send((True, worker.patches))
        while True:
            method, arguments = connection.recv()
            connection.send((True, getattr(worker, method)(*arguments)))
    except Exception as error:
        traceback.print_exc()
        connection.send((False, f"{type(error).__name__}: {error}"))


class Worker:
    """A side, the text it reads, and its clock."""

    def __init__(self, side: Side, patches: list[str]) -> None:
        self.patches = patches
        self._side = side

    def load(self, case: Case, text: bytes, weights: Weights | None = None) -> None:
        """Build the case's model; start at the beginning of the text, one part of it per lane."""
        self._side.load(case, weights)
        self._length, self._offset = case.segment_length, 0
        tokens = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        width = len(tokens) // case.lanes
        self._tokens_BT = tokens[: case.lanes * width].view(case.lanes, width)

    def weights(self) -> Weights:
        return self._side.weights()

    def train(self, segments: int) -> tuple[float, list[float]]:
        """Train on the next segments; return CPU seconds and losses."""
        return self._timed(self._side.train, segments)

    def evaluate(self, segments: int) -> tuple[float, list[float]]:
        """Evaluate the next segments; return CPU seconds and losses."""
        return self._timed(self._side.evaluate, segments)

    def _timed(
        self, work: Callable[[Tensor, Tensor], Tensor], segments: int
    ) -> tuple[float, list[float]]:
        start = time.process_time()  # user and system time of all threads
        losses = []
        for _ in range(segments):
            end = self._offset + self._length
            tokens_BL = self._tokens_BT[:, self._offset : end]
            targets_BL = self._tokens_BT[:, self._offset + 1 : end + 1]
            losses.append(work(tokens_BL, targets_BL).item())
            self._offset = end
        return time.process_time() - start, losses


class TheirSide:
    """The original's model or NVIDIA's, trained and evaluated as their train.py does."""

    def __init__(self, model_class: Callable[..., torch.nn.Module], is_nvidia: bool) -> None:
        self._model_class = model_class
        self._is_nvidia = is_nvidia

    def load(self, case: Case, weights: Weights | None) -> None:
        options = {"dtype": None} if self._is_nvidia else {}
        lengths = {"tgt_len": case.segment_length, "ext_len": 0}
        dropouts = {"dropout": case.dropout, "dropatt": 0.0}
        self._model = self._model_class(**case.model, **lengths, **dropouts, **options)
        self._model.to(case.device, getattr(torch, case.dtype))
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                if weights is None:
                    # Drawn in float32, as weights are passed to the other sides.
                    values = case.init_std * torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(values + name.endswith("layer_norm.weight"))
                else:
                    parameter.copy_(torch.from_numpy(weights[self._original_name(name)]))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=case.learning_rate)
        self._memory: Any = None

    def weights(self) -> Weights:
        state = self._model.state_dict()
        return {
            self._original_name(name): values.float().cpu().numpy()
            for name, values in state.items()
        }

    def train(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        self._model.train()
        self._model.zero_grad()
        loss = self._mean_loss(tokens_BL, targets_BL)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), CLIP_NORM)
        self._optimizer.step()
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        self._model.eval()
        return self._mean_loss(tokens_BL, targets_BL)

    def _mean_loss(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        # Both read time-major batches, as their iterators yield them.
        batch = tokens_BL.t().contiguous(), targets_BL.t().contiguous()
        if self._is_nvidia:
            loss_LB, self._memory = self._model(*batch, self._memory)
        else:
            loss_LB, *self._memory = self._model(*batch, *(self._memory or ()))
        return loss_LB.mean()

    def _original_name(self, name: str) -> str:
        if not self._is_nvidia:
            return name
        for kind in ("weight", "bias"):
            theirs = {"weight": "crit.out_layers_weights.", "bias": "crit.out_layers_biases."}[kind]
            if name.startswith(theirs):
                return f"crit.out_layers.{name.removeprefix(theirs)}.{kind}"
        return name


class OurSide:
    """This project's model with the weights that `pretrain import-original` would read."""

    def load(self, case: Case, weights: Weights | None) -> None:
        from benchmarks.model.training import training_step

        assert weights is not None, "the other side draws the weights"
        if case.device == "cpu":  # as `pretrain train` and `evaluate` do
            keep_freed_memory()
        config = replace(config_of_original(case.model), dropout=case.dropout)
        state = {name: torch.from_numpy(values) for name, values in weights.items()}
        self._model = import_state(state, config).to(case.device, getattr(torch, case.dtype))
        optim = OptimConfig(learning_rate=case.learning_rate, clip_norm=CLIP_NORM)
        self._step = training_step(self._model, optim)
        self._stream: Stream | None = None

    def weights(self) -> Weights:
        raise NotImplementedError("weights are drawn by the other side")

    def train(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        self._model.train()
        return self._step(torch.cat([tokens_BL, targets_BL[:, -1:]], dim=1))

    def evaluate(self, tokens_BL: Tensor, targets_BL: Tensor) -> Tensor:
        if self._stream is None:
            memory_length = self._model.config.longest_memory
            self._stream = new_stream(self._model, memory_length, tokens_BL.shape[1])
        return self._stream.nll_BL(tokens_BL, targets_BL).mean()


def original_side(checkout: Path | None) -> tuple[Side, list[str]]:
    """Import the original's model; return it and what was patched for that."""
    assert checkout is not None
    folders = [checkout / "pytorch", checkout / "pytorch" / "utils"]
    sys.path[:0] = [str(folder) for folder in folders]
    patches = ["sys.path gets the absolute paths of pytorch and pytorch/utils"]
    # Torch no longer allows masks of uint8. The original calls byte() only for masks.
    torch.Tensor.byte = torch.Tensor.bool  # type: ignore[method-assign]
    patches.append("Tensor.byte returns bool, for attention masks")
    if torch.version.cuda is None:
        torch.version.cuda = "0.0"
        patches.append('torch.version.cuda is "0.0", because it parses the version at import')
    return TheirSide(importlib.import_module("mem_transformer").MemTransformerLM, False), patches


def nvidia_side(checkout: Path | None) -> tuple[Side, list[str]]:
    """Import NVIDIA's model; return it and what was patched for that."""
    assert checkout is not None
    folder = checkout / "pytorch"
    sys.path.insert(0, str(folder))
    utils = types.ModuleType("utils")
    utils.__path__ = [str(folder / "utils")]
    sys.modules["utils"] = utils
    patches = [
        "sys.path gets the absolute path of pytorch",
        "the package utils is entered without its __init__, which needs dllogger and pynvml",
    ]
    return TheirSide(importlib.import_module("mem_transformer").MemTransformerLM, True), patches


def our_side(_: Path | None) -> tuple[Side, list[str]]:
    return OurSide(), []


SIDES: dict[str, Callable[[Path | None], tuple[Side, list[str]]]] = {
    "original": original_side,
    "NVIDIA": nvidia_side,
    "ours": our_side,
}
